"""How much attention each token gets from a sample of the queries (DGA, Eq. 16 and 17); blocks, never L x L.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, S sampled queries, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.scramble import scramble

# scores made at a time, all heads and keys of a block of queries together
_BLOCK = 1 << 24


@torch.no_grad()
def importance(
    q: Tensor, k: Tensor, tokens: Tensor, *, scale: float, num_recent: int, num_random: int, seed: int
) -> Tensor:
    """Attention that a token gets on average from the sampled queries that may see it, ``[B, K, L]``, >= 0.

    q ``[B, H, L, D]``, k ``[B, K, L, D]``, right-aligned rows of ``tokens`` (int64 CPU ``[B]``) real tokens, float32
    or wider in the sum: ``sum_j softmax_i(scale * q_j . k_i) / #{sampled j >= i}``, summed over the query heads of each
    KV head. Sampled are a row's newest ``num_recent`` queries and ``num_random`` others, drawn from seed and position
    alone. Padding gets 0. No gradients.
    """
    (B, H, L, _), K = q.shape, k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    columns, real = sampled_queries(tokens, L, num_recent, num_random, seed, q.device)
    keys = k.to(wide).mT
    column = torch.arange(L, device=q.device)
    start = (L - tokens).to(q.device, non_blocking=True)[:, None]
    total = keys.new_zeros(B, K, L)
    size = max(1, _BLOCK // (B * H * L))
    for at, known in zip(columns.split(size, 1), real.split(size, 1), strict=True):
        queries = q.gather(2, at[:, None, :, None].expand(B, H, -1, q.shape[3])).unflatten(1, (K, -1)).to(wide)
        scores = queries.flatten(2, 3) @ keys * scale
        visible = (column <= at[..., None]) & (column >= start[..., None]) & known[..., None]
        hidden = ~visible[:, None, None].expand(-1, -1, H // K, -1, -1).flatten(2, 3)
        # a query that stands for none sees nothing: its row of NaN goes
        total += scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0).sum(2)
    # sampled queries at a column or after it
    count = total.new_zeros(B, L).scatter_add_(1, columns, real.to(wide)).flip(1).cumsum(1).flip(1)
    return total / count.clamp(min=1)[:, None]


def sampled_queries(
    tokens: Tensor, L: int, num_recent: int, num_random: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Columns int64 ``[B, S]`` and which of them stand for a query, bool ``[B, S]``; see `importance`."""
    start = (L - tokens).to(device, non_blocking=True)[:, None]
    recent = torch.arange(max(0, L - num_recent), L, device=device).expand(len(tokens), -1)
    column = torch.arange(L - recent.shape[1], device=device)
    lots = scramble(column - start, seed).masked_fill(column < start, -1)
    drawn, others = lots.topk(min(num_random, len(column)))
    return torch.cat([others, recent], 1), torch.cat([drawn >= 0, recent >= start], 1)
