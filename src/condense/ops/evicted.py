"""The one token that stands for the tokens of a prompt that do not stay in the cache.

Its key is the mean of their keys, its value the mean of their values, and it weighs as much as they would if each had
that key: ``n * exp(score)`` for n of them. So queries see each token of the prompt once, and no memory grows with n.

Shapes: B rows, H query heads, K KV heads, L queries, M tokens of the prompt, D and Dv widths.
"""

import torch
from torch import Tensor

from condense.ops.latents import UpProjection
from condense.ops.recall.rest import with_rest
from condense.ops.tensors.per_row import PerRow, broadcast_rows
from condense.ops.types import soft_cap


def evicted_width(widths: tuple[int, int]) -> int:
    """Numbers of the token of one KV head: key, value, and how many it stands for. widths: D and Dv, 0 for latents."""
    return sum(widths) + 1


def mean_evicted(k: Tensor, v: Tensor, kept: Tensor, tokens: PerRow) -> Tensor:
    """The token of each KV head, ``[B, K, 1, D + Dv + 1]`` in float32 or wider; zeros where all tokens stay.

    k ``[B, K, M, D]``, v ``[B, K, M, Dv]``: of a prompt, whose first ``tokens`` columns are real. kept: which stay,
    bool ``[B, K, M]``.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    stay = kept | (torch.arange(k.shape[2], device=k.device) >= broadcast_rows(tokens, 3, k.device))
    num = (~stay).sum(2, keepdim=True).to(wide)
    sums = [x.detach().masked_fill(stay[..., None], 0).sum(2, dtype=wide) for x in (k, v)]
    return torch.cat([*(x / num.clamp(min=1) for x in sums), num], dim=2)[:, :, None]


def with_evicted(
    q: Tensor,
    attended: tuple[Tensor, Tensor],
    evicted: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    up: UpProjection | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention ``[B, H, L, Dv]`` and its log-sum-exp ``[B, H, L]`` of q ``[B, H, L, D]`` with that token too.

    attended: both without it; queries that see nothing go on to do so. evicted: as of `mean_evicted`. up: expands
    latents to the keys and values of each head. Without it, values of width 0 are the first columns of the key.
    """
    out, lse = attended
    both = evicted.shape[3] - 1
    D = q.shape[3] if up is None else both
    k, v, num = evicted.split([D, both - D, 1], dim=3)
    if up is not None:
        k, v = up.expand(k.to(q.dtype))
    elif v.shape[3] == 0:
        v = k[..., : out.shape[3]]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide).unflatten(1, (k.shape[1], -1)) @ k.to(wide)[:, :, None].mT  # [B, K, R, L, 1]
    weight = soft_cap(scores.flatten(1, 2)[..., 0] * scale, softcap)
    weight = weight + num.log().repeat_interleave(q.shape[1] // num.shape[1], 1)[..., 0]
    weight = weight.masked_fill(lse == float("-inf"), float("-inf"))
    return with_rest(out, lse, weight, v.expand(-1, -1, q.shape[2], -1))
