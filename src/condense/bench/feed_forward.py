"""Timing a model's feed-forward modules (experts included), whose time condensing does not change.

Shapes: B rows, L tokens, h hidden size.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from condense.bench.timing import Clock, now

_STEP_BUDGET_S = 0.2


def feed_forward_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The ``mlp`` of every decoder layer, in order; empty for families with another name for it."""
    return [parent.mlp for parent in _parents(model)]


def experts_implementation(model: PreTrainedModel) -> str | None:
    """How transformers runs the experts; None for a model that has none."""
    if not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return None
    implementation = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    return None if implementation is None else str(implementation)


def first_ms(model: PreTrainedModel, ids: Tensor, chunk: int | None) -> float:
    """Milliseconds in these modules while ids ``[B, L]`` are read, in pieces of ``chunk`` tokens (None: at once).

    The model may be condensed or not: its feed-forward modules do the same work.
    """
    marks: list[Any] = []
    parents = _parents(model)
    for parent in parents:
        parent.mlp = _Marked(parent.mlp, marks, ids.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    try:
        for piece in ids.split(chunk or ids.shape[1], dim=1):
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        for parent in parents:
            parent.mlp = parent.mlp.module
    now(ids.device)
    # modules do not nest, so marks alternate between beginnings and ends
    return sum(_between_ms(*span) for span in zip(marks[::2], marks[1::2], strict=True))


def _parents(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "mlp", None), nn.Module)]


class _Marked(nn.Module):
    """Calls a module with a mark before and one after it, outside of its compiled code, where hooks would be inside."""

    def __init__(self, module: nn.Module, marks: list[Any], device: torch.device) -> None:
        super().__init__()
        self.module, self._marks, self._device = module, marks, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._marks.append(_mark(self._device))
        out = self.module(*args, **kwargs)
        self._marks.append(_mark(self._device))
        return out


def step_ms(model: PreTrainedModel) -> float:
    """Milliseconds of all these modules, one after another, on one token ``[1, 1, h]``: one graph on CUDA."""
    modules, device = feed_forward_modules(model), model.device
    generator = torch.Generator(device).manual_seed(0)
    # normal numbers, about as large as normalised hidden states
    size = (1, 1, model.config.get_text_config(decoder=True).hidden_size)
    hidden = torch.randn(size, generator=generator, dtype=model.dtype, device=device)
    return Clock(device, _STEP_BUDGET_S).time_rotating([lambda: [module(hidden) for module in modules]]).median_ms


def _mark(device: torch.device) -> Any:
    """The present time: on CUDA an event in the queue of work, else seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(start: Any, stop: Any) -> float:
    return (stop - start) * 1e3 if isinstance(start, float) else start.elapsed_time(stop)
