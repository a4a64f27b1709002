"""Kernels of summaries and pooling, forward and backward: no atomics, the same result every time.

A program owns a few windows or groups of one KV head, one per row of its tile, and walks through their tokens one by
one, so that any group size works, a token's whole vector is read by neighbouring threads, equal keys get equal
scores bit by bit, and sums over tokens need no exchange between threads. The walk is unrolled to keep several
loads on their way.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L new queries, Q queries kept from before, N band
tokens, G windows or groups, D and DV widths. BG windows, groups or columns per tile, BD and BV the widths rounded up
to powers of two. Strides are in elements, those of the width are 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNROLL = tl.constexpr(4)
# what changes from call to call must not compile anew
VARYING = ["start", "before", "after", "L", "Q", "N", "G", "S", "c", "stride", "lead"]


@triton.jit
def _row(rows_ptr, b, num_rows, start, before, after, PER_ROW: tl.constexpr):
    """A row's first window, and its real tokens before and after the new queries."""
    if PER_ROW:
        start = tl.load(rows_ptr + b)
        before = tl.load(rows_ptr + num_rows + b)
        after = tl.load(rows_ptr + 2 * num_rows + b)
    return start, before, after


@triton.jit(do_not_specialize=VARYING)
def summarize_fwd_kernel(
    q_ptr, tail_ptr, rows_ptr, out_ptr, s_qb, s_qh, s_ql, s_tb, s_tk, s_tn,
    start, before, after, num_rows, K, L, Q, G, S, stride,
    R: tl.constexpr, RB: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
    TAIL: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """out float32 ``[B, K, G, D]``, contiguous. Heads are added RB at a time, which divides R."""
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    start, before, after = _row(rows_ptr, b, num_rows, start, before, after, PER_ROW)
    first = L - (after - before)
    j, d = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BD)
    real, width = j < G, d[None, :] < D
    begin = start + j * stride
    q_row = q_ptr + b * s_qb + kvh * R * s_qh + d[None, :]
    t_row = tail_ptr + b * s_tb + kvh * s_tk + d[None, :]
    total = tl.zeros([BG, BD], tl.float32)
    for s in tl.range(0, S, loop_unroll_factor=UNROLL):
        p = begin + s
        new = (real & (p >= before) & (p < after))[:, None] & width
        at = q_row + (first + p - before)[:, None].to(tl.int64) * s_ql
        mean = tl.zeros([BG, BD], tl.float32)
        for r0 in range(0, R, RB):
            for r in tl.static_range(RB):
                mean += tl.load(at + (r0 + r) * s_qh, mask=new, other=0.0).to(tl.float32)
        # rounded like the mean queries that a cache keeps
        total += (mean * (1.0 / R)).to(q_ptr.dtype.element_ty).to(tl.float32)
        if TAIL:
            old = (real & (p < before) & (p >= 0) & (p >= before - Q))[:, None] & width
            at = t_row + (Q + p - before)[:, None].to(tl.int64) * s_tn
            total += tl.load(at, mask=old, other=0.0).to(tl.float32)
    count = tl.maximum(tl.minimum(begin + S, S), 1).to(tl.float32)
    out = out_ptr + ((b * K + kvh) * G + j)[:, None] * D + d[None, :]
    tl.store(out, total / count[:, None], mask=real[:, None] & width)


@triton.jit(do_not_specialize=VARYING)
def summarize_bwd_kernel(
    d_out_ptr, rows_ptr, dq_ptr, s_db, s_dk, s_dg, start, before, after, num_rows, K, L, G, S, stride,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """dq ``[B, H, L, D]``, contiguous: every query adds up the windows that hold it."""
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    start, before, after = _row(rows_ptr, b, num_rows, start, before, after, PER_ROW)
    column, d = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BD)
    width = d[None, :] < D
    p = before + column - (L - (after - before))
    real = (column < L) & (p >= before) & (p >= start)
    last = (p - start) // stride
    d_row = d_out_ptr + b * s_db + kvh * s_dk + d[None, :]
    total = tl.zeros([BG, BD], tl.float32)
    for i in range((S + stride - 1) // stride):
        j = last - i
        end = start + j * stride + S
        holds = real & (j >= 0) & (j < G) & (p < end)
        count = tl.maximum(tl.minimum(end, S), 1).to(tl.float32)
        at = d_row + j[:, None].to(tl.int64) * s_dg
        total += tl.load(at, mask=holds[:, None] & width, other=0.0) / count[:, None]
    dq = (total * (1.0 / R)).to(dq_ptr.dtype.element_ty)
    at = dq_ptr + ((b * K + kvh) * R * L + column)[:, None] * D + d[None, :]
    inside = (column < L)[:, None] & width
    for r in range(R):
        tl.store(at + r * L.to(tl.int64) * D, dq, mask=inside)


@triton.jit
def _pool(pooled, x, alpha, p, better, HOW: tl.constexpr):
    """One more token in each group's key or value."""
    if HOW == "weighted":
        pooled = pooled * alpha[:, None] + x * p[:, None]
    elif HOW == "mean":
        pooled += x
    elif HOW == "max":
        pooled = tl.maximum(pooled, x)
    else:
        pooled = tl.where(better[:, None], x, pooled)
    return pooled


@triton.jit
def _pooled(pooled, total, c, HOW: tl.constexpr):
    """What a group's tokens add up to."""
    if HOW == "weighted":
        pooled = pooled / total[:, None]
    elif HOW == "mean":
        pooled = pooled / c.to(tl.float32)
    return pooled


@triton.jit(do_not_specialize=VARYING)
def pool_fwd_kernel(
    k_ptr, v_ptr, summary_ptr, start, out_k_ptr, out_v_ptr,
    s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_sb, s_sh, s_sg, K, N, G, c, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCORED: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """out_k ``[B, K, G, D]`` and out_v ``[B, K, G, Dv]``, contiguous. ``scale`` is for powers of two.

    start is a number or, with PER_ROW, a pointer to one per row.
    """
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    if PER_ROW:
        start = tl.load(start + b)
    j = tl.program_id(0) * BG + tl.arange(0, BG)
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    k_width, v_width = (j < G)[:, None] & (d[None, :] < D), (j < G)[:, None] & (e[None, :] < DV)
    k_row, v_row = k_ptr + b * s_kb + kvh * s_kh + d[None, :], v_ptr + b * s_vb + kvh * s_vh + e[None, :]
    best = tl.full([BG], float("-inf"), tl.float32)
    total, alpha, p = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    better = j < 0
    if SCORED:
        at = summary_ptr + b * s_sb + kvh * s_sh + j[:, None].to(tl.int64) * s_sg + d[None, :]
        summary = tl.load(at, mask=k_width, other=0.0) * scale
    key = tl.full([BG, BD], float("-inf") if KEYS == "max" else 0.0, tl.float32)
    value = tl.full([BG, BV], float("-inf") if VALUES == "max" else 0.0, tl.float32)
    for i in tl.range(0, c, loop_unroll_factor=UNROLL):
        # groups past the end, which nobody sees, stay finite
        n = tl.minimum(start + j * c + i, N - 1)[:, None].to(tl.int64)
        k = tl.load(k_row + n * s_kn, mask=k_width, other=0.0).to(tl.float32)
        if DV > 0:
            v = tl.load(v_row + n * s_vn, mask=v_width, other=0.0).to(tl.float32)
        if SCORED:
            score = tl.sum(k * summary, 1)
            better = score > best  # ties stay with the earlier token
            new_best = tl.maximum(best, score)
            alpha, p = tl.exp2(best - new_best), tl.exp2(score - new_best)
            total = total * alpha + p
            best = new_best
        key = _pool(key, k, alpha, p, better, KEYS)
        if DV > 0:
            value = _pool(value, v, alpha, p, better, VALUES)
    at = ((b * K + kvh) * G + j)[:, None]
    key = _pooled(key, total, c, KEYS).to(k_ptr.dtype.element_ty)
    tl.store(out_k_ptr + at * D + d[None, :], key, mask=k_width)
    if DV > 0:
        value = _pooled(value, total, c, VALUES).to(v_ptr.dtype.element_ty)
        tl.store(out_v_ptr + at * DV + e[None, :], value, mask=v_width)


@triton.jit
def _largest(largest, ties, x):
    """Largest number per channel so far, and how many tokens share it."""
    ties = tl.where(x > largest, 1.0, ties + tl.where(x == largest, 1.0, 0.0))
    return tl.maximum(largest, x), ties


@triton.jit
def _shares(d_x, x, largest, ties, weight, chosen, c, HOW: tl.constexpr):
    """One token's share of the gradient of its group's key or value."""
    if HOW == "weighted":
        d_x = d_x * weight[:, None]
    elif HOW == "mean":
        d_x = d_x / c.to(tl.float32)
    elif HOW == "max":
        d_x = tl.where(x == largest, d_x / ties, 0.0)
    else:
        d_x = tl.where(chosen[:, None], d_x, 0.0)
    return d_x


@triton.jit(do_not_specialize=VARYING)
def pool_bwd_kernel(
    k_ptr, v_ptr, summary_ptr, start, d_key_ptr, d_value_ptr, dk_ptr, dv_ptr, d_summary_ptr,
    s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_sb, s_sh, s_sg, K, N, G, c, lead, scale, base2,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCORED: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """dk ``[B, K, N, D]``, dv ``[B, K, N, Dv]`` and d_summary float32 ``[B, K, G, D]`` of the gradients of
    `pool_fwd_kernel`'s results; all of these contiguous. ``base2`` is the scale for powers of two.

    Programs also own ``lead`` groups in front of the first and what comes after the last, whose tokens get zero.
    """
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    if PER_ROW:
        start = tl.load(start + b)
    j = tl.program_id(0) * BG + tl.arange(0, BG) - lead
    real = (j >= 0) & (j < G)
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    k_width, v_width = d[None, :] < D, e[None, :] < DV
    k_row, v_row = k_ptr + b * s_kb + kvh * s_kh + d[None, :], v_ptr + b * s_vb + kvh * s_vh + e[None, :]
    group = ((b * K + kvh) * G + j)[:, None]
    d_key = tl.load(d_key_ptr + group * D + d[None, :], mask=real[:, None] & k_width, other=0.0).to(tl.float32)
    d_value = tl.zeros([BG, BV], tl.float32)
    if DV > 0:
        d_value += tl.load(d_value_ptr + group * DV + e[None, :], mask=real[:, None] & v_width, other=0.0)
    summary = tl.zeros([BG, BD], tl.float32)
    if SCORED:
        at = summary_ptr + b * s_sb + kvh * s_sh + j[:, None].to(tl.int64) * s_sg + d[None, :]
        summary += tl.load(at, mask=real[:, None] & k_width, other=0.0)

    # first walk: softmax and mean gradient of the weights, anchor, largest numbers
    best = tl.full([BG], float("-inf"), tl.float32)
    total, slope = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    anchor = tl.zeros([BG], tl.int32)
    k_max, k_ties = tl.full([BG, BD], float("-inf"), tl.float32), tl.zeros([BG, BD], tl.float32)
    v_max, v_ties = tl.full([BG, BV], float("-inf"), tl.float32), tl.zeros([BG, BV], tl.float32)
    if SCORED or KEYS == "max" or VALUES == "max":
        for i in tl.range(0, c, loop_unroll_factor=UNROLL):
            n = start + j * c + i
            seen = (real & (n < N))[:, None]
            token = n[:, None].to(tl.int64)
            k = tl.load(k_row + token * s_kn, mask=seen & k_width, other=0.0).to(tl.float32)
            gain = tl.zeros([BG], tl.float32)
            if KEYS == "weighted":
                gain += tl.sum(k * d_key, 1)
            if KEYS == "max":
                k_max, k_ties = _largest(k_max, k_ties, k)
            if DV > 0 and (VALUES == "weighted" or VALUES == "max"):
                v = tl.load(v_row + token * s_vn, mask=seen & v_width, other=0.0).to(tl.float32)
                if VALUES == "weighted":
                    gain += tl.sum(v * d_value, 1)
                else:
                    v_max, v_ties = _largest(v_max, v_ties, v)
            if SCORED:
                score = tl.sum(k * summary, 1) * base2
                anchor = tl.where(score > best, i, anchor)
                new_best = tl.maximum(best, score)
                alpha, p = tl.exp2(best - new_best), tl.exp2(score - new_best)
                total = total * alpha + p
                slope = slope * alpha + p * gain
                best = new_best

    # second walk: the tokens are still in a cache near by
    d_summary = tl.zeros([BG, BD], tl.float32)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    slope = slope * inverse
    for i in range(c):
        n = start + j * c + i
        inside = ((n >= 0) & (n < N))[:, None]
        seen = real[:, None] & inside
        token = n[:, None].to(tl.int64)
        k = tl.load(k_row + token * s_kn, mask=seen & k_width, other=0.0).to(tl.float32)
        v = tl.zeros([BG, BV], tl.float32)
        if DV > 0 and (VALUES == "weighted" or VALUES == "max"):
            v += tl.load(v_row + token * s_vn, mask=seen & v_width, other=0.0)
        weight = tl.zeros([BG], tl.float32)
        gain = tl.zeros([BG], tl.float32)
        if SCORED:
            weight += tl.exp2(tl.sum(k * summary, 1) * base2 - best) * inverse
        dk = _shares(d_key, k, k_max, k_ties, weight, anchor == i, c, KEYS)
        if KEYS == "weighted":
            gain += tl.sum(k * d_key, 1)
        if DV > 0:
            dv = _shares(d_value, v, v_max, v_ties, weight, anchor == i, c, VALUES)
            if VALUES == "weighted":
                gain += tl.sum(v * d_value, 1)
            out = dv_ptr + ((b * K + kvh) * N + token) * DV + e[None, :]
            tl.store(out, dv.to(dv_ptr.dtype.element_ty), mask=inside & v_width)
        if KEYS == "weighted" or (VALUES == "weighted" and DV > 0):
            d_score = (weight * (gain - slope) * scale)[:, None]
            dk += d_score * summary
            d_summary += d_score * k
        out = dk_ptr + ((b * K + kvh) * N + token) * D + d[None, :]
        tl.store(out, dk.to(dk_ptr.dtype.element_ty), mask=inside & k_width)
    if SCORED:
        tl.store(d_summary_ptr + group * D + d[None, :], d_summary, mask=real[:, None] & k_width)
