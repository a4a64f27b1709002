"""Backward kernels of attention over a list of sources; see `condense.ops.triton.attend_forward` for the layout.

One program per tile of rows (dq) and one per block of keys (dk, dv): no atomics, so results are deterministic.

The dq kernel hands two numbers per query to the other, float32 ``[B, H, L]``: the base-2 log-sum-exp, infinite
where a query sees nothing, so that its weights are 0; and delta, ``sum(out * d_out) - d_lse``, so that the
log-sum-exp has a gradient too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.attend_forward import VARYING, over_source
from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.records import (
    BackwardQueries,
    Block,
    Keys,
    Row,
    RowSource,
    RowSpans,
    Rule,
    Sources,
    Start,
)
from condense.ops.triton.device.rule import begins_at_0, seen_by, split, start_of_row, tile_rows, visible
from condense.ops.triton.device.scores import soft_cap


@triton.jit
def dq_keys(
    dq, queries, source, bias, lo, hi, first, last, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds keys ``[lo, hi)`` of one source to dq, up to the softmax scale; a query sees ``[first, last)``."""
    BN: tl.constexpr = source.k[0].block_shape[2]
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(source.k, [source.b, source.head, start, 0], BN)
        v = load_block(source.v, [source.b, source.head, start, 0], BN)
        s = products(queries.q, k, PRECISION)
        dp = products(queries.d_out, v, PRECISION)
        shift = (queries.lse - source.level)[:, None]
        if bias is not None:
            shift = shift - tl.load(bias + source.bias_at + n, mask=n < source.k[0].shape[2], other=0.0)[None, :]
        s, slope = soft_cap(s * scale, CAP)
        p = tl.exp2(s - shift)
        if MASKED:
            p = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), p, 0.0)
        ds = p * (dp - queries.delta[:, None]) * slope
        dq = add_weighted(dq, ds, k, PRECISION)
    return dq


@triton.jit
def backward_queries(
    q, d_out, out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, at, real, V0: tl.constexpr, V1: tl.constexpr
):  # fmt: skip
    """The queries of a tile for dq. Stores the two numbers of each that the kernels of dk and dv read. at: its rows."""
    out = load_rows(out_ptr, at * (V0 + V1), real, V0, V1)
    delta = tl.sum(out[0].to(tl.float32) * d_out[0].to(tl.float32), 1)
    if V1 > 0:
        delta += tl.sum(out[1].to(tl.float32) * d_out[1].to(tl.float32), 1)
    delta -= tl.load(d_lse_ptr + at, mask=real, other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=float("-inf")) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + at, lse, mask=real)
    tl.store(delta_ptr + at, delta, mask=real)
    return BackwardQueries(q, d_out, lse, delta)


@triton.jit(do_not_specialize=VARYING)
def attend_dq_kernel(
    q_ptr,
    k0, k1, k2, k3, k0_rest, k1_rest, k2_rest, k3_rest, v0, v1, v2, v3, v0_rest, v1_rest, v2_rest, v3_rest,
    biases, spans_ptr, out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, dq_ptr,
    s_q, s_out, s_bias, s_spans, levels, K, R, L,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Writes dq ``[B, H, L, D]`` and, for `attend_dkv_kernel`, both numbers per query.

    out ``[B, H, L, Dv]``, lse and d_lse ``[B, H, L]`` contiguous; d_out with strides s_out.
    """
    k, k_rest = (k0, k1, k2, k3)[:N], (k0_rest, k1_rest, k2_rest, k3_rest)[: N if D1 > 0 else 0]
    v, v_rest = (v0, v1, v2, v3)[:N], (v0_rest, v1_rest, v2_rest, v3_rest)[: N if V1 > 0 else 0]
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    spans = RowSpans(rule, start_of_row(b, start, spans_ptr, KIND), spans_ptr, s_spans)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(tile * (BM // R), L, R, BM)
    head = kvh * R + r
    at = (b * K * R + head) * L + i
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)
    d_out = load_rows(d_out_ptr, b * s_out[0] + head * s_out[1] + i.to(tl.int64) * s_out[2], real, V0, V1)
    queries = backward_queries(q, d_out, out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, at, real, V0, V1)
    dq = zeros(BM, D0, D1)
    for n in tl.static_range(N):
        bias_at = b * s_bias[n][0] + kvh * s_bias[n][1]
        k_parts = parts(k[n], k_rest[n] if D1 > 0 else None)
        v_parts = parts(v[n], v_rest[n] if V1 > 0 else None)
        source = RowSource(k_parts, v_parts, row.b, row.head, levels[n], bias_at)
        seen = visible(n, i, row, spans, KIND)
        dq = over_source(dq_keys, dq, queries, source, biases[n], seen, scale, begins_at_0(n, KIND), CAP, PRECISION)
    store_rows(dq_ptr, at * (D0 + D1), [x * softmax_scale for x in dq], real, D0, D1)


@triton.jit
def _dkv_queries(
    grads, keys, queries, row, lo, hi, L, R, scale,
    MASKED: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds queries ``[lo, hi)`` of R heads to dk (up to the softmax scale), dv and, if there is one, d_bias.

    queries: descriptors and pointers; a tile of them holds QUERIES queries of HEADS heads.
    """
    dk, dv = grads[0], grads[1]
    d_bias = grads[2:]
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
            q = load_block(queries.q, [row.b, head, 0, start, 0], BM)
            d_out = load_block(queries.d_out, [row.b, head, 0, start, 0], BM)
            lse = tl.load(queries.lse + stat_rows + start, mask=inside, other=float("inf"))
            delta = tl.load(queries.delta + stat_rows + start, mask=inside, other=0.0)
            s = products(keys.k, q, PRECISION)
            dp = products(keys.v, d_out, PRECISION)
            s, slope = soft_cap(s * scale, CAP)
            p = tl.exp2(s + (keys.bias[:, None] - lse[None, :]))
            if MASKED:
                p = tl.where((i[None, :] >= keys.first[:, None]) & (i[None, :] < keys.last[:, None]), p, 0.0)
            ds = p * (dp - delta[None, :])
            dv = add_weighted(dv, p, d_out, PRECISION)
            dk = add_weighted(dk, ds * slope, q, PRECISION)
            if len(d_bias) > 0:
                d_bias = (d_bias[0] + tl.sum(ds, 1),)
    return (dk, dv) + d_bias  # noqa: RUF005


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
    first, last = seen_by(n, key, size, L, row, spans, seen, s_seen, KIND)
    return Block(
        sources.k[n], sources.v[n], sources.dk[n], sources.dv[n], k_at, v_at, (b * K + kvh) * size + key.to(tl.int64),
        inside, bias, first, last,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*VARYING, "size0", "size1", "size2", "size3"))
def attend_dkv_kernel(
    lse_ptr, delta_ptr, q, q_rest, d_out, d_out_rest, k, v, biases, spans_ptr, seen, dk, dv, d_biases,
    s_k, s_v, s_bias, s_spans, s_seen, levels, K, R, L, size0, size1, size2, size3,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Writes dk ``[B, K, N, D]`` and dv ``[B, K, N, Dv]`` of all sources, contiguous; if any has a bias, also d_biases
    float32 ``[B, K, N]``, else None.

    q and d_out: descriptors ``[B, H / HEADS, HEADS, L, D]``. k, v, dk, dv, seen (for arrays): a pointer per source.
    size0 to size3: entries of the sources; the sizes of sources that are not there are not read.

    One launch for all sources. The blocks of the first one start first: in a condensed prompt nearly all queries see
    its entries, so they take longest, and the window's many short programs fill the rest of the device.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row = Row(tl.program_id(0) // K, tl.program_id(0) % K)
    b = row.b.to(tl.int64)
    spans = RowSpans(rule, start_of_row(b, start, spans_ptr, KIND), spans_ptr, s_spans)
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
    left, right = split(lo, tl.max(block.first), tl.min(tl.where(block.inside, block.last, L)), hi, BM // HEADS)
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
