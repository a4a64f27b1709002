"""The `triton` backend of importance: two passes over the keys that write sums only, never the scores.

The first pass computes the log-sum-exp of each sampled query, keys split over programs; in the second, a program owns a
block of columns and adds up their attention weights. No atomics, so results are deterministic.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L tokens, S sampled queries, X = S * R rows in
order of their columns, P splits of the keys, D width. BM rows and BN keys per tile, BD the width rounded up to a power
of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from condense.ops.tensors.sampling import Sample
from condense.ops.triton.host import LOG2E, cdiv, dense_rows, power_of_2

# keys that one program of the first pass reads
_SPLIT = 2048


@triton.jit
def _row_tile(q_ptr, at_ptr, row, X, D: tl.constexpr, BD: tl.constexpr):
    """A tile of sampled queries and their columns, -1 for rows without a query."""
    d = tl.arange(0, BD)
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], mask=(row[:, None] < X) & (d[None, :] < D), other=0.0)
    return q, tl.load(at_ptr + row, mask=row < X, other=-1)


@triton.jit
def _keys(k_ptr, n, s_kn, L, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    inside = (n[:, None] < L) & (d[None, :] < D)
    return tl.load(k_ptr + n[:, None].to(tl.int64) * s_kn + d[None, :], mask=inside, other=0.0)


@triton.jit
def _scores(q, k, n, at, start, scale, PRECISION: tl.constexpr):
    """Scores base 2 of keys n, -inf where a query does not see them."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return tl.where((n[None, :] <= at[:, None]) & (n[None, :] >= start), s, float("-inf"))


@triton.jit
def lse_kernel(
    q_ptr, k_ptr, at_ptr, start_ptr, part_ptr, s_kb, s_kh, s_kn, K, X, L, P, scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """part ``[B, K, P, X]``: log-sum-exp base 2 over the keys of each split."""
    split, pair = tl.program_id(0) % P, tl.program_id(1).to(tl.int64)
    b, kvh = pair // K, pair % K
    row = tl.program_id(0) // P * BM + tl.arange(0, BM)
    q, at = _row_tile(q_ptr + pair * X * D, at_ptr + b * X, row, X, D, BD)
    start = tl.load(start_ptr + b)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for first in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, tl.max(at) + 1), BN):
        n = first + tl.arange(0, BN)
        k = _keys(k_ptr + b * s_kb + kvh * s_kh, n, s_kn, L, D, BD)
        s = _scores(q, k, n, at, start, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)
        m = m_new
    part = tl.where(total > 0, m + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(part_ptr + (pair * P + split) * X + row, part, mask=row < X)


@triton.jit
def columns_kernel(
    q_ptr, k_ptr, at_ptr, start_ptr, lse_ptr, total_ptr, s_kb, s_kh, s_kn, K, X, L, scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total ``[B, K, L]``: the sum of each column's attention weights; lse ``[B, K, X]``, inf for rows to leave out."""
    pair = tl.program_id(1).to(tl.int64)
    b, kvh = pair // K, pair % K
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = _keys(k_ptr + b * s_kb + kvh * s_kh, n, s_kn, L, D, BD)
    start = tl.load(start_ptr + b)
    total = tl.zeros([BN], tl.float32)
    for first in range(0, X, BM):
        row = first + tl.arange(0, BM)
        q, at = _row_tile(q_ptr + pair * X * D, at_ptr + b * X, row, X, D, BD)
        s = _scores(q, k, n, at, start, scale, PRECISION)
        lse = tl.load(lse_ptr + pair * X + row, mask=row < X, other=float("inf"))
        total += tl.sum(tl.exp2(s - lse[:, None]), 0)
    tl.store(total_ptr + pair * L + n, total, mask=n < L)


def _tiles(q: Tensor, rows: int, width: int) -> dict[str, int]:
    """Rows, keys, warps and stages: tiles of at most 32 KiB. Chosen by size, not by time."""
    if not q.is_cuda:  # the interpreter
        return {"BM": 16, "BN": 16}
    most = 2**15 // (width * q.element_size())
    return {"BM": min(rows, most), "BN": min(128, most), "num_warps": 8, "num_stages": 2}


def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float) -> Tensor:
    """See `condense.ops.importance`."""
    # sorted by column, so that the queries of a tile see about the same keys
    at = sample.columns
    (B, H, L, D), K, S = q.shape, k.shape[1], at.shape[1]
    R, X, P = H // K, S * (H // K), cdiv(L, _SPLIT)
    k = dense_rows(k)
    rows = at.clamp(min=0)[:, None, :, None].expand(B, H, S, D)
    queries = q.gather(2, rows).unflatten(1, (K, R)).transpose(2, 3).contiguous()
    at = at.to(torch.int32).repeat_interleave(R, dim=1)
    # rows without a query read padding, which may hold NaN
    queries = queries.flatten(2, 3).masked_fill(at[:, None, :, None] < 0, 0.0)
    start = sample.start.to(torch.int32)
    part = queries.new_empty(B, K, P, X, dtype=torch.float32)
    total = queries.new_empty(B, K, L, dtype=torch.float32)
    widths = {"D": D, "BD": power_of_2(max(D, 16))}
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    sizes = {"K": K, "X": X, "L": L, "scale": scale * LOG2E, "PRECISION": precision, **widths}
    per_row, per_column = (_tiles(q, rows, widths["BD"]) for rows in (128, 64))
    # kernels start on the current device, which may not be that of the tensors
    with torch.cuda.device_of(q):
        lse_kernel[cdiv(X, per_row["BM"]) * P, B * K](
            queries, k, at, start, part, *k.stride()[:3], P=P, SPLIT=_SPLIT, **sizes, **per_row
        )
        top = part.amax(2, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        sums = (part - top).exp2().sum(2)
        lse = torch.where(sums > 0, top[:, :, 0] + sums.log2(), float("inf"))
        columns_kernel[cdiv(L, per_column["BN"]), B * K](
            queries, k, at, start, lse, total, *k.stride()[:3], **sizes, **per_column
        )
    return total
