"""Models to time: well-known shapes with random weights, made on the device, or a saved model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from condense.config import check_int
from condense.models.shapes import shape_config

# a large number costs nothing, because rotary tables are computed per call
_MAX_POSITIONS = 2**21


def random_model(
    name: str, *, num_layers: int | None = None, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A model of that shape with normal weights, drawn on the device; num_layers: only so many of its layers.

    Raises ValueError for an unknown shape or a number of layers below 1.
    """
    changes = {"max_position_embeddings": _MAX_POSITIONS}
    if num_layers is not None:
        check_int("layers", num_layers, 1)
        changes["num_hidden_layers"] = num_layers
    config = shape_config(name, **changes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return ready(model)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Set greedy generation without end tokens, for timing."""
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval().requires_grad_(False)
