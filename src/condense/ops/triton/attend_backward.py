"""Backward kernels of attention over a list of sources; see `condense.ops.triton.attend_forward` for the layout.

No atomics, so results are deterministic: a program owns a tile of rows (dq) or a block of keys (dk, dv) and adds up in
a fixed order. `attend_dkv_kernel` reads all queries from the first that sees one of its keys. Where queries open
groups, it computes gradients of the window, and `store_dkv_kernel` those of the store: it reads a list of the queries
that open its group.

The dq kernel writes two numbers per query for the other kernels, float32 ``[B, H, L]``: the base-2 log-sum-exp,
infinite where a query sees nothing, so that its weights are 0; and delta, ``sum(out * d_out) - d_lse``, through which
the log-sum-exp has a gradient too.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton import attend_forward as forward
from condense.ops.triton.device import rule as rules
from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.softmax import soft_cap


class BackwardQueries(namedtuple("BackwardQueries", "q d_out lse delta")):
    """Queries of the backward pass: tiles and vectors for dq, descriptors and pointers for dk and dv.

    q: queries, d_out: gradients of their outputs, both in parts. lse, delta: two numbers per row, see the module.
    """


class Sources(namedtuple("Sources", "k v dk dv s_k s_v s_bias sizes levels")):
    """All sources: pointers, strides, sizes and levels, each field a tuple with one item per source."""


class Block(namedtuple("Block", "k v dk dv k_at v_at at inside bias first last")):
    """A block of keys of one source.

    k, v, dk, dv: pointers. k_at, v_at: offsets of the rows of k and v. at: numbers of the rows of dk and dv, which are
    contiguous. inside: whether a key exists. bias: base 2. first, last: queries ``[first, last)`` see the key.
    """


class Keys(namedtuple("Keys", "k v bias first last")):
    """Loaded keys and values of a `Block`, in parts. bias, first, last: as in `Block`."""


@triton.jit
def _dq_add(dq, queries, k, v, seen, level, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Add the gradients through a block of keys and values to dq ``[BM, D]``, without the factor of the softmax scale.
    seen, level, bias: as in `condense.ops.triton.attend_forward.add_keys`.
    """
    s = products(queries.q, k, PRECISION)  # [BM, BN]
    dp = products(queries.d_out, v, PRECISION)
    shift = (queries.lse - level)[:, None]
    if len(bias) > 0:
        shift = shift - forward.load_biases(bias)
    s, slope = soft_cap(s * scale, CAP)
    # masked last, because the numbers of a query that sees nothing may be NaN
    ds = forward.where_seen(tl.exp2(s - shift) * (dp - queries.delta[:, None]) * slope, seen, 0.0)
    return add_weighted(dq, ds, k, PRECISION)


@triton.jit
def dq_keys(
    dq, queries, source, biases, lo, hi, first, last, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys ``[lo, hi)`` of one source to dq, as `_dq_add` does; each row sees ``[first, last)``."""
    BN: tl.constexpr = source.k[0].block_shape[2]
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(source.k, [source.b, source.head, start, 0], BN)  # [BN, D]
        v = load_block(source.v, [source.b, source.head, start, 0], BN)  # [BN, Dv]
        bias, seen = (biases, source, start) if biases is not None else (), (n, first, last) if MASKED else ()
        dq = _dq_add(dq, queries, k, v, seen, source.level, bias, scale, CAP, PRECISION)
    return dq


@triton.jit(do_not_specialize=(*rules.VARYING, *forward.BLOCK))
def attend_dq_kernel(
    q_ptr,
    k0, k1, k2, k3, k0_rest, k1_rest, k2_rest, k3_rest, v0, v1, v2, v3, v0_rest, v1_rest, v2_rest, v3_rest,
    store, biases, lists, spans_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, dq_ptr,
    s_q, s_out, s_store, s_bias, s_spans, levels, K, R, choosers, L, first, stop, room,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, OPEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dq ``[B, H, L, D]`` and, for the kernels of dk and dv, row_lse and delta (see the module).

    out lies as `condense.ops.triton.attend_call.results` makes it; lse and d_lse ``[B, H, L]`` are contiguous; d_out
    has strides s_out. All other arguments as in `condense.ops.triton.attend_forward.attend_fwd_kernel`.
    """
    k, k_rest = (k0, k1, k2, k3), (k0_rest, k1_rest, k2_rest, k3_rest)
    v, v_rest = (v0, v1, v2, v3), (v0_rest, v1_rest, v2_rest, v3_rest)
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = rules.row_of_program(numbers, spans_ptr, K, KIND, s_spans)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    heads = R if OPEN is None else OPEN.R
    i, r, real = rules.program_rows(first, L if stop is None else stop, heads, BM)
    head = kvh * heads + r
    at = (b * K * heads + head) * L + i
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)  # [BM, D]
    d_out = load_rows(d_out_ptr, b * s_out[0] + head * s_out[1] + i.to(tl.int64) * s_out[2], real, V0, V1)  # [BM, Dv]
    out = load_rows(out_ptr, ((b * L + i) * (K * heads) + head) * (V0 + V1), real, V0, V1)
    delta = tl.sum(out[0].to(tl.float32) * d_out[0].to(tl.float32), 1)
    if V1 > 0:
        delta += tl.sum(out[1].to(tl.float32) * d_out[1].to(tl.float32), 1)
    delta -= tl.load(d_lse_ptr + at, mask=real, other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=float("-inf")) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + at, lse, mask=real)
    tl.store(delta_ptr + at, delta, mask=real)
    queries = BackwardQueries(q, d_out, lse, delta)
    if OPEN is not None:
        groups = forward.groups_of(lists, room, store, s_store, row, choosers, i - first, BM // OPEN.R)
    dq = zeros(BM, D0, D1)
    for n in tl.static_range(N):
        if OPEN is not None and n == 0:
            widths: tl.constexpr = (D0, D1, V0, V1)
            dq = forward.over_opened(_dq_add, dq, queries, groups, scale, OPEN.g, widths, BN, CAP, PRECISION)
        else:
            source = forward.source_of(k[n], k_rest[n], v[n], v_rest[n], levels[n], s_bias[n], row)
            seen = rules.visible(n, i, row, spans, KIND)
            dq = forward.over_source(
                dq_keys, dq, queries, source, biases[n], seen, scale, rules.begins_at_0(n, KIND), CAP, PRECISION
            )
    store_rows(dq_ptr, at * (D0 + D1), [x * softmax_scale for x in dq], real, D0, D1)


@triton.jit
def _add_queries(grads, k, v, rows, seen, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of rows to the gradients ``grads``: dk ``[BN, D]`` (without the factor of the softmax scale), dv
    ``[BN, Dv]`` and, if there are three, d_bias ``[BN]``.

    seen: as in `where_seen`, with keys as rows: ``[BN, BM]``. bias: ``[BN]``, base 2, None for none.
    """
    s = products(k, rows.q, PRECISION)  # [BN, BM]
    dp = products(v, rows.d_out, PRECISION)
    s, slope = soft_cap(s * scale, CAP)
    if bias is None:
        s -= rows.lse[None, :]
    else:
        s += bias[:, None] - rows.lse[None, :]
    p = forward.where_seen(tl.exp2(s), seen, 0.0)
    ds = p * (dp - rows.delta[None, :])
    dv = add_weighted(grads[1], p, rows.d_out, PRECISION)
    dk = add_weighted(grads[0], ds * slope, rows.q, PRECISION)
    if len(grads) == 3:
        return dk, dv, grads[2] + tl.sum(ds, 1)
    else:
        return dk, dv


@triton.jit
def _dkv_queries(
    grads, keys, queries, row, lo, hi, L, R, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add queries ``[lo, hi)`` of R heads to ``grads`` by `_add_queries`.

    queries: descriptors and pointers. A tile holds QUERIES queries of HEADS heads.
    """
    HEADS: tl.constexpr = queries.q[0].block_shape[2]
    QUERIES: tl.constexpr = queries.q[0].block_shape[3]
    BM: tl.constexpr = HEADS * QUERIES
    line = tl.arange(0, BM)
    for group in range(R // HEADS):
        head = row.head * (R // HEADS) + group
        stat_rows = (head * HEADS + line // QUERIES).to(tl.int64) * L + line % QUERIES
        for start in range(lo, hi, QUERIES):
            i = start + line % QUERIES
            inside = i < L if MASKED else i >= 0
            rows = BackwardQueries(
                load_block(queries.q, [row.b, head, 0, start, 0], BM),
                load_block(queries.d_out, [row.b, head, 0, start, 0], BM),
                tl.load(queries.lse + stat_rows + start, mask=inside, other=float("inf")),
                tl.load(queries.delta + stat_rows + start, mask=inside, other=0.0),
            )
            seen = (i, keys.first, keys.last) if MASKED else ()
            grads = _add_queries(grads, keys.k, keys.v, rows, seen, keys.bias, scale, CAP, PRECISION)
    return grads


@triton.jit
def _block_of(
    n: tl.constexpr, number, sources, biases, row, K, L, spans, seen, s_seen, KIND: tl.constexpr, BN: tl.constexpr
):
    """Block ``number`` of source n: addresses of its keys, values and gradients, and which queries see each key."""
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    key, size = number * BN + tl.arange(0, BN), sources.sizes[n]
    inside = key < size
    k_at = b * sources.s_k[n][0] + kvh * sources.s_k[n][1] + key.to(tl.int64) * sources.s_k[n][2]
    v_at = b * sources.s_v[n][0] + kvh * sources.s_v[n][1] + key.to(tl.int64) * sources.s_v[n][2]
    bias = tl.zeros([BN], tl.float32) + sources.levels[n]
    if biases is not None:
        at = biases + b * sources.s_bias[n][0] + kvh * sources.s_bias[n][1]
        bias += tl.load(at + key, mask=inside, other=0.0)
    first, last = rules.seen_by(n, key, size, L, row, spans, seen, s_seen, KIND)
    return Block(
        sources.k[n], sources.v[n], sources.dk[n], sources.dv[n], k_at, v_at, (b * K + kvh) * size + key.to(tl.int64),
        inside, bias, first, last,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*rules.VARYING, "size0", "size1", "size2", "size3"))
def attend_dkv_kernel(
    lse_ptr, delta_ptr, q, q_rest, d_out, d_out_rest, k, v, biases, spans_ptr, seen, dk, dv, d_biases,
    s_k, s_v, s_bias, s_spans, s_seen, levels, K, R, L, size0, size1, size2, size3,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write dk ``[B, K, N, D]`` and dv ``[B, K, N, Dv]`` of all sources, contiguous; if any has a bias, also d_biases
    float32 ``[B, K, N]``, else None.

    q and d_out: descriptors ``[B, H / HEADS, HEADS, L, D]``. k, v, dk, dv, seen (for arrays): a pointer per source.
    size0 to size3: entries of the sources; sizes past the N sources are not read.

    One launch for all sources. The blocks of the first one start first: in a condensed prompt nearly all queries see
    its entries, so they take longest, and the window's many short programs fill the rest of the device.
    """
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = rules.row_of_program(numbers, spans_ptr, K, KIND, s_spans, 0)
    b = row.b.to(tl.int64)
    sources = Sources(k, v, dk, dv, s_k, s_v, s_bias, (size0, size1, size2, size3), levels)
    number = tl.program_id(1)
    block = _block_of(0, number, sources, biases[0], row, K, L, spans, seen, s_seen, KIND, BN)
    BIASED: tl.constexpr = d_biases is not None
    if BIASED:
        d_bias_ptr = d_biases[0]
    for n in tl.static_range(1, N):
        number -= tl.cdiv(sources.sizes[n - 1], BN)
        if number >= 0:
            block = _block_of(n, number, sources, biases[n], row, K, L, spans, seen, s_seen, KIND, BN)
            if BIASED:
                d_bias_ptr = d_biases[n]
    keys = Keys(
        load_rows(block.k, block.k_at, block.inside, D0, D1), load_rows(block.v, block.v_at, block.inside, V0, V1),
        block.bias, block.first, block.last,
    )  # fmt: skip
    queries = BackwardQueries(
        parts(q, q_rest), parts(d_out, d_out_rest), lse_ptr + b * K * R * L, delta_ptr + b * K * R * L
    )
    is_seen = block.first < block.last
    lo, hi = tl.min(tl.where(is_seen, block.first, L)), tl.max(block.last)
    left, right = rules.split(lo, tl.max(block.first), tl.min(tl.where(block.inside, block.last, L)), hi, BM // HEADS)
    grads = (zeros(BN, D0, D1), zeros(BN, V0, V1))
    if BIASED:
        grads = grads + (tl.zeros([BN], tl.float32),)  # noqa: RUF005
    grads = _dkv_queries(grads, keys, queries, row, lo, left, L, R, scale, True, CAP, PRECISION)
    grads = _dkv_queries(grads, keys, queries, row, left, right, L, R, scale, False, CAP, PRECISION)
    grads = _dkv_queries(grads, keys, queries, row, right, hi, L, R, scale, True, CAP, PRECISION)
    store_rows(block.dk, block.at * (D0 + D1), [x * softmax_scale for x in grads[0]], block.inside, D0, D1)
    store_rows(block.dv, block.at * (V0 + V1), grads[1], block.inside, V0, V1)
    if BIASED:
        tl.store(d_bias_ptr + block.at, grads[2], mask=block.inside)


@triton.jit(do_not_specialize=("L", "G"))
def store_dkv_kernel(
    lse_ptr, delta_ptr, q_ptr, d_out_ptr, k_ptr, v_ptr, first_ptr, order_ptr, dk_ptr, dv_ptr,
    s_q, s_out, s_keys, K, choosers, L, G, r, scale, softmax_scale,
    R: tl.constexpr, g: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dk ``[B, K, G * g, D]``, dv ``[B, K, G * g, Dv]``, contiguous; grid (B * K, G, tiles of a group's tokens).

    order int64 ``[B * choosers, L * r]``: indices of the pairs (query, opened group), sorted by group, then by query.
    first ``[B * choosers, G + 1]``: offset of each group's first pair in ``order``.
    """
    Q: tl.constexpr = BM // R
    row = rules.Row(tl.program_id(0) // K, tl.program_id(0) % K)
    b, kvh, group = row.b.to(tl.int64), row.head.to(tl.int64), tl.program_id(1)
    token = tl.program_id(2) * BN + tl.arange(0, BN)
    inside = token < g
    key = group.to(tl.int64) * g + token
    k = load_rows(k_ptr, b * s_keys[0] + kvh * s_keys[1] + key * s_keys[2], inside, D0, D1)
    v = load_rows(v_ptr, b * s_keys[3] + kvh * s_keys[4] + key * s_keys[5], inside, V0, V1)
    j = tl.arange(0, BM)
    head = kvh * R + j % R
    order_ptr += forward.chooser(row, choosers) * L * r
    first_ptr += forward.chooser(row, choosers) * (G + 1) + group
    last = tl.load(first_ptr + 1)
    grads = (zeros(BN, D0, D1), zeros(BN, V0, V1))
    for start in range(tl.load(first_ptr), last, Q):
        place = start + j // R
        there = (place < last) & (j < Q * R)
        i = tl.load(order_ptr + place, mask=there, other=0) // r
        at_q, at_out = b * s_q[0] + head * s_q[1] + i * s_q[2], b * s_out[0] + head * s_out[1] + i * s_out[2]
        at = (b * K * R + head) * L + i
        rows = BackwardQueries(
            load_rows(q_ptr, at_q, there, D0, D1),
            load_rows(d_out_ptr, at_out, there, V0, V1),
            tl.load(lse_ptr + at, mask=there, other=float("inf")),  # makes weights 0
            tl.load(delta_ptr + at, mask=there, other=0.0),
        )
        grads = _add_queries(grads, k, v, rows, (there[None, :],), None, scale, CAP, PRECISION)
    at = (b * K + kvh) * G * g + key
    store_rows(dk_ptr, at * (D0 + D1), [x * softmax_scale for x in grads[0]], inside, D0, D1)
    store_rows(dv_ptr, at * (V0 + V1), grads[1], inside, V0, V1)
