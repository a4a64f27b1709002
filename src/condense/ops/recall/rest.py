"""The one token that stands for all closed groups which a query does not open.

Its weight is what the centres of these groups weigh in the index, g times each: ``g * sum_j exp(b_j)`` with the scores
b of `condense.ops.recall.choice.centre_scores`, soft-capped where attention's scores are. Its value is the mean of the
values of all whole groups up to the query, before they are rounded: so it takes one sum per KV head and no memory per
group. Gradients flow through the value, not through the weight.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, Dv value width.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.latents import UpProjection
from condense.ops.recall.choice import IndexChoice, centre_scores
from condense.ops.spans import RuleSpans
from condense.ops.tensors.per_row import PerRow, at_least, broadcast_rows
from condense.ops.types import Chunks, soft_cap


class GroupMeans(NamedTuple):
    """Means of values or of latents, float32 or wider ``[B, K, n, Dv]``: column i is the mean over a row's first
    ``first + i`` whole groups, 0 for no group. first: an int or int64 CPU ``[B]``.
    """

    means: Tensor
    first: PerRow

    def as_values(self, dtype: torch.dtype, width: int, up: UpProjection | None) -> Self:
        """The means as attention weighs them, for queries in ``dtype``: ``[B, K, n, width]`` in float32 or wider.

        up: expands latents to the values of each head, ``[B, H, n, d_v]`` in ``dtype``; the mean of latents is a
        latent. None: the first ``width`` columns are the values.
        """
        if up is not None:
            return self._replace(means=up.expand(self.means.to(dtype))[1])
        return self._replace(means=self.means[..., :width].to(torch.promote_types(dtype, torch.float32)))

    def at(self, start: int, stop: int, spans: RuleSpans, g: int) -> Tensor:
        """The means that queries ``[start, stop)`` see, ``[B, K, stop - start, Dv]``; padding may see any of them."""
        # g queries in a row see the same mean. Gathering it g times would add up its gradient in an order that varies
        # on a GPU; so it is repeated, and then columns are taken once
        begin, L = spans.query_start + (start + 1) - self.first * g, stop - start
        group = at_least(begin, 0) // g
        means = clamped_columns(self.means, group, (L - 1) // g + 2)
        return clamped_columns(means[:, :, :, None].expand(-1, -1, -1, g, -1).flatten(2, 3), begin - group * g, L)


def clamped_columns(x: Tensor, start: PerRow, count: int) -> Tensor:
    """Columns ``[start, start + count)`` of x ``[B, K, n, Dv]``; the first or last column beyond its ends."""
    if not isinstance(start, Tensor) and 0 <= start <= x.shape[2] - count:
        return x[:, :, start : start + count]
    column = broadcast_rows(start, 2) + torch.arange(count, device="cpu")[None]
    column = column.clamp(min=0, max=x.shape[2] - 1).to(x.device, non_blocking=True)
    return x.take_along_dim(column[:, None, :, None], 2)


def running_sums(before: Tensor, groups: Chunks, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values ``[B, K, 1 + n, Dv]`` float64, and these divided by ``counts`` (`condense.ops.api.running_sums`).

    Groups are added one by one, so that on a CPU a sum does not depend on how many come at a time.
    """
    v = groups.tokens()[1]
    sums = torch.cat([before, v.sum(3, dtype=torch.float64)], dim=2)
    # summed along the last dimension, where a GPU works on many rows in parallel
    sums = sums.mT.cumsum(-1).mT
    return sums, (sums / counts).to(torch.promote_types(v.dtype, torch.float32))


@torch.no_grad()
def rest_weights(choice: IndexChoice, start: int, stop: int, chosen: Tensor, closed: Tensor, softcap: float) -> Tensor:
    """Logarithm of the weight of the closed groups that queries ``[start, stop)`` do not open, ``[B, H, L]`` float32 or
    wider; -inf where all are open.

    chosen: bool ``[B, K, L, G]`` of the first G groups; closed: as in `IndexChoice.at`.
    """
    G, K, g = chosen.shape[3], chosen.shape[1], choice.index.group_size
    scores = soft_cap(centre_scores(choice.q[:, :, start:stop], choice.index.narrow(0, G), choice.scale), softcap)
    rest = (torch.arange(G, device=scores.device) < closed[..., None]) & ~chosen
    rest = rest.repeat_interleave(scores.shape[1] // K, 1)
    weights = scores.masked_fill(~rest, float("-inf")).logsumexp(-1) + math.log(g)
    return weights.detach()  # no_grad does not stop gradients of forward mode


def with_rest(out: Tensor, lse: Tensor, weight: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Attention ``[B, H, L, Dv]`` and its log-sum-exp ``[B, H, L]`` with one more token under the softmax.

    weight ``[B, H, L]``: the logarithm of the token's weight, mean ``[B, K, L, Dv]``: its value. Where weight is -inf,
    the output stays the same to the bit, also if it is 0 because the query sees nothing.
    """
    nothing = torch.maximum(lse, weight) == float("-inf")
    # the gradient of logaddexp is NaN where both are -inf
    total = torch.logaddexp(lse.masked_fill(nothing, 0.0), weight)
    # in float32 or wider, as the weights are
    of_out, of_mean = ((x - total).exp()[..., None].unflatten(1, (mean.shape[1], -1)) for x in (lse, weight))
    seen = torch.addcmul(out.unflatten(1, (mean.shape[1], -1)) * of_out, mean.to(of_mean.dtype)[:, :, None], of_mean)
    return seen.flatten(1, 2).to(out.dtype), total.masked_fill(nothing, float("-inf"))
