"""Models to time: well-known shapes with random weights, made on the device, or a saved model."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from condense.config import check_int

# The sizes that decide time and memory, from the models' public configurations; but for minicpm3-4b's
# initializer_range: with its own, 0.1, no comparison of logits is meaningful.
MODEL_SHAPES: dict[str, dict[str, Any]] = json.loads(
    resources.files("condense").joinpath("assets/model_shapes.json").read_text(encoding="utf-8")
)
# a large number costs nothing, because rotary tables are computed per call
_MAX_POSITIONS = 2**21


def check_shape(name: str) -> str:
    """The name. Raises ValueError for an unknown one."""
    if name not in MODEL_SHAPES:
        raise ValueError(f"shape must be one of {', '.join(MODEL_SHAPES)}, got {name!r}")
    return name


def random_model(
    name: str, *, num_layers: int | None = None, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A model of that shape with normal weights, drawn on the device; num_layers: only so many of its layers.

    Raises ValueError for an unknown shape or a number of layers below 1.
    """
    sizes: dict[str, Any] = dict(MODEL_SHAPES[check_shape(name)])
    if num_layers is not None:
        check_int("layers", num_layers, 1)
        sizes["num_hidden_layers"] = num_layers
    config = AutoConfig.for_model(sizes.pop("model_type"), max_position_embeddings=_MAX_POSITIONS, **sizes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return ready(model)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Set greedy generation without end tokens, for timing."""
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval().requires_grad_(False)
