"""Recall's attention over a prompt, given the groups that each query opens: one online softmax per row, forward and dq.

A program owns a tile of rows as in `condense.ops.triton.device.rule`: Q queries times the R query heads that share a KV
head. It reads three stretches of keys one after the other:

1. entries of closed groups; a row does not see those of groups that its query opens;
2. tokens of every group that any of its queries opens; a row sees those of groups that its query opens;
3. the window.

A word per group, with a bit per query, says which queries open it: `condense.ops.triton.recall_choice_kernels`.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, G groups of g tokens, T tiles,
D0 + D1 width of queries and keys, V0 + V1 of values. BM rows and BN keys per tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.attend_backward import backward_queries, dq_keys
from condense.ops.triton.attend_forward import VARYING, forward_keys, over_source, store_output
from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.records import RowSource, Rule, Start
from condense.ops.triton.device.rule import tile_rows, visible
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.softmax import Softmax
from condense.ops.triton.recall_choice_kernels import row_of_words
from condense.ops.triton.recall_score_kernels import row_of_program

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("first", "stop", "words", "room")


class Store(NamedTuple):
    """Exact tokens of one KV head. k, v: pointers to the first key and value. s_k, s_v: strides to the next."""

    k: Any
    v: Any
    s_k: Any
    s_v: Any


class TileGroups(NamedTuple):
    """The groups that the queries of a tile open.

    words: pointer to a word per closed group. group: pointer to the groups that any query opens. word: pointer to the
    words of these. count: how many these are. bit: the row's bit mask within a word.
    """

    words: Any
    group: Any
    word: Any
    count: Any
    bit: Any


@triton.jit
def bit_of(i, Q: tl.constexpr, words_ptr):
    """Bit mask of query i within the words of its tile of Q queries."""
    return tl.full(i.shape, 1, words_ptr.dtype.element_ty) << (i % Q)


@triton.jit
def _add_keys(softmax, q, k, v, seen, level, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax. seen ``[rows, n]``: whether a row sees a key. Scores are base 2, scale > 0.

    level: added to all scores; bias: each key's own ``[1, n]``, None for none.
    """
    s = products(q, k, PRECISION)
    if CAP > 0 or bias is not None:
        s, scale = soft_cap(s * scale, CAP)[0], 1.0
        if bias is not None:
            s += bias
    s = tl.where(seen, s, float("-inf"))
    m = tl.maximum(softmax.m, tl.max(s, 1) * scale + level)
    safe = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(s * scale - (safe - level)[:, None])
    alpha = tl.exp2(softmax.m - safe)
    acc = add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION)
    return Softmax(acc, m, softmax.total * alpha + tl.sum(p, 1))


@triton.jit
def _load_biases(biases, source, start):
    """Biases ``[1, n]`` of entries from ``start`` on."""
    n = (start + tl.arange(0, source.k[0].block_shape[2]))[None, :]
    return tl.load(biases + source.bias_at + n, mask=n < source.k[0].shape[2], other=0.0)


@triton.jit
def _load_entries(source, opened, start, closed, MASKED: tl.constexpr):
    """Load entries from ``start`` on; seen: whether a row sees each, which it does unless it opens the group.

    MASKED: the closed groups of some row may end among them.
    """
    BN: tl.constexpr = source.k[0].block_shape[2]
    n = start + tl.arange(0, BN)
    k = load_block(source.k, [source.b, source.head, start, 0], BN)
    v = load_block(source.v, [source.b, source.head, start, 0], BN)
    # a row of words is padded to whole blocks
    seen = (tl.load(opened.words + n)[None, :] & opened.bit[:, None]) == 0
    if MASKED:
        seen = seen & (n[None, :] < closed[:, None])
    return k, v, seen


@triton.jit
def _entries_between(
    ADD: tl.constexpr, state, queries, source, biases, opened, stretch, closed, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with a stretch ``[lo, hi)`` of entries; arguments as of `_over_entries`.

    MASKED: the closed groups of some row may end among them.
    """
    for start in range(stretch[0], stretch[1], source.k[0].block_shape[2]):
        k, v, seen = _load_entries(source, opened, start, closed, MASKED)
        state = ADD(
            state, queries, k, v, seen, source.level,
            _load_biases(biases, source, start) if biases is not None else None, scale, CAP, PRECISION,
        )  # fmt: skip
    return state


@triton.jit
def _over_entries(
    ADD: tl.constexpr, state, queries, source, biases, opened, closed, scale, CAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The state with the entries of closed groups; a row sees those of groups that it does not open.

    ADD: adds keys to a state, `_add_keys` or `_dq_add`. biases: pointer to the biases of all rows, base 2, None for
    none. closed: closed groups of each row.
    """
    BN: tl.constexpr = source.k[0].block_shape[2]
    whole = tl.min(closed) // BN * BN
    state = _entries_between(
        ADD, state, queries, source, biases, opened, (0, whole), closed, scale, False, CAP, PRECISION
    )
    return _entries_between(
        ADD, state, queries, source, biases, opened, (whole, tl.max(closed)), closed, scale, True, CAP, PRECISION
    )


@triton.jit
def _load_opened(store, opened, start, g: tl.constexpr, WIDTHS: tl.constexpr, BN: tl.constexpr):
    """Load tokens ``[start, start + BN)`` of all opened groups, counted through; seen: whether a row sees each."""
    t = start + tl.arange(0, BN)
    inside = t < opened.count * g
    group = tl.load(opened.group + t // g, mask=inside, other=0)
    word = tl.load(opened.word + t // g, mask=inside, other=0)
    token = (group * g + t % g).to(tl.int64)
    k = load_rows(store.k, token * store.s_k, inside, WIDTHS[0], WIDTHS[1])
    v = load_rows(store.v, token * store.s_v, inside, WIDTHS[2], WIDTHS[3])
    return k, v, (word[None, :] & opened.bit[:, None]) != 0


@triton.jit
def _over_opened(
    ADD: tl.constexpr, state, queries, store, opened, scale, g: tl.constexpr, WIDTHS: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with the tokens of all groups that a query of the tile opens; a row sees those of its query.

    ADD: as of `_over_entries`.
    """
    for start in range(0, opened.count * g, BN):
        k, v, seen = _load_opened(store, opened, start, g, WIDTHS, BN)
        state = ADD(state, queries, k, v, seen, 0.0, None, scale, CAP, PRECISION)
    return state


@triton.jit
def _dq_add(dq, queries, k, v, seen, level, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """One step of dq, still without the softmax scale; seen, level, bias as in `_add_keys`."""
    s = products(queries.q, k, PRECISION)
    dp = products(queries.d_out, v, PRECISION)
    s, slope = soft_cap(s * scale, CAP)
    shift = (queries.lse - level)[:, None]
    if bias is not None:
        shift = shift - bias
    p = tl.where(seen, tl.exp2(s - shift), 0.0)
    return add_weighted(dq, p * (dp - queries.delta[:, None]) * slope, k, PRECISION)


@triton.jit
def chooser(row, choosers):
    """Index of the list of open groups for a KV head; heads share one list per batch row if ``choosers`` is 1.

    choosers: lists per batch row, 1 or one per KV head.
    """
    return row.b.to(tl.int64) * choosers + tl.minimum(row.head, choosers - 1)


@triton.jit
def _opened_of(words_ptr, group_ptr, word_ptr, count_ptr, words, room, row, choosers, i, Q: tl.constexpr):
    """The `TileGroups` of this program."""
    tile = chooser(row, choosers) * tl.num_programs(0) + tl.num_programs(0) - 1 - tl.program_id(0)
    return TileGroups(
        words_ptr + tile * row_of_words(words),
        group_ptr + tile * room,
        word_ptr + tile * room,
        tl.load(count_ptr + tile),
        bit_of(i, Q, words_ptr),
    )


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_fwd_kernel(
    q_ptr, entries_k, entries_k_rest, entries_v, entries_v_rest, window_k, window_k_rest, window_v, window_v_rest,
    store_k_ptr, store_v_ptr, biases, words_ptr, group_ptr, word_ptr, count_ptr, starts_ptr, out_ptr, lse_ptr,
    s_q, s_store, s_bias, level, K, choosers, L, first, stop, words, room,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale,
    R: tl.constexpr, g: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    POOL: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write out ``[B, H, L, Dv]`` and natural log-sum-exp ``[B, H, L]``, both contiguous, of queries ``[first, stop)``.

    first: a multiple of ``BM // R``, the queries of a tile. level: base-2 number added to the scores of all entries.
    biases: float32, the entries' own, base 2, in rows of G, None for none.
    """
    Q: tl.constexpr = BM // R
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(first + tile * Q, stop, R, BM)
    head = kvh * R + r
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)
    opened = _opened_of(words_ptr, group_ptr, word_ptr, count_ptr, words, room, row, choosers, i, Q)
    softmax = Softmax(zeros(BM, V0, V1), tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32))
    if POOL:
        k = parts(entries_k, entries_k_rest if D1 > 0 else None)
        v = parts(entries_v, entries_v_rest if V1 > 0 else None)
        closed = tl.minimum(visible(0, i, row, spans, KIND)[1], words)
        source = RowSource(k, v, row.b, row.head, level, b * s_bias[0] + kvh * s_bias[1])
        softmax = _over_entries(_add_keys, softmax, q, source, biases, opened, closed, scale, CAP, PRECISION)
    store = Store(
        store_k_ptr + b * s_store[0] + kvh * s_store[1], store_v_ptr + b * s_store[3] + kvh * s_store[4],
        s_store[2], s_store[5],
    )  # fmt: skip
    widths: tl.constexpr = (D0, D1, V0, V1)
    softmax = _over_opened(_add_keys, softmax, q, store, opened, scale, g, widths, BN, CAP, PRECISION)
    k, v = parts(window_k, window_k_rest if D1 > 0 else None), parts(window_v, window_v_rest if V1 > 0 else None)
    near = RowSource(k, v, row.b, row.head, 0.0, 0)
    seen = visible(1, i, row, spans, KIND)
    softmax = over_source(forward_keys, softmax, q, near, None, seen, scale, False, CAP, PRECISION)
    store_output(out_ptr, lse_ptr, softmax, (b * K * R + head) * L + i, real, V0, V1)


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_dq_kernel(
    q_ptr, entries_k, entries_k_rest, entries_v, entries_v_rest, window_k, window_k_rest, window_v, window_v_rest,
    store_k_ptr, store_v_ptr, biases, words_ptr, group_ptr, word_ptr, count_ptr, starts_ptr,
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, dq_ptr,
    s_q, s_out, s_store, s_bias, level, K, choosers, L, first, stop, words, room,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    R: tl.constexpr, g: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    POOL: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dq ``[B, H, L, D]`` of queries ``[first, stop)``, and for the kernels of dk and dv two numbers per query,
    float32 ``[B, H, L]``: see `condense.ops.triton.attend_backward`.
    """
    Q: tl.constexpr = BM // R
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(first + tile * Q, stop, R, BM)
    head = kvh * R + r
    at = (b * K * R + head) * L + i
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)
    d_out = load_rows(d_out_ptr, b * s_out[0] + head * s_out[1] + i.to(tl.int64) * s_out[2], real, V0, V1)
    queries = backward_queries(q, d_out, out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, at, real, V0, V1)
    opened = _opened_of(words_ptr, group_ptr, word_ptr, count_ptr, words, room, row, choosers, i, Q)
    dq = zeros(BM, D0, D1)
    if POOL:
        k = parts(entries_k, entries_k_rest if D1 > 0 else None)
        v = parts(entries_v, entries_v_rest if V1 > 0 else None)
        closed = tl.minimum(visible(0, i, row, spans, KIND)[1], words)
        source = RowSource(k, v, row.b, row.head, level, b * s_bias[0] + kvh * s_bias[1])
        dq = _over_entries(_dq_add, dq, queries, source, biases, opened, closed, scale, CAP, PRECISION)
    store = Store(
        store_k_ptr + b * s_store[0] + kvh * s_store[1], store_v_ptr + b * s_store[3] + kvh * s_store[4],
        s_store[2], s_store[5],
    )  # fmt: skip
    widths: tl.constexpr = (D0, D1, V0, V1)
    dq = _over_opened(_dq_add, dq, queries, store, opened, scale, g, widths, BN, CAP, PRECISION)
    k, v = parts(window_k, window_k_rest if D1 > 0 else None), parts(window_v, window_v_rest if V1 > 0 else None)
    near = RowSource(k, v, row.b, row.head, 0.0, 0)
    seen = visible(1, i, row, spans, KIND)
    dq = over_source(dq_keys, dq, queries, near, None, seen, scale, False, CAP, PRECISION)
    store_rows(dq_ptr, at * (D0 + D1), [x * softmax_scale for x in dq], real, D0, D1)
