"""The definition: plain PyTorch, the whole mask at once, any device, made for float64 on the CPU.

Shapes: B rows, H query heads, K KV heads, L queries, M prefix entries, N band tokens, D and Dv widths,
G groups of c tokens, Q queries kept from before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.bounds import Bounds, Windows
from condense.ops.sampling import Sample


def visible(bounds: Bounds, start: int, stop: int, num_prefix: int, num_band: int, device: torch.device) -> Tensor:
    """Mask bool ``[B|1, K|1, L, M + N]`` of queries ``[start, stop)`` over prefix, then band."""
    rep_end, raw_start, raw_end = (x[..., None] for x in bounds.arrays(start, stop, device))
    entry = torch.arange(num_prefix, device=device)
    column = torch.arange(num_band, device=device)
    in_prefix = (entry < rep_end).expand(*raw_end.shape[:-1], num_prefix)
    return torch.cat([in_prefix, (column >= raw_start) & (column < raw_end)], dim=-1)


def attend(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    band_k: Tensor,
    band_v: Tensor,
    bounds: Bounds,
    *,
    scale: float,
    prefix_bias: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend`. Materialises ``[B, H, L, M + N]`` scores."""
    B, H, L, _ = q.shape
    K, M, N = band_k.shape[1], prefix_k.shape[2], band_k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = torch.cat([prefix_k, band_k], dim=2).to(wide)
    v = torch.cat([prefix_v, band_v], dim=2).to(wide)
    mask = visible(bounds, 0, L, M, N, q.device)[:, :, None]
    empty = ~mask.any(-1, keepdim=True)
    # a query that sees nothing, whatever is in it, gets a harmless row here and is zeroed below: no NaN in values
    # or gradients
    q_BKRLD = q.to(wide).unflatten(1, (K, H // K)).masked_fill(empty, 0.0)
    scores = torch.einsum("bkrld,bksd->bkrls", q_BKRLD, k) * scale
    if prefix_bias is not None:
        bias = torch.nn.functional.pad(prefix_bias.to(wide), (0, N))
        scores = scores + bias[:, :, None, None, :]
    scores = scores.masked_fill(~(mask | empty), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
    out = torch.einsum("bkrls,bksd->bkrld", weights, v).masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty[..., 0], float("-inf"))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def summarize(q: Tensor, tail: Tensor, windows: Windows) -> Tensor:
    """See `condense.ops.summarize`. One row and window at a time."""
    K, Q, L = tail.shape[1], tail.shape[2], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    means = q.to(wide).unflatten(1, (K, -1)).mean(2).to(q.dtype)
    rows = []
    for b, (start, before, after) in enumerate(zip(*(x.tolist() for x in windows.rows(q.shape[0])), strict=True)):
        # column 0 is position `origin`, the last column position `after - 1`
        known = torch.cat([tail[b], means[b, :, L - (after - before) :]], dim=1).to(wide)
        origin = before - Q
        for j in range(windows.num):
            begin = start + windows.stride * j
            positions = [p for p in range(max(0, begin, origin), begin + windows.size) if p < after]
            total = sum((known[:, p - origin] for p in positions), torch.zeros_like(known[:, :1].sum(1)))
            rows.append(total / max(1, min(windows.size, begin + windows.size)))
    return torch.stack(rows).unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def group_scores(summary: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """See `condense.ops.group_scores`. One group at a time."""
    wide = torch.promote_types(k.dtype, torch.float32)
    groups = [(summary[:, :, j, None].to(wide) * k[:, :, j].to(wide)).sum(-1) * scale for j in range(k.shape[2])]
    return torch.stack(groups, dim=2) if groups else k.new_zeros(k.shape[:4], dtype=wide)


def pool(x: Tensor, scores: Tensor, *, how: str) -> Tensor:
    """See `condense.ops.pool`. One group at a time."""
    pooled = [_pool_one(x[:, :, j].to(scores.dtype), scores[:, :, j], how) for j in range(x.shape[2])]
    return torch.stack(pooled, dim=2).to(x.dtype) if pooled else x.new_zeros(*x.shape[:3], x.shape[4])


def _pool_one(x: Tensor, scores: Tensor, how: str) -> Tensor:
    if how == "weighted":
        return torch.einsum("bkc,bkcd->bkd", scores.softmax(-1), x)
    if how == "mean":
        return x.mean(2)
    if how == "max":
        return x.amax(2)
    anchor = torch.nn.functional.one_hot(scores.argmax(-1), x.shape[2]).to(x.dtype)
    return torch.einsum("bkc,bkcd->bkd", anchor, x)


def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float) -> Tensor:
    """See `condense.ops.importance`. One sampled query at a time, for all rows that have it."""
    B, H, L, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    total, column = q.new_zeros(B, H, L, dtype=wide), torch.arange(L, device=q.device)
    keys = k.to(wide).repeat_interleave(H // k.shape[1], dim=1)
    for at in sample.columns.mT:
        # -1 stands for no query, which sees nothing
        query = torch.stack([q[b, :, int(at[b])].to(wide) for b in range(B)])
        visible = ((column <= at[:, None]) & (column >= sample.start))[:, None]
        scores = torch.einsum("bhd,bhld->bhl", query, keys) * scale
        total += scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return total.unflatten(1, (k.shape[1], -1)).sum(2)
