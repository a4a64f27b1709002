"""Online softmax over tiles of keys, and joining the results of splits of the keys in a fixed order; soft-capped
scores, ``cap * tanh(s / cap)``, as some models have them.

Scores and caps are base 2. Shapes: n rows of a tile, S splits that share a row's keys, V value columns.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device.parts import add_weighted, products, store_rows, zeros


class Softmax(namedtuple("Softmax", "acc m total")):
    """An online softmax of n rows; scores are base 2.

    acc: values weighted by the exponentials, ``[n, V]`` in parts. m: largest score so far, ``[n]``. total: sum of the
    exponentials relative to m, ``[n]``; or ``[n, keys]``, a sum for each place in a tile of keys, so that warps which
    share a tile need not exchange sums at every tile.
    """


@triton.jit
def _tanh(x):
    """tanh, to a few units in the last place: below 1/4 by its series, where ``(1 - t) / (1 + t)`` would cancel."""
    y = x * x
    series = 1.0 + y * (-0.3333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * 0.0218694885)))
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """Soft-capped scores of s and their derivative with respect to s. CAP 0: no cap, derivative 1."""
    if CAP > 0:
        t = _tanh(s * (1.0 / CAP))
        return t * CAP, 1.0 - t * t
    else:
        return s, 1.0


@triton.jit
def empty_softmax(N: tl.constexpr, KEYS: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """The softmax of N rows before the first tile of KEYS keys."""
    m, total = tl.full([N], float("-inf"), tl.float32), tl.zeros([N, KEYS], tl.float32)
    return Softmax(zeros(N, V0, V1), m, total)


@triton.jit
def key_products(q, k, PRECISION: tl.constexpr):
    """``q @ k.T`` of rows in parts, as `products` computes it.

    Without tensor cores the product of two rows of P columns is one chain of P additions, and its error grows with P.
    So float32 rows wider than 128 are multiplied in blocks of 128 columns, whose sums are added at the end.
    """
    if PRECISION == "ieee" and q[0].shape[1] > 128:
        C: tl.constexpr = q[0].shape[1] // 128
        blocks = tl.permute(tl.reshape(q[0], [q[0].shape[0], C, 128]), (1, 0, 2))  # [C, n, 128]
        of_keys = tl.permute(tl.reshape(k[0], [k[0].shape[0], C, 128]), (1, 2, 0))  # [C, 128, keys]
        s = tl.sum(tl.dot(blocks, of_keys, input_precision=PRECISION), 0)  # [n, keys]
        if len(q) == 2:
            s = tl.dot(q[1], tl.trans(k[1]), s, input_precision=PRECISION)
    else:
        s = products(q, k, PRECISION)
    return s


@triton.jit
def add_keys(softmax, s, v, PRECISION: tl.constexpr):
    """Add keys with scores s ``[n, keys]`` and values v to a `Softmax`. Every row must have seen a key by then."""
    m = tl.maximum(softmax.m, tl.max(s, 1))
    p = tl.exp2(s - m[:, None])  # [n, keys]
    alpha = tl.exp2(softmax.m - m)  # [n]
    acc = add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION)  # [n, V]
    if len(softmax.total.shape) == 2:
        return Softmax(acc, m, softmax.total * alpha[:, None] + p)
    else:
        return Softmax(acc, m, softmax.total * alpha + tl.sum(p, 1))


@triton.jit
def store_part(part_ptr, lse_ptr, softmax, at, inside, V0: tl.constexpr, V1: tl.constexpr):
    """Store outputs and log-sum-exps of a `Softmax` in rows ``at`` ``[n]``; 0 and -inf for rows that saw no key."""
    some = softmax.total > 0
    total = tl.where(some, softmax.total, 1.0)
    tl.store(lse_ptr + at, tl.where(some, softmax.m + tl.log2(total), float("-inf")), mask=inside)
    store_rows(part_ptr, at * (V0 + V1), [x / total[:, None] for x in softmax.acc], inside, V0, V1)


@triton.jit
def join_parts(part_ptr, lse_ptr, row, inside, S, column, V: tl.constexpr, SB: tl.constexpr, sink_ptr=None, head=None):
    """Outputs ``[rows, columns]`` joined from the S adjacent splits of each row, SB at a time; 0 if a row saw no key.

    sink_ptr: a logit without a value per query head (`condense.ops.Extras`), or None; head: query head of each row.
    Loads bypass the L1 cache, because other multiprocessors may have written the splits in the same kernel.
    """
    s = tl.arange(0, SB)[None, :]
    acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    if sink_ptr is None:
        m = tl.full(row.shape, float("-inf"), tl.float32)
        total = tl.zeros(row.shape, tl.float32)
    else:
        m = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full(row.shape, 1.0, tl.float32)
    for start in range(0, S, SB):
        at = row[:, None] * S + start + s  # [rows, SB]
        there = inside[:, None] & (start + s < S)
        lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        there = there[:, :, None] & (column < V)[None, None, :]
        part_at = at[:, :, None] * V + column[None, None, :]
        part = tl.load(part_ptr + part_at, mask=there, other=0.0, cache_modifier=".cg")  # [rows, SB, columns]
        m_new = tl.maximum(m, tl.max(lse, 1))  # [rows]
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, alpha = tl.exp2(lse - finite[:, None]), tl.exp2(m - finite)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * part, 1)
        total = total * alpha + tl.sum(weight, 1)
        m = m_new
    return acc / tl.where(total > 0, total, 1.0)[:, None]
