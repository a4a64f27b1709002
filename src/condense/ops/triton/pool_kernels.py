"""Kernels of summaries and pooling, forward and backward: no atomics, so results are deterministic.

A program owns a few spans or groups of one KV head and loops over their tokens BT at a time, so any group size works.
Tiles are ``[BT, BG, BD]`` in this order: threads and warps then spread over groups and width, and each thread holds all
BT tokens of its own channels. So BT loads are in flight at once, sums over tokens stay in a thread and sums over the
width in a warp, and equal keys get bit-equal scores.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L new queries, Q mean queries kept, N tokens of the
window, G spans of queries or groups, D and DV widths. BG spans, groups or columns per tile, BR heads and BT tokens read
at once, BD the larger width rounded up to a power of two, so that keys and values have one layout. Strides are in
elements, those of the width are 1.

KIND says how spans of queries are given: "row", computed from numbers that are the same in all rows; "rows", computed
from numbers of each row; "columns", loaded span by span.
"""

import triton
import triton.language as tl

# not specialised: these numbers change from call to call, and a new value must not compile a new kernel
VARYING = ["start", "before", "after", "L", "Q", "N", "G", "S", "c", "stride", "s_cb"]


@triton.jit
def _row(rows_ptr, b, num_rows, start, before, after, KIND: tl.constexpr):
    """Start of a row's first span of queries, and its real tokens before and after the new queries."""
    if KIND == "rows":
        start = tl.load(rows_ptr + b)
        before = tl.load(rows_ptr + num_rows + b)
        after = tl.load(rows_ptr + 2 * num_rows + b)
    return start, before, after


@triton.jit(do_not_specialize=VARYING)
def summarize_fwd_kernel(
    q_ptr, tail_ptr, rows_ptr, out_ptr, s_qb, s_qh, s_ql, s_tb, s_tk, s_tn,
    start, before, after, num_rows, K, L, Q, G, S, stride,
    R: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    TAIL: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write mean queries of spans to out, float32 ``[B, K, G, D]``, contiguous.

    rows: int32, with "rows" ``[3, B]``: start, before and after of each row; with "columns" ``[2, G]``: first column of
    each span and the column after its last. tail: mean queries of the Q tokens before the new ones.
    """
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    start, before, after = _row(rows_ptr, b, num_rows, start, before, after, KIND)
    first = L - (after - before)
    j, d = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BD)
    begin, real, width = start + j * stride, j < G, d < D
    size = tl.full([BG], 0, tl.int32) + S
    count = tl.minimum(begin + S, S)
    if KIND == "columns":
        begin = tl.load(rows_ptr + j, mask=real, other=0)
        size = tl.load(rows_ptr + G + j, mask=real, other=0) - begin
        count = size
    q_row, t_row = q_ptr + b * s_qb + kvh * R * s_qh + d, tail_ptr + b * s_tb + kvh * s_tk + d
    total = tl.zeros([BG, BD], tl.float32)
    for s0 in range(0, S, BT):
        s = s0 + tl.arange(0, BT)
        p = begin[None, :] + s[:, None]  # [BT, BG]
        wanted = real[None, :] & (s[:, None] < size[None, :])
        new = (wanted & (p >= before) & (p < after))[:, None, :, None] & width[None, None, None, :]  # [BT, 1, BG, BD]
        at = q_row[None, None, None, :] + (first + p - before)[:, None, :, None].to(tl.int64) * s_ql
        mean = tl.zeros([BT, BG, BD], tl.float32)
        for r0 in range(0, R, BR):
            r = r0 + tl.arange(0, BR)[None, :, None, None]  # [1, BR, 1, 1]
            mean += tl.sum(tl.load(at + r * s_qh, mask=new & (r < R), other=0.0).to(tl.float32), 1)
        # rounded to the dtype of q, as mean queries in a cache are: so summaries are the same with and without a cache
        mean = (mean * (1.0 / R)).to(q_ptr.dtype.element_ty).to(tl.float32)
        if TAIL:
            old = (wanted & (p < before) & (p >= 0) & (p >= before - Q))[:, :, None] & width[None, None, :]
            at_old = t_row[None, None, :] + (Q + p - before)[:, :, None].to(tl.int64) * s_tn
            mean += tl.load(at_old, mask=old, other=0.0).to(tl.float32)
        total += tl.sum(mean, 0)
    count = tl.maximum(count, 1).to(tl.float32)
    out = out_ptr + ((b * K + kvh) * G + j)[:, None] * D + d[None, :]
    tl.store(out, total / count[:, None], mask=real[:, None] & width[None, :])


@triton.jit(do_not_specialize=VARYING)
def summarize_bwd_kernel(
    d_out_ptr, rows_ptr, holders_ptr, dq_ptr, s_db, s_dk, s_dg, start, before, after, num_rows, K, L, G, S, stride,
    R: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write dq ``[B, H, L, D]``, contiguous: for every query the sum of gradients over the spans that hold it.

    rows: as in `summarize_fwd_kernel`; holders, with "columns": int32 ``[2, L]``, query i is in spans
    ``[holders[0, i], holders[1, i])``.
    """
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    start, before, after = _row(rows_ptr, b, num_rows, start, before, after, KIND)
    column, d = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BD)
    width = d[None, :] < D
    p = before + column - (L - (after - before))
    real = (column < L) & (p >= before) & (p >= start)
    last = (p - start) // stride
    most = tl.cdiv(S, stride)
    earliest = tl.zeros([BG], tl.int32)
    if KIND == "columns":
        earliest = tl.load(holders_ptr + column, mask=real, other=0)
        last = tl.load(holders_ptr + L + column, mask=real, other=0) - 1
        most = tl.max(last - earliest) + 1
    d_row = d_out_ptr + b * s_db + kvh * s_dk + d[None, :]
    total = tl.zeros([BG, BD], tl.float32)
    for i in range(most):
        j = last - i
        holds = real & (j >= earliest) & (j < G)
        if KIND == "columns":
            count = tl.load(rows_ptr + G + j, mask=holds, other=1) - tl.load(rows_ptr + j, mask=holds, other=0)
        else:
            end = start + j * stride + S
            holds = holds & (p < end)
            count = tl.minimum(end, S)
        count = tl.maximum(count, 1).to(tl.float32)
        at = d_row + j[:, None].to(tl.int64) * s_dg  # [BG, BD]
        total += tl.load(at, mask=holds[:, None] & width, other=0.0) / count[:, None]
    dq = (total * (1.0 / R)).to(dq_ptr.dtype.element_ty)
    inside = (column < L)[:, None] & width
    for r in range(R):
        at = (((b * K + kvh) * R + r) * L + column)[:, None]
        tl.store(dq_ptr + at * D + d[None, :], dq, mask=inside)


@triton.jit
def _load(row, n, s_n, mask):
    """Vectors ``[BT, BG, BD]`` of tokens n ``[BT, BG]``, float32, 0 where masked."""
    return tl.load(row[None, None, :] + n[:, :, None].to(tl.int64) * s_n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _begin(columns_ptr, row, start, j, G, c):
    """First columns of groups j. row: offset of the batch row's columns."""
    if columns_ptr is None:
        return start + j * c
    else:
        return tl.load(columns_ptr + row + j, mask=j < G, other=0)


@triton.jit
def _pool(pooled, x, valid, alpha, p, chosen, better, HOW: tl.constexpr):
    """Add BT more tokens x to each group's pooled key or value."""
    if HOW == "weighted":
        pooled = pooled * alpha[:, None] + tl.sum(x * p[:, :, None], 0)
    elif HOW == "mean":
        pooled += tl.sum(x, 0)
    elif HOW == "max":
        pooled = tl.maximum(pooled, tl.max(tl.where(valid[:, None, None], x, float("-inf")), 0))
    else:
        pooled = tl.where(better[:, None], tl.sum(tl.where(chosen[:, :, None], x, 0.0), 0), pooled)
    return pooled


@triton.jit
def _pooled(pooled, total, c, HOW: tl.constexpr):
    """The pooled key or value, after all tokens were added."""
    if HOW == "weighted":
        pooled = pooled / total[:, None]
    elif HOW == "mean":
        # not c.to(...): with it torch.compile cannot tell which tensors the kernel writes, and assumes all of them
        pooled = pooled / c
    return pooled


@triton.jit(do_not_specialize=VARYING)
def pool_fwd_kernel(
    k_ptr, v_ptr, summary_ptr, columns_ptr, out_k_ptr, out_v_ptr, lse_ptr,
    s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_sb, s_sh, s_sg, s_cb, start, K, N, G, c, scale,
    D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Write pooled keys out_k ``[B, K, G, D]`` and values out_v ``[B, K, G, Dv]``, contiguous; unless lse is None, also
    the natural log-sum-exp of each group's scores, float32 ``[B, K, G]``. SCORED: there are scores, by summary queries.

    columns: where groups begin, int32 ``[B|1, G]``; None: one after another from column ``start`` on. scale: of scores,
    times log2(e).
    """
    scale = tl.full([], scale, tl.float32)  # torch.compile hands numbers over in float64
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    j = tl.program_id(0) * BG + tl.arange(0, BG)
    begin = _begin(columns_ptr, b * s_cb, start, j, G, c)
    d = tl.arange(0, BD)
    k_width, v_width = (j < G)[:, None] & (d < D)[None, :], (j < G)[:, None] & (d < DV)[None, :]
    k_row, v_row = k_ptr + b * s_kb + kvh * s_kh + d, v_ptr + b * s_vb + kvh * s_vh + d
    best = tl.full([BG], float("-inf"), tl.float32)
    total, alpha = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    p, chosen, better = tl.zeros([BT, BG], tl.float32), tl.full([BT, BG], False, tl.int1), j < 0
    if SCORED:
        at = summary_ptr + b * s_sb + kvh * s_sh + j[:, None].to(tl.int64) * s_sg + d[None, :]
        summary = tl.load(at, mask=k_width, other=0.0) * scale
    key = tl.full([BG, BD], float("-inf") if KEYS == "max" else 0.0, tl.float32)
    value = tl.full([BG, BD], float("-inf") if VALUES == "max" else 0.0, tl.float32)
    for i in range(0, c, BT):
        step = tl.arange(0, BT)
        valid = i + step < c
        # groups past the end read the last token: no query sees them, but they must be finite
        n = tl.minimum(begin[None, :] + (i + step)[:, None], N - 1)  # [BT, BG]
        k = _load(k_row, n, s_kn, valid[:, None, None] & k_width[None, :, :])
        if DV > 0:
            v = _load(v_row, n, s_vn, valid[:, None, None] & v_width[None, :, :])
        if SCORED:
            score = tl.where(valid[:, None], tl.sum(k * summary[None, :, :], 2), float("-inf"))  # [BT, BG]
            highest = tl.max(score, 0)  # [BG]
            # ties go to the earliest token
            chosen = step[:, None] == tl.argmax(score, 0)[None, :]
            better = highest > best
            new_best = tl.maximum(best, highest)
            alpha, p = tl.exp2(best - new_best), tl.exp2(score - new_best[None, :])
            total = total * alpha + tl.sum(p, 0)
            best = new_best
        key = _pool(key, k, valid, alpha, p, chosen, better, KEYS)
        if DV > 0:
            value = _pool(value, v, valid, alpha, p, chosen, better, VALUES)
    at_out = ((b * K + kvh) * G + j)[:, None]
    key = _pooled(key, total, c, KEYS).to(k_ptr.dtype.element_ty)
    tl.store(out_k_ptr + at_out * D + d[None, :], key, mask=k_width)
    if DV > 0:
        value = _pooled(value, total, c, VALUES).to(v_ptr.dtype.element_ty)
        tl.store(out_v_ptr + at_out * DV + d[None, :], value, mask=v_width)
    if lse_ptr is not None:
        lse = (best + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + (b * K + kvh) * G + j, lse, mask=j < G)


@triton.jit
def _add(total, lost, x):
    """Return total + x and its accumulated rounding error: Kahan summation, because groups may be long."""
    x -= lost
    new = total + x
    return new, (new - total) - x


@triton.jit
def _largest(largest, ties, x, valid):
    """Largest number per channel so far, with BT more tokens x, and how many tokens have it."""
    x = tl.where(valid[:, None, None], x, float("-inf"))
    new = tl.maximum(largest, tl.max(x, 0))
    return new, tl.where(new == largest, ties, 0.0) + tl.sum(tl.where(x == new[None, :, :], 1.0, 0.0), 0)


@triton.jit
def _shares(d_x, x, largest, ties, weight, chosen, c, HOW: tl.constexpr):
    """BT tokens' shares ``[BT, BG, BD]`` of the gradient d_x of their group's key or value."""
    if HOW == "weighted":
        share = d_x[None, :, :] * weight[:, :, None]
    elif HOW == "mean":
        share = (d_x / c)[None, :, :] + tl.zeros_like(x)
    elif HOW == "max":
        share = tl.where(x == largest[None, :, :], (d_x / ties)[None, :, :], 0.0)
    else:
        share = tl.where(chosen[:, :, None], d_x[None, :, :], 0.0)
    return share


@triton.jit(do_not_specialize=VARYING)
def pool_bwd_kernel(
    k_ptr, v_ptr, summary_ptr, columns_ptr, d_key_ptr, d_value_ptr, d_lse_ptr, dk_ptr, dv_ptr, d_summary_ptr,
    s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_sb, s_sh, s_sg, s_cb, start, K, N, G, c, scale, base2,
    D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Write dk ``[B, K, N, D]``, dv ``[B, K, N, Dv]`` and d_summary float32 ``[B, K, G, D]``, given the gradients of
    `pool_fwd_kernel`'s results; all contiguous. d_lse: None if there is none. ``base2``: the scale times log2(e).

    dk and dv of tokens that are in no group are not written.
    """
    scale, base2 = tl.full([], scale, tl.float32), tl.full([], base2, tl.float32)
    b, kvh = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    j = tl.program_id(0) * BG + tl.arange(0, BG)
    begin = _begin(columns_ptr, b * s_cb, start, j, G, c)
    real, step = j < G, tl.arange(0, BT)
    d = tl.arange(0, BD)
    k_width, v_width = (d < D)[None, None, :], (d < DV)[None, None, :]
    k_row, v_row = k_ptr + b * s_kb + kvh * s_kh + d, v_ptr + b * s_vb + kvh * s_vh + d
    group = ((b * K + kvh) * G + j)[:, None]
    own_k, own_v = real[:, None] & (d < D)[None, :], real[:, None] & (d < DV)[None, :]
    d_key = tl.load(d_key_ptr + group * D + d[None, :], mask=own_k, other=0.0).to(tl.float32)
    d_value = tl.zeros([BG, BD], tl.float32)
    if DV > 0:
        d_value += tl.load(d_value_ptr + group * DV + d[None, :], mask=own_v, other=0.0)
    summary = tl.zeros([BG, BD], tl.float32)
    if SCORED:
        at = summary_ptr + b * s_sb + kvh * s_sh + j[:, None].to(tl.int64) * s_sg + d[None, :]
        summary += tl.load(at, mask=own_k, other=0.0)

    # first pass: softmax statistics, weighted mean of the weights' gradients, anchor, largest numbers
    best = tl.full([BG], float("-inf"), tl.float32)
    total, total_lost = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    slope, slope_lost = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
    anchor = tl.zeros([BG], tl.int32)
    k_max, k_ties = tl.full([BG, BD], float("-inf"), tl.float32), tl.zeros([BG, BD], tl.float32)
    v_max, v_ties = tl.full([BG, BD], float("-inf"), tl.float32), tl.zeros([BG, BD], tl.float32)
    if SCORED or KEYS == "max" or VALUES == "max":
        for i in range(0, c, BT):
            valid = i + step < c
            n = begin[None, :] + (i + step)[:, None]
            seen = (valid[:, None] & real[None, :] & (n < N))[:, :, None]  # [BT, BG, 1]
            k = _load(k_row, n, s_kn, seen & k_width)
            gain = tl.zeros([BT, BG], tl.float32)
            if KEYS == "weighted":
                gain += tl.sum(k * d_key[None, :, :], 2)
            if KEYS == "max":
                k_max, k_ties = _largest(k_max, k_ties, k, valid)
            if DV > 0 and (VALUES == "weighted" or VALUES == "max"):
                v = _load(v_row, n, s_vn, seen & v_width)
                if VALUES == "weighted":
                    gain += tl.sum(v * d_value[None, :, :], 2)
                else:
                    v_max, v_ties = _largest(v_max, v_ties, v, valid)
            if SCORED:
                score = tl.where(valid[:, None], tl.sum(k * summary[None, :, :], 2) * base2, float("-inf"))
                highest = tl.max(score, 0)
                anchor = tl.where(highest > best, i + tl.argmax(score, 0), anchor)
                new_best = tl.maximum(best, highest)
                alpha, p = tl.exp2(best - new_best), tl.exp2(score - new_best[None, :])
                total, total_lost = _add(total * alpha, total_lost * alpha, tl.sum(p, 0))
                slope, slope_lost = _add(slope * alpha, slope_lost * alpha, tl.sum(p * gain, 0))
                best = new_best

    # second pass: gradients of the tokens, which the GPU's cache still holds
    d_summary = tl.zeros([BG, BD], tl.float32)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    slope = slope * inverse
    if d_lse_ptr is not None:
        slope -= tl.load(d_lse_ptr + (b * K + kvh) * G + j, mask=real, other=0.0)
    for i in range(0, c, BT):
        valid = i + step < c
        n = begin[None, :] + (i + step)[:, None]
        seen = (valid[:, None] & real[None, :] & (n < N))[:, :, None]
        k = _load(k_row, n, s_kn, seen & k_width)
        v = tl.zeros([BT, BG, BD], tl.float32)
        if DV > 0 and (VALUES == "weighted" or VALUES == "max"):
            v += _load(v_row, n, s_vn, seen & v_width)
        weight, gain = tl.zeros([BT, BG], tl.float32), tl.zeros([BT, BG], tl.float32)
        if SCORED:
            score = tl.sum(k * summary[None, :, :], 2) * base2  # [BT, BG]
            weight += tl.where(valid[:, None], tl.exp2(score - best[None, :]) * inverse[None, :], 0.0)
        chosen = (i + step)[:, None] == anchor[None, :]
        dk = _shares(d_key, k, k_max, k_ties, weight, chosen, c, KEYS)
        if KEYS == "weighted":
            gain += tl.sum(k * d_key[None, :, :], 2)
        out = ((b * K + kvh) * N + n)[:, :, None]
        if DV > 0:
            dv = _shares(d_value, v, v_max, v_ties, weight, chosen, c, VALUES)
            if VALUES == "weighted":
                gain += tl.sum(v * d_value[None, :, :], 2)
            at_v = dv_ptr + out * DV + d[None, None, :]
            tl.store(at_v, dv.to(dv_ptr.dtype.element_ty), mask=seen & v_width)
        if KEYS == "weighted" or (VALUES == "weighted" and DV > 0) or d_lse_ptr is not None:
            d_score = (weight * (gain - slope[None, :]) * scale)[:, :, None]  # [BT, BG, 1]
            dk += d_score * summary[None, :, :]
            d_summary += tl.sum(d_score * k, 0)
        at_k = dk_ptr + out * D + d[None, None, :]
        tl.store(at_k, dk.to(dk_ptr.dtype.element_ty), mask=seen & k_width)
    if SCORED:
        tl.store(d_summary_ptr + group * D + d[None, :], d_summary, mask=own_k)
