"""The definition of summaries, pooling and importance: one row, span, group or sampled query at a time.

Shapes: B rows, H query heads, K KV heads, L new queries, Q mean queries kept, D width, G groups of c tokens.
"""

import torch
from torch import Tensor

from condense.ops.tensors.sampling import Sample
from condense.ops.types import SummaryColumns, SummarySpans


def summarize(q: Tensor, tail: Tensor, spans: SummarySpans | SummaryColumns) -> Tensor:
    """See `condense.ops.summarize`. One row and span at a time."""
    K, Q, L = tail.shape[1], tail.shape[2], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    means = q.to(wide).unflatten(1, (K, -1)).mean(2).to(q.dtype)
    if isinstance(spans, SummaryColumns):
        ends = zip(spans.lo.tolist(), spans.hi.tolist(), strict=True)
        return torch.stack([means[:, :, lo:hi].to(wide).mean(2) for lo, hi in ends], dim=2)
    rows = []
    for b, (start, before, after) in enumerate(zip(*(x.tolist() for x in spans.rows(q.shape[0])), strict=True)):
        # the columns of `known` are positions `oldest` to `after - 1`
        known = torch.cat([tail[b], means[b, :, L - (after - before) :]], dim=1).to(wide)
        oldest = before - Q
        for j in range(spans.num):
            begin = start + spans.stride * j
            positions = [p for p in range(max(0, begin, oldest), begin + spans.size) if p < after]
            total = sum((known[:, p - oldest] for p in positions), torch.zeros_like(known[:, :1].sum(1)))
            rows.append(total / max(1, min(spans.size, begin + spans.size)))
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
    """See `condense.ops.importance`. One sampled query at a time, in all rows at once."""
    B, H, L, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    total, column = q.new_zeros(B, H, L, dtype=wide), torch.arange(L, device=q.device)
    keys = k.to(wide).repeat_interleave(H // k.shape[1], dim=1)
    for at in sample.columns.mT:
        # -1: this row has fewer sampled queries; its scores are masked
        query = torch.stack([q[b, :, int(at[b])].to(wide) for b in range(B)])
        visible = ((column <= at[:, None]) & (column >= sample.start))[:, None]
        scores = torch.einsum("bhd,bhld->bhl", query, keys) * scale
        total += scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return total.unflatten(1, (k.shape[1], -1)).sum(2)
