"""Forward kernel of attention over a list of sources: one online softmax, one source after the other.

A program owns a tile of rows, see `condense.ops.triton.device.rule`. Blocks of keys that all its rows see whole are
not masked. Keys and values are read through tensor descriptors ``[B, K, N, D]``, which return zeros past the end.

Where queries open groups (`Recall`), the sources are store and window, and the tokens of open groups are read from the
store. A word per group, with a bit per query of a tile, says which queries open it
(`condense.ops.triton.recall_choice_kernels`).

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, N entries of a source, G groups of g
tokens, D0 + D1 width of queries and keys, V0 + V1 of values: parts, see `condense.ops.triton.device.parts`. Descriptors
k0 to k3 and v0 to v3 read the first parts of up to four sources, k0_rest and so on the second parts; else None.
BM rows and BN keys per tile.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.rule import VARYING, begins_at_0, cut, program_rows, row_of_program, visible
from condense.ops.triton.device.softmax import Softmax, soft_cap

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("first", "stop", "room")


class OpenForm(namedtuple("OpenForm", "R g")):
    """The constants of a call in which queries open groups: R query heads per KV head, g tokens per group."""


class TileGroups(namedtuple("TileGroups", "group word count bit store s_store row")):
    """The groups that the queries of a tile open.

    group: pointer to the groups that any query opens. word: pointer to a word per group, with a bit per query that
    opens it. count: number of groups. bit: bit mask of each row's query in a word. store: pointers to exact keys and
    values. s_store: three strides of each. row: the `Row` to read there.
    """


class RowSource(namedtuple("RowSource", "k v b head level bias_at")):
    """One source as a program reads it.

    k, v: descriptors ``[B, K, N, width]`` in parts (`condense.ops.triton.device.parts`). b, head: the batch row and KV
    head to read. level: base-2 number added to the scores of all entries. bias_at: offset of this row's biases.
    """


@triton.jit
def where_seen(x, seen, other):
    """x ``[n, m]`` where it is seen, else ``other``.

    seen: an empty tuple if all is seen; ``(mask [n, m],)``; or ``(numbers [m], first [n], last [n])``, where row i sees
    numbers ``[first[i], last[i])``.
    """
    if len(seen) == 0:
        return x
    elif len(seen) == 1:
        return tl.where(seen[0], x, other)
    else:
        return tl.where((seen[0][None, :] >= seen[1][:, None]) & (seen[0][None, :] < seen[2][:, None]), x, other)


@triton.jit
def load_biases(bias):
    """Biases ``[1, BN]`` of a block of entries, base 2. bias: pointer to the biases of all rows, the `RowSource`, and
    the block's first entry.
    """
    biases, source, start = bias
    n = start + tl.arange(0, source.k[0].block_shape[2])
    return tl.load(biases + source.bias_at + n, mask=n < source.k[0].shape[2], other=0.0)[None, :]


@triton.jit
def _weigh(softmax, s, seen, level, bias, scale, CAP: tl.constexpr):
    """Weights ``[BM, BN]`` of keys with scores s in an online softmax, factor for earlier sums, and the new maximum.

    seen: as in `where_seen`. level: base-2 number added to all scores. bias: as in `load_biases`, or empty; level is 0
    with biases. CAP: soft cap, base 2, 0.0 for none.
    """
    SCALED: tl.constexpr = len(bias) > 0 or CAP > 0
    if CAP > 0:
        s = soft_cap(s * scale, CAP)[0] + level
    if len(bias) > 0:
        own = load_biases(bias)
        s = s + own if CAP > 0 else s * scale + own
    s = where_seen(s, seen, float("-inf"))
    # scale > 0, so the maximum can be taken before scaling: one fused multiply-add per score remains
    m = tl.maximum(softmax.m, tl.max(s, 1) if SCALED else tl.max(s, 1) * scale + level)
    safe = tl.where(m == float("-inf"), 0.0, m) if len(seen) > 0 else m
    p = tl.exp2(s - safe[:, None] if SCALED else s * scale - (safe - level)[:, None])
    alpha = tl.exp2(softmax.m - safe)
    return p, alpha, m


@triton.jit
def add_keys(softmax, q, k, v, seen, level, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Add a block of keys k and values v to an online softmax. seen, level, bias, scale, CAP: as in `_weigh`."""
    p, alpha, m = _weigh(softmax, products(q, k, PRECISION), seen, level, bias, scale, CAP)
    acc = add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION)
    return Softmax(acc, m, softmax.total * alpha + tl.sum(p, 1))


@triton.jit
def forward_keys(
    softmax, q, source, biases, lo, hi, first, last, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys ``[lo, hi)`` of one source to an online softmax; each row sees ``[first, last)``.

    biases: pointer to the biases of all rows, None for none. Values are loaded after the scores are computed, so that
    keys arrive earlier.
    """
    BN: tl.constexpr = source.k[0].block_shape[2]
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(source.k, [source.b, source.head, start, 0], BN)  # [BN, D]
        s = products(q, k, PRECISION)  # [BM, BN]
        bias = (biases, source, start) if biases is not None else ()
        p, alpha, m = _weigh(softmax, s, (n, first, last) if MASKED else (), source.level, bias, scale, CAP)
        total = softmax.total * alpha + tl.sum(p, 1)
        v = load_block(source.v, [source.b, source.head, start, 0], BN)  # [BN, Dv]
        softmax = Softmax(add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION), m, total)
    return softmax


@triton.jit
def source_of(k, k_rest, v, v_rest, level, s_bias, row):
    """The `RowSource` for a program's row. k_rest, v_rest: None without second parts."""
    bias_at = row.b.to(tl.int64) * s_bias[0] + row.head.to(tl.int64) * s_bias[1]
    return RowSource(parts(k, k_rest), parts(v, v_rest), row.b, row.head, level, bias_at)


@triton.jit
def over_source(
    KEYS: tl.constexpr, state, queries, source, bias, seen, scale,
    FROM_0: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add all keys of a source that queries see to ``state``, masked at both ends of the spans alone.

    KEYS: function that adds a range of keys, `forward_keys` or `condense.ops.triton.attend_backward.dq_keys`. seen: the
    span ``[first, last)`` of each row. FROM_0: as in `cut`.
    """
    first, last = seen
    lo, left, right, hi = cut(first, last, FROM_0, source.k[0].block_shape[2])
    if not FROM_0:
        state = KEYS(state, queries, source, bias, lo, left, first, last, scale, True, CAP, PRECISION)
    state = KEYS(state, queries, source, bias, left, right, first, last, scale, False, CAP, PRECISION)
    return KEYS(state, queries, source, bias, right, hi, first, last, scale, True, CAP, PRECISION)


@triton.jit
def chooser(row, choosers):
    """Index of the list of open groups for a KV head. choosers: lists per batch row, one for all KV heads or K."""
    return row.b.to(tl.int64) * choosers + tl.minimum(row.head, choosers - 1)


@triton.jit
def groups_of(lists, room, store, s_store, row, choosers, i, Q: tl.constexpr):
    """The `TileGroups` of a program. lists: pointers to `condense.ops.triton.recall_choice.OpenedGroups`. i: each row's
    query, counted from the first one that the lists are for. Q: queries per tile.
    """
    group_ptr, word_ptr, count_ptr = lists
    tile = chooser(row, choosers) * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)
    return TileGroups(
        group_ptr + tile * room, word_ptr + tile * room, tl.load(count_ptr + tile),
        tl.full(i.shape, 1, word_ptr.dtype.element_ty) << (i % Q), store, s_store, row,
    )  # fmt: skip


@triton.jit
def over_opened(
    ADD: tl.constexpr, state, queries, groups, scale, g: tl.constexpr, WIDTHS: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tokens of all groups that any query of the tile opens to ``state``; each row sees the tokens of groups
    that its query opens. ADD: function that adds a block of keys, such as `add_keys`.
    """
    store, strides, b, kvh = groups.store, groups.s_store, groups.row.b.to(tl.int64), groups.row.head.to(tl.int64)
    k_ptr, v_ptr = store[0] + b * strides[0] + kvh * strides[1], store[1] + b * strides[3] + kvh * strides[4]
    for start in range(0, groups.count * g, BN):
        t = start + tl.arange(0, BN)
        inside = t < groups.count * g
        group = tl.load(groups.group + t // g, mask=inside, other=0)
        word = tl.load(groups.word + t // g, mask=inside, other=0)
        token = (group * g + t % g).to(tl.int64)
        k = load_rows(k_ptr, token * strides[2], inside, WIDTHS[0], WIDTHS[1])  # [BN, D]
        v = load_rows(v_ptr, token * strides[5], inside, WIDTHS[2], WIDTHS[3])  # [BN, Dv]
        seen = (word[None, :] & groups.bit[:, None]) != 0  # [BM, BN]
        state = ADD(state, queries, k, v, (seen,), 0.0, (), scale, CAP, PRECISION)
    return state


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def attend_fwd_kernel(
    q_ptr,
    k0, k1, k2, k3, k0_rest, k1_rest, k2_rest, k3_rest, v0, v1, v2, v3, v0_rest, v1_rest, v2_rest, v3_rest,
    store, biases, lists, spans_ptr, out_ptr, lse_ptr,
    s_q, s_store, s_bias, s_spans, levels, K, R, choosers, L, first, stop, room,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, OPEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write output and natural log-sum-exp, as `condense.ops.triton.attend_call.results` makes them. scale > 0, base 2.

    OPEN: the `OpenForm` if queries open groups, else None. Without it store (pointers to its keys and values, which are
    read without descriptors), s_store, lists (see `groups_of`), choosers and room (length of a list) are None too.
    first, stop: the queries that are read, None for all.
    """
    k, k_rest = (k0, k1, k2, k3), (k0_rest, k1_rest, k2_rest, k3_rest)
    v, v_rest = (v0, v1, v2, v3), (v0_rest, v1_rest, v2_rest, v3_rest)
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = row_of_program(numbers, spans_ptr, K, KIND, s_spans)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    heads = R if OPEN is None else OPEN.R
    i, r, real = program_rows(first, L if stop is None else stop, heads, BM)
    head = kvh * heads + r
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)  # [BM, D]
    if OPEN is not None:
        groups = groups_of(lists, room, store, s_store, row, choosers, i - first, BM // OPEN.R)
    softmax = Softmax(zeros(BM, V0, V1), tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32))
    for n in tl.static_range(N):
        if OPEN is not None and n == 0:
            widths: tl.constexpr = (D0, D1, V0, V1)
            softmax = over_opened(add_keys, softmax, q, groups, scale, OPEN.g, widths, BN, CAP, PRECISION)
        else:
            source = source_of(k[n], k_rest[n], v[n], v_rest[n], levels[n], s_bias[n], row)
            seen = visible(n, i, row, spans, KIND)
            softmax = over_source(
                forward_keys, softmax, q, source, biases[n], seen, scale, begins_at_0(n, KIND), CAP, PRECISION
            )
    # 0 and -inf for rows that saw no key
    at_out = (b * L + i) * (K * heads) + head
    safe = tl.where(softmax.total > 0, softmax.total, 1.0)
    store_rows(out_ptr, at_out * (V0 + V1), [x / safe[:, None] for x in softmax.acc], real, V0, V1)
    lse = tl.where(softmax.total > 0, (softmax.m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + (b * K * heads + head) * L + i, lse, mask=real)
