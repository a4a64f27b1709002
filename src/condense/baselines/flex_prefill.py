"""FlexPrefill (Lai et al., 2025): each head chooses blocks of keys by estimated weights, as many as it needs.

Shapes: H query heads, K KV heads, L tokens in N blocks of `BLOCK`, D width. One row.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.baselines.blocks import BLOCK, SparseKeys
from condense.baselines.sparse_prefill import SparsePrefill, block_means, block_scores, by_distance, last_weights
from condense.config import Positive, Share


@dataclass(frozen=True, kw_only=True)
class FlexPrefill(SparsePrefill):
    """FlexPrefill (Lai et al., 2025): as few blocks of 128 keys as hold ``gamma`` of the estimated weights, per head.

    A block's weight is estimated from mean queries and mean keys. In heads where the estimates for the last 128 queries
    lie within ``tau`` (Jensen-Shannon distance) of these queries' true weights, estimates choose the blocks of every
    query block; in other heads the last queries' weights choose columns and diagonals of blocks. Each choice has blocks
    for at least ``min_budget`` tokens. The first block and the queries' own are always seen.
    """

    name: ClassVar[str] = "flex_prefill"
    gamma: Share = 0.9
    tau: Share = 0.1
    min_budget: Positive = 1024

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Choose blocks for each head by Algorithms 1 to 4 of the paper."""
        H, L = q.shape[1], q.shape[2]
        N, last = -(-L // BLOCK), min(BLOCK, L)
        min_blocks = min(N, -(-self.min_budget // BLOCK))
        # the last queries' weights per block, [H, last, N], their mean, and the estimate of it
        weights = F.pad(last_weights(q, k, last, scale), (0, -L % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)
        mean_weights = weights.mean(1)
        mean_k = block_means(k[0]).repeat_interleave(H // k.shape[1], dim=0)
        mean_q = q[0, :, L - last :].to(mean_k.dtype).mean(1, keepdim=True)
        estimate = (scale * (mean_q @ mean_k.mT))[:, 0].softmax(-1)
        query_aware = (_js_distance(estimate, mean_weights) < self.tau).nonzero()[:, 0]

        # columns and diagonals of blocks, for all heads
        diagonals = torch.zeros_like(mean_weights)
        block = torch.arange(N, device=q.device)
        distance = (torch.arange(L - last, L, device=q.device)[:, None] // BLOCK - block).clamp(min=0)
        diagonals.scatter_add_(1, distance.flatten().expand(H, -1), weights.flatten(1) / last)
        columns = _cover(mean_weights, self.gamma, min_blocks)[:, None]
        blocks = columns | by_distance(_cover(diagonals, self.gamma, min_blocks))
        if len(query_aware) > 0:
            kv_heads = query_aware // (H // k.shape[1])
            # blocks that hold gamma of the estimated weights
            of_blocks = block_scores(q[0, query_aware], k[0, kv_heads], scale).softmax(-1)
            chosen = _cover(of_blocks.flatten(1) / N, self.gamma, 0).unflatten(1, (N, N))
            blocks[query_aware] = chosen.scatter_(2, of_blocks.topk(min_blocks).indices, True)
        blocks[:, :, 0] = True
        return SparseKeys.of_blocks(blocks)


def _cover(shares: Tensor, gamma: float, minimum: int) -> Tensor:
    """True, in bool ``[H, n]``, at the fewest largest shares ``[H, n]`` that sum to gamma, but at least ``minimum``."""
    ordered, order = shares.sort(dim=1, descending=True, stable=True)
    sum_of_larger = ordered.cumsum(1) - ordered
    wanted = (sum_of_larger < gamma) | (torch.arange(shares.shape[1], device=shares.device) < minimum)
    return torch.zeros_like(wanted).scatter_(1, order, wanted)


def _js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of rows ``[H, n]``, in nats."""
    mean = (p + q) / 2
    return ((torch.xlogy(p, p / mean) + torch.xlogy(q, q / mean)).sum(1) / 2).clamp(min=0).sqrt()
