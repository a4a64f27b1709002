"""The share of attention that falls to closed groups in steps of layers with Recall, measured while a model runs.

Shapes: B rows, H query heads, K KV heads, G groups of g tokens, W slots of the window's ring, D width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from condense.caches import CondensedCacheLayer
from condense.methods import Recall
from condense.models.modules import condensed_modules
from condense.ops import StepSettings, StepState
from condense.ops.recall.choice import choose_groups, index_scores, token_scores
from condense.ops.tensors.ring import newest_numbers


@torch.compiler.disable(reason="condense.closed_mass looks at every step: compile without fullgraph in its block")
def _note(shares: list[Tensor], q: Tensor, real: Tensor | None, layer: CondensedCacheLayer, scale: float) -> None:
    """Append the `unread_share` of the step that ``layer`` has just made to ``shares``; q and real: of the step."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("closed_mass looks at every step, got one captured in a CUDA graph: leave the block")
    assert layer.buffers is not None
    share = unread_share(q, layer.buffers, layer.store.settings, scale).float().cpu()
    shares.append(share if real is None else share.masked_fill(real.cpu()[:, None] == 0, float("nan")))


@torch.no_grad()
def unread_share(q: Tensor, state: StepState, settings: StepSettings, scale: float) -> Tensor:
    """The share of dense attention's weights on closed groups that are not open, ``[B, H]`` float32 or wider, 0 to 1.

    q ``[B, H, 1, D]``: queries of the newest tokens, which a step has added to the state; with latents, absorbed
    queries. Tokens of closed groups are scored by the index, those of the window exactly, without caps and sinks.
    """
    assert settings.choice is not None
    (B, H, _, D), (_, K, W, _), g = q.shape, state.ring_k.shape, settings.rule.chunk
    G, index, seen = state.entries_k.shape[2], state.group_index, state.seen
    closed = settings.rule.closed(seen).clamp(max=G)
    chosen = choose_groups(index_scores(q, index, scale), closed[:, None, None], settings.choice.quota, K)[:, :, 0]
    is_closed = (torch.arange(G, device=q.device) < closed[:, None])[:, None]
    far = token_scores(q, index, scale)[:, :, 0].logsumexp(-1).masked_fill(~is_closed, float("-inf"))
    position = newest_numbers(seen - 1, state.ring_k)
    is_near = ((position >= closed[:, None] * g) & (position >= 0))[:, None]
    near = (q.to(far.dtype).reshape(B, K, H // K, D) @ state.ring_k.to(far.dtype).mT).reshape(B, H, W) * scale
    near = near.masked_fill(~is_near, float("-inf")).logsumexp(-1)
    unread = far.masked_fill(chosen.repeat_interleave(H // K, 1), float("-inf")).logsumexp(-1)
    return (unread - torch.logaddexp(far.logsumexp(-1), near)).exp()


def is_watched(model: nn.Module) -> bool:
    """True in a block of `closed_mass` for this model."""
    return any(getattr(module, "condense_watch", None) is not None for module in model.modules())


@contextmanager
def closed_mass(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Watch what `Recall` leaves unread, while the block runs: the more it is, the more groups should be open.

    Yields a dict from the index of each layer with `Recall` to a list, to which every step of one token adds the share
    of dense attention's weights that falls to closed groups which are not open, float32 ``[B, H]`` on the CPU; NaN for
    rows whose token is padding. It is estimated from the index (`unread_share`), which does not know what ``keep`` left
    out. In the block `generate` runs step by step, and each step waits for the device. Steps replayed from a graph that
    was captured before are not seen; a compiled forward has a graph break at each layer.
    Raises ValueError for a model without such layers, one that is watched already, and steps that are captured.
    """
    layers = {i: m for i, m in condensed_modules(model).items() if isinstance(m.condense_method, Recall)}
    if not layers:
        raise ValueError("model must have layers with Recall, got none: call condense.apply(model, 'recall-device')")
    if is_watched(model):
        raise ValueError("model is watched already: leave the other block first")
    shares: dict[int, list[Tensor]] = {i: [] for i in layers}
    for i, module in layers.items():
        module.condense_watch = partial(_note, shares[i])
    try:
        yield shares
    finally:
        for module in layers.values():
            del module.condense_watch
