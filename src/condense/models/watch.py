"""A number while a model runs: how much of attention stays closed in the steps of layers with Recall.

Shapes: B rows, H query heads, D width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from condense.caches import CondensedCacheLayer
from condense.methods import Recall
from condense.models.apply import condensed_modules
from condense.ops.step.mass import closed_mass as mass_of


class Watch:
    """The shares of one layer's steps, float32 ``[B, H]`` on the CPU each; NaN for rows whose token is padding."""

    def __init__(self) -> None:
        self.shares: list[Tensor] = []

    @torch.compiler.disable(reason="condense.closed_mass looks at every step: compile without fullgraph in its block")
    def note(self, q: Tensor, real: Tensor | None, layer: CondensedCacheLayer, scale: float) -> None:
        """Add the share of a step that ``layer`` has just made; q ``[B, H, 1, D]``, real as in the step."""
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("closed_mass looks at every step, got one captured in a CUDA graph: leave the block")
        assert layer.buffers is not None
        share = mass_of(q, layer.buffers, layer.store.settings, scale).float().cpu()
        self.shares.append(share if real is None else share.masked_fill(real.cpu()[:, None] == 0, float("nan")))


def is_watched(model: nn.Module) -> bool:
    """True in a block of `closed_mass` for this model."""
    return any(getattr(module, "condense_watch", None) is not None for module in model.modules())


@contextmanager
def closed_mass(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Watch what `Recall` leaves unread, while the block runs: the more it is, the more groups should be open.

    Yields a dict from the index of each layer with `Recall` to a list, to which every step of one token adds the share
    of dense attention's weights that falls to closed groups which are not open, float32 ``[B, H]`` on the CPU; NaN for
    rows whose token is padding. It is estimated from the index, see `condense.ops.step.mass`. In the block
    `generate` runs step by step, and each step waits for the device. Steps replayed from a graph that was captured
    before are not seen; a compiled forward is left at each layer.
    Raises ValueError for a model without such layers, one that is watched already, and steps that are captured.
    """
    layers = {i: m for i, m in condensed_modules(model).items() if isinstance(m.condense_method, Recall)}
    if not layers:
        raise ValueError("model must have layers with Recall, got none: call condense.apply(model, 'recall-device')")
    if is_watched(model):
        raise ValueError("model is watched already: leave the other block first")
    watches = {i: Watch() for i in layers}
    for i, module in layers.items():
        module.condense_watch = watches[i]
    try:
        yield {i: watch.shares for i, watch in watches.items()}
    finally:
        for module in layers.values():
            del module.condense_watch
