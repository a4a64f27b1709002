"""The `torch` backend of importance: blocks of sampled queries against all keys, so memory is linear in L.

Shapes: B rows, H query heads, K KV heads, L tokens, S sampled queries, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.tensors.sampling import Sample

# scores that are computed at a time, over all rows, heads and keys
_BLOCK = 1 << 24


def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float) -> Tensor:
    """See `condense.ops.importance`."""
    (B, H, L, D), K = q.shape, k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).mT
    column = torch.arange(L, device=q.device)
    total = keys.new_zeros(B, K, L)
    size = max(1, _BLOCK // (B * H * L))
    for at in sample.columns.split(size, 1):
        queries = q.gather(2, at.clamp(min=0)[:, None, :, None].expand(B, H, -1, D)).unflatten(1, (K, -1)).to(wide)
        scores = queries.flatten(2, 3) @ keys * scale
        visible = (column <= at[..., None]) & (column >= sample.start[..., None])
        hidden = ~visible[:, None, None].expand(-1, -1, H // K, -1, -1).flatten(2, 3)
        # rows without a query (-1) see no key: their softmax is NaN and is set to 0
        total += scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0).sum(2)
    return total
