"""FlexPrefill (Lai et al., 2025): each head chooses blocks of keys by estimated weights, as many as it needs.

Shapes: H query heads, K KV heads, L tokens in N blocks of `BLOCK`, D width. One row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.config import check_int, check_number
from condense.methods.sparse_prefill import (
    SparsePrefill,
    block_means,
    block_scores,
    by_distance,
    last_weights,
    no_columns,
)
from condense.ops import BLOCK, SparseKeys


@dataclass(frozen=True, kw_only=True)
class FlexPrefill(SparsePrefill):
    """FlexPrefill (Lai et al., 2025): as few blocks of 128 keys as hold ``gamma`` of the estimated weights, per head.

    Where the blocks' weights estimated from mean queries and mean keys lie within ``tau`` (Jensen-Shannon distance) of
    those of the last 128 queries, these estimates choose for every block of queries; elsewhere the last queries choose
    columns and diagonals of blocks. At least ``min_budget`` tokens' worth of blocks each, the first block and the
    queries' own always.
    Raises ValueError for a field out of range.
    """

    name: ClassVar[str] = "flex_prefill"
    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 1024

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, 0.0, 1.0)
        check_number("tau", self.tau, 0.0, 1.0)
        check_int("min_budget", self.min_budget, 1)

    def choose(self, q: Tensor, k: Tensor, *, scale: float) -> SparseKeys:
        """Algorithms 1 to 4 of the paper."""
        H, L = q.shape[1], q.shape[2]
        N, last = -(-L // BLOCK), min(BLOCK, L)
        least = min(N, -(-self.min_budget // BLOCK))
        weights = last_weights(q, k, last, scale)
        of_blocks = _per_block(weights)
        true = of_blocks.mean(1)
        mean_k = block_means(k[0]).repeat_interleave(H // k.shape[1], dim=0)
        mean_last = q[0, :, L - last :].to(mean_k.dtype).mean(1, keepdim=True)
        estimate = (scale * (mean_last @ mean_k.mT))[:, 0].softmax(-1)
        aware = (_js_distance(estimate, true) < self.tau).nonzero()[:, 0]

        diagonals = torch.zeros_like(true)
        own = torch.arange(N, device=q.device)
        distance = (torch.arange(L - last, L, device=q.device)[:, None] // BLOCK - own).clamp(min=0)
        diagonals.scatter_add_(1, distance.flatten().expand(H, -1), of_blocks.flatten(1) / last)
        blocks = _cover(true, self.gamma, least)[:, None] | by_distance(_cover(diagonals, self.gamma, least))
        if len(aware) > 0:
            blocks[aware] = self._by_query(q[0, aware], k[0, aware // (H // k.shape[1])], least, scale)

        blocks[:, :, 0] = True
        blocks[:, own, own] = True
        return SparseKeys(blocks.tril(), no_columns(q))

    def _by_query(self, q: Tensor, k: Tensor, least: int, scale: float) -> Tensor:
        """Blocks bool ``[H, N, N]`` that hold gamma of the estimated weights of q and k ``[H, L, D]``."""
        scores = block_scores(q, k, scale).softmax(-1)
        N = scores.shape[1]
        chosen = _cover(scores.flatten(1) / N, self.gamma, 0).unflatten(1, (N, N))
        return chosen.scatter_(2, scores.topk(least).indices, True)


def _per_block(x: Tensor) -> Tensor:
    """Sums of blocks of x ``[..., L]``, ``[..., N]``."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)


def _cover(share: Tensor, gamma: float, least: int) -> Tensor:
    """The fewest largest of share ``[H, n]`` (sum 1) that reach gamma together, at least ``least``: bool ``[H, n]``."""
    ordered, order = share.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    wanted = (before < gamma) | (torch.arange(share.shape[1], device=share.device) < least)
    return torch.zeros_like(wanted).scatter_(1, order, wanted)


def _js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence of rows ``[H, n]``, in nats."""
    mean = (p + q) / 2
    return ((torch.xlogy(p, p / mean) + torch.xlogy(q, q / mean)).sum(1) / 2).clamp(min=0).sqrt()
