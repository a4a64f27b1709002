"""How far a model's predictions move when its keys are noisy (after DGA, Figure 3b).

The paper adds noise to attention's scores. A fused kernel has no such place, so the noise goes into what the scores are
made of: Gaussian noise on the outputs of the key projections, before positions are rotated in and tokens are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condense import Method, use

VARIANCES = (0.01, 0.03, 0.1, 0.3, 1.0)


@torch.no_grad()
def noise_effect(model: PreTrainedModel, method: Method, sequences: Sequence[np.ndarray]) -> list[dict[str, float]]:
    """Per variance, relative to the keys' own: mean KL divergence (nats) from the predictions without noise.

    model: a Llama-like model with stock attention. sequences: token ids ``[L]``.
    """
    totals = dict.fromkeys(VARIANCES, 0.0)
    with use(model, method):
        for index, sequence in enumerate(sequences):
            ids = torch.from_numpy(sequence).to(model.device)[None]
            clean = _log_probabilities(model, ids)
            for variance in VARIANCES:
                hooks = [
                    module.register_forward_hook(_noise(variance, seed=1000 * index + number))
                    for number, module in enumerate(_key_projections(model))
                ]
                try:
                    noisy = _log_probabilities(model, ids)
                finally:
                    for hook in hooks:
                        hook.remove()
                totals[variance] += float((clean.exp() * (clean - noisy)).sum(-1).mean())
    return [{"variance": variance, "kl": total / len(sequences)} for variance, total in totals.items()]


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)


def _key_projections(model: PreTrainedModel) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("k_proj")]


def _noise(variance: float, seed: int) -> Any:
    def hook(module: nn.Module, inputs: Any, keys: Tensor) -> Tensor:
        generator = torch.Generator(keys.device).manual_seed(seed)
        drawn = torch.randn(keys.shape, generator=generator, device=keys.device, dtype=torch.float32)
        return keys + (drawn * keys.float().std() * variance**0.5).to(keys.dtype)

    return hook
