"""Forward kernel of prefix-band attention: one online softmax over prefix entries, then the band.

A program owns a tile of rows, see `condense.ops.triton.device.rule`. Blocks of keys that every row sees whole
run without a mask. Keys and values come through tensor descriptors ``[B, K, N, D]``, which read zeros past the end.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, M prefix entries, N band tokens,
D0 + D1 width of queries and keys, V0 + V1 of values: parts, see `condense.ops.triton.device.parts`. A descriptor whose
name ends in 1 is for the second part, None if there is none. BM rows and BN keys per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.rule import split, tile_rows, visible

# numbers that change from call to call must not each make a new kernel
VARYING = ("L", "M", "query_start", "band_start", "pads", "offset", "chunk", "window", "max_chunks")


@triton.jit
def _forward_keys(
    acc, m, total, q, k_source, v_source, bias_ptr, b, kvh, lo, hi, first, last, size, scale, level,
    BN: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[lo, hi)`` of one source; a row sees ``[first, last)``. Scores are base 2.

    level is added to all of them; with BIASED, a number per key is.
    """
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(k_source, [b, kvh, start, 0], BN)
        s = products(q, k, PRECISION)
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
        v = load_block(v_source, [b, kvh, start, 0], BN)
        acc = add_weighted([x * alpha[:, None] for x in acc], p, v, PRECISION)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=VARYING)
def attend_fwd_kernel(
    q_ptr, entries_k, entries_k1, entries_v, entries_v1, window_k, window_k1, window_v, window_v1, bias_ptr, bounds,
    out_ptr, lse_ptr, s_q, s_bias, s_bounds, K, R, L, M, query_start, band_start, pads, offset,
    chunk, window, entries, max_chunks, scale, level,
    D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
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
    head = wide_kvh * R + r
    q_at = wide_b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2]
    q = load_rows(q_ptr, q_at, real, D0, D1)
    acc = zeros(BM, V0, V1)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    zero = tl.zeros_like(rep_end)

    bias_ptr += wide_b * s_bias[0] + wide_kvh * s_bias[1]
    k, v = parts(entries_k, entries_k1), parts(entries_v, entries_v1)
    hi = tl.max(rep_end)
    _, whole = split(0, 0, tl.min(rep_end), hi, BN)
    acc, m, total = _forward_keys(
        acc, m, total, q, k, v, bias_ptr, b, kvh, 0, whole, zero, rep_end, M, scale, level,
        BN, False, BIASED, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k, v, bias_ptr, b, kvh, whole, hi, zero, rep_end, M, scale, level,
        BN, True, BIASED, PRECISION,
    )  # fmt: skip

    k, v = parts(window_k, window_k1), parts(window_v, window_v1)
    lo, hi = tl.min(raw_start), tl.max(raw_end)
    left, right = split(lo, tl.max(raw_start), tl.min(raw_end), hi, BN)
    acc, m, total = _forward_keys(
        acc, m, total, q, k, v, bias_ptr, b, kvh, lo, left, raw_start, raw_end, M, scale, 0.0,
        BN, True, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k, v, bias_ptr, b, kvh, left, right, raw_start, raw_end, M, scale, 0.0,
        BN, False, False, PRECISION,
    )  # fmt: skip
    acc, m, total = _forward_keys(
        acc, m, total, q, k, v, bias_ptr, b, kvh, right, hi, raw_start, raw_end, M, scale, 0.0,
        BN, True, False, PRECISION,
    )  # fmt: skip

    at = (wide_b * K * R + head) * L + i
    safe = tl.where(total > 0, total, 1.0)
    store_rows(out_ptr, at * (V0 + V1), [x / safe[:, None] for x in acc], real, V0, V1)
    lse = tl.where(total > 0, (m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + at, lse, mask=real)
