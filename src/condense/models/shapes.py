"""Shapes of well-known models, from their public configurations: enough for times and bytes, without a hub."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from condense.models.families import asset

# Only values that decide time and memory, and the number of positions. minicpm3-4b's initializer_range is changed: with
# its own, 0.1, no comparison of logits is meaningful.
MODEL_SHAPES: dict[str, dict[str, Any]] = asset("model_shapes.json")


def check_shape(name: str) -> str:
    """Return the name of a shape. Raises ValueError for an unknown one."""
    if name not in MODEL_SHAPES:
        raise ValueError(f"shape must be one of {', '.join(MODEL_SHAPES)}, got {name!r}")
    return name


def shape_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of that shape, with some of its values changed. Raises ValueError for an unknown shape."""
    sizes = MODEL_SHAPES[check_shape(name)] | changes
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)
