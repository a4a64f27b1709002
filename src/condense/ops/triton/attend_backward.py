"""Backward kernels of prefix-band attention; see `condense.ops.triton.attend_forward` for the layout.

One program per tile of rows (dq) and one per block of keys (dk, dv): no atomics, the same result every time.

Two numbers per query pass from the dq kernel to the other, float32 ``[B, H, L]``: the base-2 log-sum-exp, infinite
where a query sees nothing, so that its weights are 0; and delta, ``sum(out * d_out) - d_lse``, so that the
log-sum-exp has a gradient too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.rule import seen_by, split, tile_rows, visible


@triton.jit
def _dq_keys(
    dq, q, d_out, lse, delta, k_source, v_source, bias_ptr, b, kvh, lo, hi, first, last, size, scale, level,
    BN: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds keys ``[lo, hi)`` of one source to dq, up to the softmax scale."""
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(k_source, [b, kvh, start, 0], BN)
        v = load_block(v_source, [b, kvh, start, 0], BN)
        s = products(q, k, PRECISION)
        dp = products(d_out, v, PRECISION)
        shift = (lse - level)[:, None]
        if BIASED:
            shift = shift - tl.load(bias_ptr + n, mask=n < size, other=0.0)[None, :]
        p = tl.exp2(s * scale - shift)
        if MASKED:
            p = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = add_weighted(dq, ds, k, PRECISION)
    return dq


@triton.jit(do_not_specialize=VARYING)
def attend_dq_kernel(
    q_ptr, entries_k, entries_k1, entries_v, entries_v1, window_k, window_k1, window_v, window_v1, bias_ptr, bounds,
    out_ptr, d_out_ptr, lse_ptr, d_lse_ptr, row_lse_ptr, delta_ptr, dq_ptr,
    s_q, s_out, s_bias, s_bounds, K, R, L, M, query_start, band_start, pads, offset,
    chunk, window, entries, max_chunks, scale, level, softmax_scale,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq ``[B, H, L, D]`` and, for `attend_dkv_kernel`, both numbers per row.

    out ``[B, H, L, Dv]``, lse and d_lse ``[B, H, L]`` contiguous; d_out with strides s_out.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, kvh = tl.program_id(1) // K, tl.program_id(1) % K
    wide_b, wide_kvh = b.to(tl.int64), kvh.to(tl.int64)
    i, r, real = tile_rows(tile * (BM // R), L, R, BM)
    start, rule = (query_start, band_start, pads, offset), (chunk, window, entries, max_chunks)
    rep_end, raw_start, raw_end = visible(i, wide_b, wide_kvh, bounds, s_bounds, start, rule, RULE)
    head = wide_kvh * R + r
    at = (wide_b * K * R + head) * L + i
    q_at = wide_b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2]
    q = load_rows(q_ptr, q_at, real, D0, D1)
    out_at = wide_b * s_out[0] + head * s_out[1] + i.to(tl.int64) * s_out[2]
    d_out = load_rows(d_out_ptr, out_at, real, V0, V1)
    out = load_rows(out_ptr, at * (V0 + V1), real, V0, V1)
    delta = tl.sum(out[0].to(tl.float32) * d_out[0].to(tl.float32), 1)
    if V1 > 0:
        delta += tl.sum(out[1].to(tl.float32) * d_out[1].to(tl.float32), 1)
    delta -= tl.load(d_lse_ptr + at, mask=real, other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=float("-inf")) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + at, lse, mask=real)
    tl.store(delta_ptr + at, delta, mask=real)
    dq = zeros(BM, D0, D1)
    zero = tl.zeros_like(rep_end)

    bias_ptr += wide_b * s_bias[0] + wide_kvh * s_bias[1]
    k, v = parts(entries_k, entries_k1), parts(entries_v, entries_v1)
    hi = tl.max(rep_end)
    _, whole = split(0, 0, tl.min(rep_end), hi, BN)
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k, v, bias_ptr, b, kvh, 0, whole, zero, rep_end, M, scale, level,
        BN, False, BIASED, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k, v, bias_ptr, b, kvh, whole, hi, zero, rep_end, M, scale, level,
        BN, True, BIASED, PRECISION,
    )  # fmt: skip

    k, v = parts(window_k, window_k1), parts(window_v, window_v1)
    lo, hi = tl.min(raw_start), tl.max(raw_end)
    left, right = split(lo, tl.max(raw_start), tl.min(raw_end), hi, BN)
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k, v, bias_ptr, b, kvh, lo, left, raw_start, raw_end, M, scale, 0.0,
        BN, True, False, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k, v, bias_ptr, b, kvh, left, right, raw_start, raw_end, M, scale, 0.0,
        BN, False, False, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k, v, bias_ptr, b, kvh, right, hi, raw_start, raw_end, M, scale, 0.0,
        BN, True, False, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr, at * (D0 + D1), [x * softmax_scale for x in dq], real, D0, D1)


@triton.jit
def _dkv_queries(
    dk, dv, k, v, bias, q_source, d_out_source, lse_ptr, delta_ptr, b, kvh, first, last, lo, hi, L, R, scale,
    BM: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds queries ``[lo, hi)`` of R heads to dk (up to the softmax scale) and dv; ``[first, last)`` see a key."""
    QUERIES: tl.constexpr = BM // HEADS
    row = tl.arange(0, BM)
    for group in range(R // HEADS):
        head = kvh * (R // HEADS) + group
        stat_rows = (head * HEADS + row // QUERIES).to(tl.int64) * L + row % QUERIES
        for start in range(lo, hi, QUERIES):
            i = start + row % QUERIES
            inside = i < L if MASKED else i >= 0
            q = load_block(q_source, [b, head, 0, start, 0], BM)
            d_out = load_block(d_out_source, [b, head, 0, start, 0], BM)
            lse = tl.load(lse_ptr + stat_rows + start, mask=inside, other=float("inf"))
            delta = tl.load(delta_ptr + stat_rows + start, mask=inside, other=0.0)
            s = products(k, q, PRECISION)
            dp = products(v, d_out, PRECISION)
            p = tl.exp2(s * scale + (bias[:, None] - lse[None, :]))
            if MASKED:
                p = tl.where((i[None, :] >= first[:, None]) & (i[None, :] < last[:, None]), p, 0.0)
            ds = p * (dp - delta[None, :])
            dv = add_weighted(dv, p, d_out, PRECISION)
            dk = add_weighted(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=(*VARYING, "N", "prefix_blocks"))
def attend_dkv_kernel(
    q_source, q_source1, entries_k_ptr, entries_v_ptr, window_k_ptr, window_v_ptr, bias_ptr, bounds,
    prefix_seen, band_seen,
    d_out_source, d_out_source1, lse_ptr, delta_ptr, d_entries_k_ptr, d_entries_v_ptr, d_window_k_ptr, d_window_v_ptr,
    s_entries_k, s_entries_v, s_window_k, s_window_v, s_bias, s_prefix_seen, s_band_seen,
    K, R, L, M, N, prefix_blocks, query_start, band_start, pads, offset, chunk, window, entries, max_chunks,
    scale, level, softmax_scale,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HEADS: tl.constexpr, RULE: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk ``[B, K, n, D]`` and dv ``[B, K, n, Dv]`` of both sources, contiguous.

    A tile of rows is ``BM // HEADS`` queries of HEADS heads, q and d_out ``[B, H / HEADS, HEADS, L, D]``.

    One launch for both: the first prefix blocks, which nearly all queries see, start first, and the band's many
    short programs fill the rest of the device.
    """
    block = tl.program_id(1)
    b, kvh = (tl.program_id(0) // K).to(tl.int64), (tl.program_id(0) % K).to(tl.int64)
    is_prefix = block < prefix_blocks
    block = tl.where(is_prefix, block, block - prefix_blocks)
    size = tl.where(is_prefix, M, N)
    n = block * BN + tl.arange(0, BN)
    inside = n < size
    wide_n = n.to(tl.int64)
    bias = tl.zeros([BN], tl.float32)
    start, rule = (query_start, band_start, pads, offset), (chunk, window, entries, max_chunks)
    if is_prefix:
        k_ptr, k_at = entries_k_ptr, b * s_entries_k[0] + kvh * s_entries_k[1] + wide_n * s_entries_k[2]
        v_ptr, v_at = entries_v_ptr, b * s_entries_v[0] + kvh * s_entries_v[1] + wide_n * s_entries_v[2]
        dk_ptr, dv_ptr = d_entries_k_ptr, d_entries_v_ptr
        bias += level
        if BIASED:
            bias += tl.load(bias_ptr + b * s_bias[0] + kvh * s_bias[1] + n, mask=inside, other=0.0)
        first, last = seen_by(
            n, size, True, L, b, kvh, prefix_seen, s_prefix_seen, bounds, start, rule, RULE
        )  # fmt: skip
    else:
        k_ptr, k_at = window_k_ptr, b * s_window_k[0] + kvh * s_window_k[1] + wide_n * s_window_k[2]
        v_ptr, v_at = window_v_ptr, b * s_window_v[0] + kvh * s_window_v[1] + wide_n * s_window_v[2]
        dk_ptr, dv_ptr = d_window_k_ptr, d_window_v_ptr
        first, last = seen_by(n, size, False, L, b, kvh, band_seen, s_band_seen, bounds, start, rule, RULE)
    k, v = load_rows(k_ptr, k_at, inside, D0, D1), load_rows(v_ptr, v_at, inside, V0, V1)
    queries, d_outs = parts(q_source, q_source1), parts(d_out_source, d_out_source1)

    lse_ptr += b * K * R * L
    delta_ptr += b * K * R * L
    seen = first < last
    lo, hi = tl.min(tl.where(seen, first, L)), tl.max(last)
    left, right = split(lo, tl.max(first), tl.min(tl.where(inside, last, L)), hi, BM // HEADS)
    dk, dv = zeros(BN, D0, D1), zeros(BN, V0, V1)
    row, head = tl.program_id(0) // K, tl.program_id(0) % K
    dk, dv = _dkv_queries(
        dk, dv, k, v, bias, queries, d_outs, lse_ptr, delta_ptr, row, head, first, last, lo, left, L, R,
        scale, BM, HEADS, True, PRECISION,
    )  # fmt: skip
    dk, dv = _dkv_queries(
        dk, dv, k, v, bias, queries, d_outs, lse_ptr, delta_ptr, row, head, first, last, left, right, L, R,
        scale, BM, HEADS, False, PRECISION,
    )  # fmt: skip
    dk, dv = _dkv_queries(
        dk, dv, k, v, bias, queries, d_outs, lse_ptr, delta_ptr, row, head, first, last, right, hi, L, R,
        scale, BM, HEADS, True, PRECISION,
    )  # fmt: skip
    at = (b * K + kvh) * size + wide_n
    store_rows(dk_ptr, at * (D0 + D1), [x * softmax_scale for x in dk], inside, D0, D1)
    store_rows(dv_ptr, at * (V0 + V1), dv, inside, V0, V1)
