"""Timing a model's feed-forward modules (experts included) alone: condensing does not change their time.

Shapes: B rows, L tokens, h hidden size.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from condense.bench.timing import Clock
from condense.models.stopwatch import now

_STEP_BUDGET_S = 0.2


def feed_forward_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The ``mlp`` of every decoder layer, in order; empty for families with another name for it."""
    found = (getattr(module, "mlp", None) for module in model.modules())
    return [mlp for mlp in found if isinstance(mlp, nn.Module)]


def experts_implementation(model: PreTrainedModel) -> str | None:
    """How transformers runs the experts; None for a model that has none."""
    if not any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return None
    implementation = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    return None if implementation is None else str(implementation)


def first_ms(model: PreTrainedModel, length: int, chunk: int | None) -> float:
    """Milliseconds of all these modules, one after another, on a prompt, in pieces of ``chunk`` tokens (None: at once).

    The second call counts: the first may compile and allocate.
    """
    pieces = _hidden(model, length).split(chunk or length, dim=1)
    marks = [now(model.device)]
    for _ in range(2):
        for module in feed_forward_modules(model):
            for piece in pieces:
                module(piece)
        marks.append(now(model.device))
    return 1e3 * (marks[2] - marks[1])


def step_ms(model: PreTrainedModel) -> float:
    """Milliseconds of all these modules, one after another, on one token: one graph on CUDA."""
    modules, hidden = feed_forward_modules(model), _hidden(model, 1)
    clock = Clock(model.device, _STEP_BUDGET_S)
    return clock.time_rotating([lambda: [module(hidden) for module in modules]]).median_ms


def _hidden(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Normal numbers ``[1, L, h]``, about as large as normalised hidden states."""
    generator = torch.Generator(model.device).manual_seed(0)
    size = (1, length, model.config.get_text_config(decoder=True).hidden_size)
    return torch.randn(size, generator=generator, dtype=model.dtype, device=model.device)
