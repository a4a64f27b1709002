"""Kernels of one decode step: attention split over the keys with the due group closed on the way, then a reduce.

Programs of the first kernel run in no order, so what the step writes is read by none of them: split 0 takes the new
token from the inputs, the new entry from its registers and focal tokens from the ring, attends to these and stores
them; the other splits share what was there before. The reduce joins their parts and counts the token.

Shapes: B rows, K KV heads, R query heads per KV head, M entries, W and Q slots of the rings of tokens and of queries,
S splits. A summary is the mean of the newest ``num_summary`` queries.
Widths: keys are D0 + D1 columns, values V0 + V1, so that 80, 96, 192 or 576 columns are two powers of two and none
is loaded for nothing; P0, P1, U0, U1 are the same rounded up to powers of two for the tiles. LATENT: values are the
first D0 columns of the keys. BR rows (query heads) and BN keys per tile.
FOCAL: tokens of a chunk that are entries of their own; the chunk's scores are then all at hand, in a tile of CHUNK.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_NO_WRAP = tl.constexpr(2**31 - 1)


@triton.jit
def _rows(ptr, at, stride, mask, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    """Columns ``[lo, lo + width)`` of the rows ``at``, ``[n, P]``; zeros where masked."""
    d = tl.arange(0, P)
    inside = mask[:, None]
    if width != P:
        inside = inside & (d < width)[None, :]
    return tl.load(ptr + at.to(tl.int64)[:, None] * stride + lo + d[None, :], mask=inside, other=0.0)


@triton.jit
def _vector(ptr, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    """Columns ``[lo, lo + width)`` of one row, ``[P]``."""
    d = tl.arange(0, P)
    return tl.load(ptr + lo + d, mask=d < width, other=0.0)


@triton.jit
def _put(ptr, x, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    if width > 0:
        d = tl.arange(0, P)
        tl.store(ptr + lo + d, x, mask=d < width)


@triton.jit
def _store_part(
    part_ptr, lse_ptr, acc0, acc1, m, total, row, real, split, S,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr,
):  # fmt: skip
    """One split's output and base 2 log-sum-exp of some rows; the output only where the rows saw anything."""
    some = total > 0
    total = tl.where(some, total, 1.0)
    at = row.to(tl.int64) * S + split
    tl.store(lse_ptr + at, tl.where(some, m + tl.log2(total), float("-inf")), mask=real)
    e, stored = tl.arange(0, U0), (real & some)[:, None]
    out = part_ptr + at[:, None] * (V0 + V1)
    tl.store(out + e[None, :], acc0 / total[:, None], mask=stored & (e < V0)[None, :])
    if V1 > 0:
        e = tl.arange(0, U1)
        tl.store(out + V0 + e[None, :], acc1 / total[:, None], mask=stored & (e < V1)[None, :])


@triton.jit
def _attend_keys(
    acc0, acc1, m, total, q0, q1, k_ptr, v_ptr, s_k, s_v, lo, hi, count, first, wrap, scale, bias, ahead, exact,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr,
    BN: tl.constexpr, LATENT: tl.constexpr, PRECISION: tl.constexpr, PERIOD: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles ``[lo, hi)`` of the ``count`` keys that start in slot ``first``. Scores are base 2.

    Every tile holds a key, so the running maximum is finite from the first one on. PERIOD > 0: only pooled entries
    get the bias: of the first ``ahead`` those from ``exact`` on, then the last of each PERIOD.
    """
    for tile in range(lo, hi):
        i = tile * BN + tl.arange(0, BN)
        inside = i < count
        at = first + i
        at = tl.where(at >= wrap, at - wrap, at)
        k0 = _rows(k_ptr, at, s_k, inside, 0, D0, P0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            k1 = _rows(k_ptr, at, s_k, inside, D0, D1, P1)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        if PERIOD > 0:
            pooled = tl.where(i < ahead, i >= exact, (i - ahead) % PERIOD == PERIOD - 1)
            s = s * scale + tl.where(pooled, bias, 0.0)[None, :]
        else:
            s = s * scale + bias
        s = tl.where(inside[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        v0 = k0 if LATENT else _rows(v_ptr, at, s_v, inside, 0, V0, U0)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * alpha[:, None], input_precision=PRECISION)
        if V1 > 0:
            v1 = _rows(v_ptr, at, s_v, inside, V0, V1, U1)
            acc1 = tl.dot(p, v1, acc1 * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc0, acc1, m, total


@triton.jit
def _mean_query(q_ptr, s_qh, R, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    """Mean over the R heads, ``[P]`` in the dtype of q."""
    total = tl.zeros([P], tl.float32)
    for start in range(0, R, 16):
        r = start + tl.arange(0, 16)
        total += tl.sum(_rows(q_ptr, r, s_qh, r < R, lo, width, P).to(tl.float32), 0)
    return tl.div_rn(total, tl.zeros_like(total) + R).to(q_ptr.dtype.element_ty)


@triton.jit
def _summary(mean, rq_ptr, s_rq, t, Q, count, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    """Mean in float32 of the newest ``count`` mean queries, that of position t given; none before position 0."""
    total = mean.to(tl.float32)
    for start in range(1, count, 16):
        back = start + tl.arange(0, 16)
        older = (back < count) & (back <= t)
        total += tl.sum(_rows(rq_ptr, (t - back) % Q, s_rq, older, lo, width, P).to(tl.float32), 0)
    return tl.div_rn(total, tl.zeros_like(total) + tl.minimum(count, t + 1))


@triton.jit
def _members(ring_ptr, at, stride, older, newest, new, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    """Tokens of a chunk in float32, the new one from its vector: the ring may not hold it yet."""
    x = _rows(ring_ptr, at, stride, older, lo, width, P)
    return tl.where(newest[:, None], new[None, :], x).to(tl.float32)


@triton.jit
def _score(x0, x1, g0, g1, inside, scale, D1: tl.constexpr, SCORED: tl.constexpr):
    """Scores of 16 members, -inf where not inside; not SCORED: 0."""
    s = tl.zeros([16], tl.float32)
    if SCORED:
        s = tl.sum(x0 * g0[None, :], 1)
        if D1 > 0:
            s += tl.sum(x1 * g1[None, :], 1)
        s *= scale
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _all_scores(
    rk_ptr, s_rkn, k0, k1, g0, g1, first, t, W, chunk, scale,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores ``[CHUNK]`` of the chunk at position ``first``, -inf past its end."""
    j = tl.arange(0, CHUNK)
    scores = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, chunk, 16):
        i = start + tl.arange(0, 16)
        inside = i < chunk
        older, newest = inside & (first + i < t), inside & (first + i == t)
        at = (first + i) % W
        x0 = _members(rk_ptr, at, s_rkn, older, newest, k0, 0, D0, P0)
        x1 = tl.zeros([16, P1], tl.float32)
        if D1 > 0:
            x1 = _members(rk_ptr, at, s_rkn, older, newest, k1, D0, D1, P1)
        s = _score(x0, x1, g0, g1, inside, scale, D1, True)
        s = tl.sum(tl.where(j[:, None] == i[None, :], s[None, :], 0.0), 1)
        scores = tl.where((j >= start) & (j < start + 16), s, scores)
    return scores


@triton.jit
def _focal(scores, i, inside, FOCAL: tl.constexpr, CHUNK: tl.constexpr):
    """Scores of 16 tokens of a chunk, and which are among its FOCAL best, ties to the earlier."""
    j = tl.arange(0, CHUNK)[None, :]
    s = tl.sum(tl.where(j == i[:, None], scores[None, :], 0.0), 1)
    ahead = (scores[None, :] > s[:, None]) | ((scores[None, :] == s[:, None]) & (j < i[:, None]))
    return s, inside & (tl.sum(ahead.to(tl.int32), 1) < FOCAL)


@triton.jit
def _put_rows(ptr, x, at, stride, chosen, lo: tl.constexpr, width: tl.constexpr, P: tl.constexpr):
    d = tl.arange(0, P)
    there = chosen[:, None] & (d < width)[None, :]
    tl.store(ptr + at.to(tl.int64)[:, None] * stride + lo + d[None, :], x.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def _pool(acc, x, inside, weight, alpha, chosen, better, HOW: tl.constexpr):
    """One more tile of a chunk in its pooled vector."""
    if HOW == "weighted":
        return acc * alpha + tl.sum(weight[:, None] * x, 0)
    elif HOW == "mean":
        return acc + tl.sum(tl.where(inside[:, None], x, 0.0), 0)
    elif HOW == "max":
        return tl.maximum(acc, tl.max(tl.where(inside[:, None], x, float("-inf")), 0))
    else:
        return tl.where(better, tl.sum(tl.where(chosen[:, None], x, 0.0), 0), acc)


@triton.jit
def _pooled(acc, total, chunk, HOW: tl.constexpr, dtype: tl.constexpr):
    """The pooled vector, rounded as it is stored."""
    if HOW == "weighted":
        acc = tl.div_rn(acc, tl.zeros_like(acc) + total)
    elif HOW == "mean":
        acc = tl.div_rn(acc, tl.zeros_like(acc) + chunk)
    return acc.to(dtype)


@triton.jit
def _start(P: tl.constexpr, HOW: tl.constexpr):
    return tl.full([P], float("-inf") if HOW == "max" else 0.0, tl.float32)


@triton.jit
def _represent(
    pk_ptr, pv_ptr, rk_ptr, rv_ptr, s_pkn, s_pvn, s_rkn, s_rvn, k0, k1, v0, v1, g0, g1, scores,
    first, t, W, chunk, slot, writes, scale,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr,
    LATENT: tl.constexpr, SCORED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    FOCAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pooled entry of the chunk at position ``first``, as it is stored: key and value, two parts each.

    g0, g1: the summary query; not SCORED: all scores are 0. A latent's first part is pooled as a value. Focal tokens,
    by ``scores``, are not pooled: if this program ``writes``, they are put into the prefix from ``slot`` on.
    """
    HEAD: tl.constexpr = VALUE if LATENT else KEY
    e0, e1, f0, f1 = _start(P0, HEAD), _start(P1, KEY), _start(U0, VALUE), _start(U1, VALUE)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, chunk, 16):
        i = start + tl.arange(0, 16)
        inside = i < chunk
        older, newest = inside & (first + i < t), inside & (first + i == t)
        at = (first + i) % W
        x0 = _members(rk_ptr, at, s_rkn, older, newest, k0, 0, D0, P0)
        x1 = tl.zeros([16, P1], tl.float32)
        if D1 > 0:
            x1 = _members(rk_ptr, at, s_rkn, older, newest, k1, D0, D1, P1)
        focal, place = inside, i
        if FOCAL > 0:
            s, focal = _focal(scores, i, inside, FOCAL, CHUNK)
            place = slot + tl.cumsum(focal.to(tl.int32), 0) - 1
            slot += tl.sum(focal.to(tl.int32), 0)
            inside = inside & ~focal
            s = tl.where(inside, s, float("-inf"))
            focal = focal & writes
            _put_rows(pk_ptr, x0, place, s_pkn, focal, 0, D0, P0)
            if D1 > 0:
                _put_rows(pk_ptr, x1, place, s_pkn, focal, D0, D1, P1)
        else:
            s = _score(x0, x1, g0, g1, inside, scale, D1, SCORED)
        best = tl.max(s, 0)
        m_new = tl.maximum(m, best)
        # a tile may be all focal
        finite = tl.where(m_new == float("-inf"), 0.0, m_new) if FOCAL > 0 else m_new
        weight, alpha = tl.exp(s - finite), tl.exp(m - finite)
        better = best > m  # a tie goes to the lowest position, here and in `chosen`
        chosen = i == tl.min(tl.where(s == best, i, start + 16), 0)
        m, total = m_new, total * alpha + tl.sum(weight, 0)
        e0 = _pool(e0, x0, inside, weight, alpha, chosen, better, HEAD)
        if D1 > 0:
            e1 = _pool(e1, x1, inside, weight, alpha, chosen, better, KEY)
        if not LATENT:
            y0 = _members(rv_ptr, at, s_rvn, older, newest, v0, 0, V0, U0)
            f0 = _pool(f0, y0, inside, weight, alpha, chosen, better, VALUE)
            if FOCAL > 0:
                _put_rows(pv_ptr, y0, place, s_pvn, focal, 0, V0, U0)
            if V1 > 0:
                y1 = _members(rv_ptr, at, s_rvn, older, newest, v1, V0, V1, U1)
                f1 = _pool(f1, y1, inside, weight, alpha, chosen, better, VALUE)
                if FOCAL > 0:
                    _put_rows(pv_ptr, y1, place, s_pvn, focal, V0, V1, U1)
    pooled = chunk - FOCAL
    e0, e1 = _pooled(e0, total, pooled, HEAD, k0.dtype), _pooled(e1, total, pooled, KEY, k0.dtype)
    f0 = e0 if LATENT else _pooled(f0, total, pooled, VALUE, k0.dtype)
    return e0, e1, f0, _pooled(f1, total, pooled, VALUE, k0.dtype)


@triton.jit
def _attend_focal(
    acc0, acc1, m, total, q0, q1, rk_ptr, rv_ptr, s_rkn, s_rvn, k0, k1, v0, v1, scores, first, t, W, count, scale,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr,
    LATENT: tl.constexpr, FOCAL: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes on with an online softmax, whose maximum is finite, over the focal tokens of a chunk of ``count``."""
    for start in range(0, count, 16):
        i = start + tl.arange(0, 16)
        inside = i < count
        older, newest = inside & (first + i < t), inside & (first + i == t)
        at = (first + i) % W
        _, focal = _focal(scores, i, inside, FOCAL, CHUNK)
        x0 = _members(rk_ptr, at, s_rkn, older, newest, k0, 0, D0, P0).to(k0.dtype)
        s = tl.dot(q0, tl.trans(x0), input_precision=PRECISION)
        if D1 > 0:
            x1 = _members(rk_ptr, at, s_rkn, older, newest, k1, D0, D1, P1).to(k1.dtype)
            s = tl.dot(q1, tl.trans(x1), s, input_precision=PRECISION)
        s = tl.where(focal[None, :], s * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        y0 = x0 if LATENT else _members(rv_ptr, at, s_rvn, older, newest, v0, 0, V0, U0).to(v0.dtype)
        p = p.to(y0.dtype)
        acc0 = tl.dot(p, y0, acc0 * alpha[:, None], input_precision=PRECISION)
        if V1 > 0:
            y1 = _members(rv_ptr, at, s_rvn, older, newest, v1, V0, V1, U1).to(v1.dtype)
            acc1 = tl.dot(p, y1, acc1 * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc0, acc1, m, total


@triton.jit
def _new_token(
    q_ptr, k_ptr, v_ptr, pk_ptr, pv_ptr, rk_ptr, rv_ptr, rq_ptr, part_ptr, lse_ptr,
    s_qh, s_pkn, s_pvn, s_rkn, s_rvn, s_rqn, head, row_tile, t, first, due, begin, slot, entry_visible,
    R, W, Q, S, num_summary, chunk, scale, score_scale, bias,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr, BR: tl.constexpr,
    LATENT: tl.constexpr, SCORED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    FOCAL: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Split 0 of a KV head: attention to the new token and the new entries. The first tile of rows stores them.

    begin: the position at which the due chunk begins; slot: where its entries go in the prefix.
    """
    writes = row_tile == 0
    k0, k1 = _vector(k_ptr, 0, D0, P0), _vector(k_ptr, D0, D1, P1)
    if LATENT:
        v0, v1 = k0, tl.zeros([U1], k0.dtype)
    else:
        v0, v1 = _vector(v_ptr, 0, V0, U0), _vector(v_ptr, V0, V1, U1)
    mean0, mean1 = k0, k1
    if SCORED:
        mean0 = _mean_query(q_ptr, s_qh, R, 0, D0, P0)
        if D1 > 0:
            mean1 = _mean_query(q_ptr, s_qh, R, D0, D1, P1)
    # an entry that is not due stays zero and unseen
    e0, e1, f0, f1 = tl.zeros_like(k0), tl.zeros_like(k1), tl.zeros_like(v0), tl.zeros_like(v1)
    scores = tl.full([CHUNK], float("-inf"), tl.float32)
    if due:
        g0, g1 = mean0.to(tl.float32), mean1.to(tl.float32)
        if SCORED:
            g0 = _summary(mean0, rq_ptr, s_rqn, t, Q, num_summary, 0, D0, P0)
            if D1 > 0:
                g1 = _summary(mean1, rq_ptr, s_rqn, t, Q, num_summary, D0, D1, P1)
        if FOCAL > 0:
            scores = _all_scores(
                rk_ptr, s_rkn, k0, k1, g0, g1, begin, t, W, chunk, scale, D0, D1, P0, P1, CHUNK
            )  # fmt: skip
        e0, e1, f0, f1 = _represent(
            pk_ptr, pv_ptr, rk_ptr, rv_ptr, s_pkn, s_pvn, s_rkn, s_rvn, k0, k1, v0, v1, g0, g1, scores,
            begin, t, W, chunk, slot, writes, scale,
            D0, D1, P0, P1, V0, V1, U0, U1, LATENT, SCORED, KEY, VALUE, FOCAL, CHUNK,
        )  # fmt: skip
        if writes:
            at = (slot + FOCAL).to(tl.int64)
            _put(pk_ptr + at * s_pkn, e0, 0, D0, P0)
            _put(pk_ptr + at * s_pkn, e1, D0, D1, P1)
            if not LATENT:
                _put(pv_ptr + at * s_pvn, f0, 0, V0, U0)
                _put(pv_ptr + at * s_pvn, f1, V0, V1, U1)
    if writes:
        at = (t % W).to(tl.int64)
        _put(rk_ptr + at * s_rkn, k0, 0, D0, P0)
        _put(rk_ptr + at * s_rkn, k1, D0, D1, P1)
        if not LATENT:
            _put(rv_ptr + at * s_rvn, v0, 0, V0, U0)
            _put(rv_ptr + at * s_rvn, v1, V0, V1, U1)
        if SCORED:
            at = (t % Q).to(tl.int64)
            _put(rq_ptr + at * s_rqn, mean0, 0, D0, P0)
            _put(rq_ptr + at * s_rqn, mean1, D0, D1, P1)

    for start in range(row_tile * BR, tl.minimum(row_tile * BR + BR, R), 16):
        r = start + tl.arange(0, 16)
        q0 = _rows(q_ptr, r, s_qh, r < R, 0, D0, P0)
        q1 = q0
        to_token = tl.sum(q0.to(tl.float32) * k0.to(tl.float32)[None, :], 1)
        to_entry = tl.sum(q0.to(tl.float32) * e0.to(tl.float32)[None, :], 1)
        if D1 > 0:
            q1 = _rows(q_ptr, r, s_qh, r < R, D0, D1, P1)
            to_token += tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
            to_entry += tl.sum(q1.to(tl.float32) * e1.to(tl.float32)[None, :], 1)
        to_token = tl.where(first <= t, to_token * score_scale, float("-inf"))
        to_entry = tl.where(entry_visible, to_entry * score_scale + bias, float("-inf"))
        m = tl.maximum(to_token, to_entry)
        safe = tl.where(m == float("-inf"), 0.0, m)
        a, b = tl.exp2(to_token - safe)[:, None], tl.exp2(to_entry - safe)[:, None]
        acc0 = a * v0.to(tl.float32)[None, :] + b * f0.to(tl.float32)[None, :]
        acc1 = acc0
        if V1 > 0:
            acc1 = a * v1.to(tl.float32)[None, :] + b * f1.to(tl.float32)[None, :]
        total = tl.exp2(to_token - safe) + tl.exp2(to_entry - safe)
        if FOCAL > 0:
            acc0, acc1, m, total = _attend_focal(
                acc0, acc1, m, total, q0, q1, rk_ptr, rv_ptr, s_rkn, s_rvn, k0, k1, v0, v1, scores, begin, t, W,
                tl.where(entry_visible, chunk, 0), score_scale,
                D0, D1, P0, P1, V0, V1, U0, U1, LATENT, FOCAL, CHUNK, PRECISION,
            )  # fmt: skip
        _store_part(part_ptr, lse_ptr, acc0, acc1, m, total, head * R + r, r < R, 0, S, V0, V1, U0, U1)


@triton.jit
def step_split_kernel(
    q_ptr, k_ptr, v_ptr, pk_ptr, pv_ptr, rk_ptr, rv_ptr, rq_ptr, seen_ptr, prompt_ptr, real_ptr, part_ptr, lse_ptr,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_pkb, s_pkh, s_pkn, s_pvb, s_pvh, s_pvn,
    s_rkb, s_rkh, s_rkn, s_rvb, s_rvh, s_rvn, s_rqb, s_rqh, s_rqn, s_prompt,
    K, R, M, W, Q, num_summary, chunk, window, max_chunks, summary_delay, scale, score_scale, bias,
    D0: tl.constexpr, D1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, U0: tl.constexpr, U1: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    LATENT: tl.constexpr, SCORED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HAS_REAL: tl.constexpr,
    FOCAL: tl.constexpr, CHUNK: tl.constexpr, PROMPT: tl.constexpr, PERIOD: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part float32 ``[B, H, S, Dv]`` and base 2 log-sum-exp ``[B, H, S]``; grid (S, row tiles, B * K).

    scale weighs chunks; score_scale and bias are those of attention in base 2. PROMPT: rows may have entries of a
    prompt ahead. PERIOD: entries of a chunk where only pooled ones get the bias, else 0. EARLY: let the reduce start
    up meanwhile.
    """
    if EARLY:
        gdc_launch_dependents()
    split, S, row_tile, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    b, kvh = (head // K).to(tl.int64), (head % K).to(tl.int64)
    # a position fits into 32 bits, an address need not
    t = tl.load(seen_ptr + b).to(tl.int32)
    live = t >= 0  # always: without `real`, every row has a token
    if HAS_REAL:
        live = live & (tl.load(real_ptr + b) != 0)
    q_ptr += b * s_qb + kvh * R * s_qh
    pk_ptr += b * s_pkb + kvh * s_pkh
    pv_ptr += b * s_pvb + kvh * s_pvh
    rk_ptr += b * s_rkb + kvh * s_rkh
    rv_ptr += b * s_rvb + kvh * s_rvh

    ahead, exact = 0, 0
    if PROMPT:
        ahead = tl.load(prompt_ptr + b * s_prompt + 1).to(tl.int32)
        exact = tl.load(prompt_ptr + b * s_prompt + 2).to(tl.int32)
    max_chunks = tl.minimum(max_chunks, (M - ahead) // (FOCAL + 1))
    closed = tl.maximum(t + 1 - window, 0) // chunk
    first = closed * chunk
    visible = tl.minimum(closed, max_chunks)
    ripe = t + 1 - summary_delay
    number = ripe // chunk - 1
    due = (ripe > 0) & (ripe % chunk == 0) & (number < max_chunks)
    entry_visible = due & (number < visible)

    if live & (split == 0):
        _new_token(
            q_ptr, k_ptr + b * s_kb + kvh * s_kh, v_ptr + b * s_vb + kvh * s_vh, pk_ptr, pv_ptr, rk_ptr, rv_ptr,
            rq_ptr + b * s_rqb + kvh * s_rqh, part_ptr, lse_ptr, s_qh, s_pkn, s_pvn, s_rkn, s_rvn, s_rqn,
            head, row_tile, t, first, due, number * chunk, ahead + number * (FOCAL + 1), entry_visible,
            R, W, Q, S, num_summary, chunk, scale, score_scale, bias,
            D0, D1, P0, P1, V0, V1, U0, U1, BR, LATENT, SCORED, KEY, VALUE, FOCAL, CHUNK, PRECISION,
        )  # fmt: skip
    else:
        # the new entries are the last ones
        entries = ahead + (visible - entry_visible.to(tl.int32)) * (FOCAL + 1)
        entries = tl.where(live, entries, 0)
        tokens = tl.where(live, tl.maximum(t - first, 0), 0)
        entry_tiles = tl.cdiv(entries, BN)
        tiles = entry_tiles + tl.cdiv(tokens, BN)
        share = tl.maximum(split - 1, 0)
        lo, hi = tiles * share // (S - 1), tiles * (share + 1) // (S - 1)
        r = row_tile * BR + tl.arange(0, BR)
        q0 = _rows(q_ptr, r, s_qh, r < R, 0, D0, P0)
        q1 = q0
        if D1 > 0:
            q1 = _rows(q_ptr, r, s_qh, r < R, D0, D1, P1)
        acc0 = tl.zeros([BR, U0], tl.float32)
        acc1 = tl.zeros([BR, U1], tl.float32)
        m = tl.full([BR], float("-inf"), tl.float32)
        total = tl.zeros([BR], tl.float32)
        acc0, acc1, m, total = _attend_keys(
            acc0, acc1, m, total, q0, q1, pk_ptr, pv_ptr, s_pkn, s_pvn,
            lo, tl.minimum(hi, entry_tiles), entries, 0, _NO_WRAP, score_scale, bias, ahead, exact,
            D0, D1, P0, P1, V0, V1, U0, U1, BN, LATENT, PRECISION, PERIOD,
        )  # fmt: skip
        acc0, acc1, m, total = _attend_keys(
            acc0, acc1, m, total, q0, q1, rk_ptr, rv_ptr, s_rkn, s_rvn,
            tl.maximum(lo - entry_tiles, 0), hi - entry_tiles, tokens, first % W, W, score_scale, 0.0,
            0, 0, D0, D1, P0, P1, V0, V1, U0, U1, BN, LATENT, PRECISION, 0,
        )  # fmt: skip
        _store_part(part_ptr, lse_ptr, acc0, acc1, m, total, head * R + r, r < R, split, S, V0, V1, U0, U1)


@triton.jit
def step_reduce_kernel(
    part_ptr, lse_ptr, out_ptr, seen_ptr, real_ptr, H, S,
    DV: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, 1, Dv]``, contiguous, and ``seen`` one further; grid (B * H, columns)."""
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    m = tl.full([BS], float("-inf"), tl.float32)
    for start in range(0, S, BS):
        m = tl.maximum(m, tl.load(lse_ptr + row * S + start + s, mask=start + s < S, other=float("-inf")))
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    e = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros([BC], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, S, BS):
        weight = tl.exp2(tl.load(lse_ptr + row * S + start + s, mask=start + s < S, other=float("-inf")) - top)
        # parts without a key were not written
        there = (weight > 0)[:, None] & (e < DV)[None, :]
        part = tl.load(part_ptr + (row * S + start + s)[:, None] * DV + e[None, :], mask=there, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
        total += tl.sum(weight, 0)
    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * DV + e, out.to(out_ptr.dtype.element_ty), mask=e < DV)

    if (tl.program_id(1) == 0) & (row % H == 0):
        live = 1
        if HAS_REAL:
            live = (tl.load(real_ptr + row // H) != 0).to(tl.int32)
        tl.store(seen_ptr + row // H, tl.load(seen_ptr + row // H) + live)
