"""Forward kernel of prefix-band attention: one online softmax over prefix entries, then the band.

A program owns a tile of rows, see `condense.ops.triton_rule`. Blocks of keys that every row sees whole run without a
mask. Keys and values come through tensor descriptors ``[B, K, N, D]``, which read zeros past the end.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, M prefix entries, N band tokens,
D and DV widths. BM rows and BN keys per tile, BD and BV the widths rounded up to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton_rule import split, tile_rows, visible

# numbers that change from call to call must not each make a new kernel
VARYING = ("L", "M", "query_start", "band_start", "pads", "offset", "chunk", "window", "max_chunks")


@triton.jit
def load_keys(source, b, kvh, start, BN: tl.constexpr, BD: tl.constexpr):
    """Keys or values ``[BN, BD]`` from ``start`` on."""
    return source.load([b, kvh, start, 0]).reshape(BN, BD)


@triton.jit
def _forward_keys(
    acc, m, total, q, k_source, v_source, bias_ptr, b, kvh, lo, hi, first, last, size, scale, level,
    BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[lo, hi)`` of one source; a row sees ``[first, last)``. Scores are base 2.

    level is added to all of them; with BIASED, a number per key is.
    """
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_keys(k_source, b, kvh, start, BN, BD)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BIASED:
            s = s * scale + tl.load(bias_ptr + n, mask=n < size, other=0.0)[None, :]
        if MASKED:
            s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), s, float("-inf"))
        # scale is positive: scaling the maximum leaves one fused multiply-add per score
        m_new = tl.maximum(m, tl.max(s, 1) if BIASED else tl.max(s, 1) * scale + level)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s - m_safe[:, None] if BIASED else s * scale - (m_safe - level)[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        v = load_keys(v_source, b, kvh, start, BN, BV)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=VARYING)
def attend_fwd_kernel(
    q_ptr, prefix_k, prefix_v, band_k, band_v, bias_ptr, bounds, out_ptr, lse_ptr,
    s_q, s_bias, s_bounds, K, R, L, M, query_start, band_start, pads, offset,
    chunk, window, entries, max_chunks, scale, level,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RULE: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, L, Dv]`` and natural log-sum-exp ``[B, H, L]``, both contiguous. scale > 0, base 2."""
    # the last rows see most: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, kvh = tl.program_id(1) // K, tl.program_id(1) % K
    wide_b, wide_kvh = b.to(tl.int64), kvh.to(tl.int64)
    i, r, real = tile_rows(tile * (BM // R), L, R, BM)
    start, rule = (query_start, band_start, pads, offset), (chunk, window, entries, max_chunks)
    rep_end, raw_start, raw_end = visible(i, wide_b, wide_kvh, bounds, s_bounds, start, rule, RULE)
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    head = wide_kvh * R + r
    q_at = wide_b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2]
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
    acc = tl.zeros([BM, BV], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    zero = tl.zeros_like(rep_end)

    bias_ptr += wide_b * s_bias[0] + wide_kvh * s_bias[1]
    hi = tl.max(rep_end)
    _, whole = split(0, 0, tl.min(rep_end), hi, BN)
    acc, m, total = _forward_keys(
        acc, m, total, q, prefix_k, prefix_v, bias_ptr, b, kvh, 0, whole, zero, rep_end, M, scale, level,
        BD, BV, BN, False, BIASED, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, prefix_k, prefix_v, bias_ptr, b, kvh, whole, hi, zero, rep_end, M, scale, level,
        BD, BV, BN, True, BIASED, PRECISION,
    )  # fmt: skip

    lo, hi = tl.min(raw_start), tl.max(raw_end)
    left, right = split(lo, tl.max(raw_start), tl.min(raw_end), hi, BN)
    acc, m, total = _forward_keys(
        acc, m, total, q, band_k, band_v, bias_ptr, b, kvh, lo, left, raw_start, raw_end, M, scale, 0.0,
        BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, band_k, band_v, bias_ptr, b, kvh, left, right, raw_start, raw_end, M, scale, 0.0,
        BD, BV, BN, False, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, band_k, band_v, bias_ptr, b, kvh, right, hi, raw_start, raw_end, M, scale, 0.0,
        BD, BV, BN, True, False, PRECISION,
    )  # fmt: skip

    at = (wide_b * K * R + head) * L + i
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at[:, None] * DV + e[None, :], out.to(q.dtype), mask=real[:, None] & (e[None, :] < DV))
    lse = tl.where(total > 0, (m + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + at, lse, mask=real)
