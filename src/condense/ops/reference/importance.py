"""The definition of importance: one sampled query at a time.

Shapes: B rows, H query heads, K KV heads, L tokens, S sampled queries, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.tensors.sampling import Sample


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
