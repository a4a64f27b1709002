"""Backward kernels of prefix-band attention; see `condense.ops.triton_forward` for the layout.

One program per tile of rows (dq) and one per block of keys (dk, dv): no atomics, the same result every time.

`delta` is ``sum(out * d_out) - d_lse`` per row, so that the log-sum-exp has a gradient too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton_forward import load_rows


@triton.jit
def _dq_keys(
    dq, q, d_out, lse, delta, k_ptr, v_ptr, bias_ptr, s_kn, s_vn, lo, hi, first, last, size, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds keys ``[lo, hi)`` of one source to dq, up to the softmax scale."""
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        inside = n[:, None] < size
        k = tl.load(k_ptr + n[:, None].to(tl.int64) * s_kn + d[None, :], mask=inside & (d[None, :] < D), other=0.0)
        v = tl.load(v_ptr + n[:, None].to(tl.int64) * s_vn + e[None, :], mask=inside & (e[None, :] < DV), other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if BIASED:
            s += tl.load(bias_ptr + n, mask=n < size, other=0.0)[None, :]
        p = tl.exp2(s - lse[:, None])
        if MASKED:
            p = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), p, 0.0)
        dp = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def attend_dq_kernel(
    q_ptr, pk_ptr, pv_ptr, bk_ptr, bv_ptr, bias_ptr, rep_end_ptr, raw_start_ptr, raw_end_ptr,
    d_out_ptr, lse_ptr, delta_ptr, dq_ptr,
    s_qb, s_qh, s_ql, s_pkb, s_pkh, s_pkn, s_pvb, s_pvh, s_pvn, s_bkb, s_bkh, s_bkn, s_bvb, s_bvh, s_bvn,
    s_biasb, s_biask, s_bb, s_bk, K, R, L, M, N, scale, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq ``[B, H, L, D]``; d_out ``[B, H, L, Dv]``, lse and delta ``[B, H, L]``, all contiguous."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    i, r, at = load_rows(row, b, kvh, K, L, R)
    bounds = b * s_bb + kvh * s_bk + i
    rep_end, raw_start = tl.load(rep_end_ptr + bounds), tl.load(raw_start_ptr + bounds)
    raw_end = tl.load(raw_end_ptr + bounds)
    real = row < L * R
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    q_at = b * s_qb + (kvh * R + r).to(tl.int64) * s_qh + i.to(tl.int64) * s_ql
    width = real[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=width, other=0.0)
    d_out = tl.load(d_out_ptr + at[:, None] * DV + e[None, :], mask=real[:, None] & (e[None, :] < DV), other=0.0)
    lse = tl.load(lse_ptr + at, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=real, other=0.0)
    dq = tl.zeros([BM, BD], tl.float32)
    zero = tl.zeros_like(rep_end)

    k_ptr, v_ptr = pk_ptr + b * s_pkb + kvh * s_pkh, pv_ptr + b * s_pvb + kvh * s_pvh
    bias = bias_ptr + b * s_biasb + kvh * s_biask
    whole = tl.min(rep_end) // BN * BN
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, bias, s_pkn, s_pvn, 0, whole, zero, rep_end, M, scale,
        D, DV, BD, BV, BN, False, BIASED, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, bias, s_pkn, s_pvn, whole, tl.max(rep_end), zero, rep_end, M, scale,
        D, DV, BD, BV, BN, True, BIASED, PRECISION,
    )  # fmt: skip

    k_ptr, v_ptr = bk_ptr + b * s_bkb + kvh * s_bkh, bv_ptr + b * s_bvb + kvh * s_bvh
    lo, hi = tl.min(raw_start), tl.max(raw_end)
    left = tl.minimum(lo + tl.cdiv(tl.max(raw_start) - lo, BN) * BN, hi)
    whole = left + tl.maximum(tl.min(raw_end) - left, 0) // BN * BN
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, bias, s_bkn, s_bvn, lo, left, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, bias, s_bkn, s_bvn, left, whole, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, False, False, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, bias, s_bkn, s_bvn, whole, hi, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip
    tl.store(dq_ptr + at[:, None] * D + d[None, :], (dq * softmax_scale).to(q.dtype), mask=width)


@triton.jit
def attend_dkv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, first_ptr, last_ptr, query_lo_ptr, query_hi_ptr,
    d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    s_qb, s_qh, s_ql, s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_biasb, s_biask, s_bb, s_bk, s_nb, s_nk,
    K, R, L, N, scale, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk ``[B, K, N, D]`` and dv ``[B, K, N, Dv]`` of one source, contiguous.

    A row sees keys ``[first, last)``; key n is seen by queries ``[query_lo, query_hi)`` at most.
    """
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    k_at = k_ptr + b * s_kb + kvh * s_kh + n[:, None].to(tl.int64) * s_kn + d[None, :]
    v_at = v_ptr + b * s_vb + kvh * s_vh + n[:, None].to(tl.int64) * s_vn + e[None, :]
    k_width, v_width = inside[:, None] & (d[None, :] < D), inside[:, None] & (e[None, :] < DV)
    k, v = tl.load(k_at, mask=k_width, other=0.0), tl.load(v_at, mask=v_width, other=0.0)
    bias = tl.zeros([BN], tl.float32)
    if BIASED:
        bias += tl.load(bias_ptr + b * s_biasb + kvh * s_biask + n, mask=inside, other=0.0)
    seen_at = b * s_nb + kvh * s_nk + n
    lo = tl.min(tl.load(query_lo_ptr + seen_at, mask=inside, other=L)) * R
    hi = tl.max(tl.load(query_hi_ptr + seen_at, mask=inside, other=0)) * R
    dk, dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BV], tl.float32)
    for start in range(lo, hi, BM):
        row = start + tl.arange(0, BM)
        i, r, at = load_rows(row, b, kvh, K, L, R)
        real = row < L * R
        bounds = b * s_bb + kvh * s_bk + i
        first, last = tl.load(first_ptr + bounds), tl.load(last_ptr + bounds)
        q_at = b * s_qb + (kvh * R + r).to(tl.int64) * s_qh + i.to(tl.int64) * s_ql
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        d_out = tl.load(d_out_ptr + at[:, None] * DV + e[None, :], mask=real[:, None] & (e[None, :] < DV), other=0.0)
        lse = tl.load(lse_ptr + at, mask=real, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=real, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + bias[:, None]
        visible = (n[:, None] >= first[None, :]) & (n[:, None] < last[None, :]) & real[None, :]
        p = tl.where(visible, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    out = (b * K + kvh) * N + n[:, None].to(tl.int64)
    tl.store(dk_ptr + out * D + d[None, :], (dk * softmax_scale).to(k.dtype), mask=k_width)
    tl.store(dv_ptr + out * DV + e[None, :], dv.to(v.dtype), mask=v_width)
