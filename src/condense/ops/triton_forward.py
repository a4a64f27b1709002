"""Forward kernel of prefix-band attention: one online softmax over prefix entries, then the band.

A program owns a tile of rows, a row being one query of one of the R query heads that share a KV head, so any ratio
works and each key is read once for all of them. Blocks of keys that every row sees whole run without a mask.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, M prefix entries, N band tokens,
D and DV widths. BM rows and BN keys per tile, BD and BV the widths rounded up to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(row, b, kvh, K, L, R):
    """Query and head within its group of each row of a tile, and its place in a contiguous ``[B, H, L]``.

    Rows past the end repeat the last query.
    """
    i, r = tl.minimum(row // R, L - 1), row % R
    return i, r, ((b * K + kvh) * R + r) * L + i


@triton.jit
def _forward_keys(
    acc, m, total, q, k_ptr, v_ptr, bias_ptr, s_kn, s_vn, lo, hi, first, last, size, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[lo, hi)`` of one source; a row sees ``[first, last)``. Scores are base 2."""
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        inside = n[:, None] < size
        k = tl.load(k_ptr + n[:, None].to(tl.int64) * s_kn + d[None, :], mask=inside & (d[None, :] < D), other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if BIASED:
            s += tl.load(bias_ptr + n, mask=n < size, other=0.0)[None, :]
        if MASKED:
            s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + n[:, None].to(tl.int64) * s_vn + e[None, :], mask=inside & (e[None, :] < DV), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit
def attend_fwd_kernel(
    q_ptr, pk_ptr, pv_ptr, bk_ptr, bv_ptr, bias_ptr, rep_end_ptr, raw_start_ptr, raw_end_ptr, out_ptr, lse_ptr,
    s_qb, s_qh, s_ql, s_pkb, s_pkh, s_pkn, s_pvb, s_pvh, s_pvn, s_bkb, s_bkh, s_bkn, s_bvb, s_bvh, s_bvn,
    s_biasb, s_biask, s_bb, s_bk, K, R, L, M, N, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, L, Dv]`` and natural log-sum-exp ``[B, H, L]``, both contiguous."""
    # the last rows see most: start them first
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
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
    acc = tl.zeros([BM, BV], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    zero = tl.zeros_like(rep_end)

    k_ptr, v_ptr = pk_ptr + b * s_pkb + kvh * s_pkh, pv_ptr + b * s_pvb + kvh * s_pvh
    bias = bias_ptr + b * s_biasb + kvh * s_biask
    whole = tl.min(rep_end) // BN * BN
    acc, m, total = _forward_keys(
        acc, m, total, q, k_ptr, v_ptr, bias, s_pkn, s_pvn, 0, whole, zero, rep_end, M, scale,
        D, DV, BD, BV, BN, False, BIASED, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k_ptr, v_ptr, bias, s_pkn, s_pvn, whole, tl.max(rep_end), zero, rep_end, M, scale,
        D, DV, BD, BV, BN, True, BIASED, PRECISION,
    )  # fmt: skip

    k_ptr, v_ptr = bk_ptr + b * s_bkb + kvh * s_bkh, bv_ptr + b * s_bvb + kvh * s_bvh
    lo, hi = tl.min(raw_start), tl.max(raw_end)
    left = tl.minimum(lo + tl.cdiv(tl.max(raw_start) - lo, BN) * BN, hi)
    whole = left + tl.maximum(tl.min(raw_end) - left, 0) // BN * BN
    acc, m, total = _forward_keys(
        acc, m, total, q, k_ptr, v_ptr, bias, s_bkn, s_bvn, lo, left, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k_ptr, v_ptr, bias, s_bkn, s_bvn, left, whole, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, False, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k_ptr, v_ptr, bias, s_bkn, s_bvn, whole, hi, raw_start, raw_end, N, scale,
        D, DV, BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip

    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at[:, None] * DV + e[None, :], out.to(q.dtype), mask=real[:, None] & (e[None, :] < DV))
    lse = tl.where(total > 0, (m + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + at, lse, mask=real)
