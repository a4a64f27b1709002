"""The share of attention that a step of Recall leaves to groups which it does not open, estimated from the index.

Shapes: B rows, H query heads, K KV heads, G groups of g tokens, W slots of the window's ring, D width.
"""

import torch
from torch import Tensor

from condense.ops.recall.choice import choose_groups, index_scores, token_scores
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StepState


@torch.no_grad()
def closed_mass(q: Tensor, state: StepState, settings: StepSettings, scale: float) -> Tensor:
    """The share of dense attention's weights that closed groups have which the query does not open, ``[B, H]`` float32
    or wider, from 0 to 1.

    q ``[B, H, 1, D]``: the query of a row's newest token, after the step that has added it to the state; of latents the
    absorbed one. Tokens of all closed groups are scored by the index, those of the window exactly; soft caps and sinks
    are left out.
    """
    assert settings.choice is not None
    (B, H, _, D), (_, K, W, _), g = q.shape, state.ring_k.shape, settings.rule.chunk
    G, index, seen = state.entries_k.shape[2], state.group_index, state.seen
    closed = settings.rule.closed(seen).clamp(max=G)
    chosen = choose_groups(index_scores(q, index, scale), closed[:, None, None], settings.choice.quota, K)[:, :, 0]
    is_closed = (torch.arange(G, device=q.device) < closed[:, None])[:, None]
    far = token_scores(q, index, scale)[:, :, 0].logsumexp(-1).masked_fill(~is_closed, float("-inf"))
    # the newest position stored in each slot of the ring, as in a step
    last = (seen - 1)[:, None]
    position = last - (last - torch.arange(W, device=q.device)) % W
    is_near = ((position >= closed[:, None] * g) & (position >= 0))[:, None]
    near = (q.to(far.dtype).reshape(B, K, H // K, D) @ state.ring_k.to(far.dtype).mT).reshape(B, H, W) * scale
    near = near.masked_fill(~is_near, float("-inf")).logsumexp(-1)
    unread = far.masked_fill(chosen.repeat_interleave(H // K, 1), float("-inf")).logsumexp(-1)
    return (unread - torch.logaddexp(far.logsumexp(-1), near)).exp()
