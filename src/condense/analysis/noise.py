"""The change of a model's predictions when noise is added to its keys (after DGA, Figure 3b).

The paper adds noise to attention's scores. A fused kernel gives no access to them, so Gaussian noise is added to the
keys instead, before tokens are pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from condense.methods import Method
from condense.models import check_stock, use

VARIANCES = (0.01, 0.03, 0.1, 0.3, 1.0)


@torch.no_grad()
def noise_effect(
    model: PreTrainedModel,
    method: Method,
    sequences: Sequence[Tensor],
    variances: Sequence[float] = VARIANCES,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """For each variance of the noise, the mean KL divergence (nats) over all positions from predictions without it.

    model: a causal LM with stock attention, which it has afterwards too, and which calls transformers' attention
    functions. sequences: token ids ``[L]``; each gets the same noise under every method. variances: of the noise, as
    multiples of the keys' own variance. on_step is called after each sequence.
    Raises ValueError for a condensed model, and for one that calls no attention function of transformers.
    """
    check_stock(model)
    totals = [0.0] * len(variances)
    with use(model, method):
        for seed, sequence in enumerate(sequences):
            ids = torch.as_tensor(sequence).to(model.device)[None]
            clean = _log_probabilities(model, ids)
            for i, variance in enumerate(variances):
                noisy = _with_noise(model, ids, variance, seed)
                totals[i] += float((clean.exp() * (clean - noisy)).sum(-1).mean())
            on_step()
    return [total / len(sequences) for total in totals]


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)


def _with_noise(model: PreTrainedModel, ids: Tensor, variance: float, seed: int) -> Tensor:
    """Log-probabilities if noise is added to the keys of every call of the model's attention function."""
    calls, generator = [], torch.Generator(model.device).manual_seed(seed)
    name = model.config._attn_implementation
    stock = ALL_ATTENTION_FUNCTIONS[name]

    def noisy(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **settings: Any) -> Any:
        calls.append(module)
        drawn = torch.randn(k.shape, generator=generator, device=k.device, dtype=torch.float32)
        return stock(module, q, k + (drawn * k.float().std() * variance**0.5).to(k.dtype), v, *args, **settings)

    ALL_ATTENTION_FUNCTIONS[name] = noisy
    try:
        found = _log_probabilities(model, ids)
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = stock
    if not calls:
        raise ValueError(f"model must call transformers' attention functions, which {type(model).__name__} does not")
    return found
