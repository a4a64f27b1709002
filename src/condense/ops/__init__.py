"""Numerics: prefix-band attention and group pooling, with a plain reference and faster backends."""

from condense.ops.api import (
    attend,
    decode_step,
    group_scores,
    importance,
    pool,
    pool_groups,
    summarize,
)
from condense.ops.bounds import ArrayBounds, Bounds, UniformBounds, UniformRule, Windows
from condense.ops.checks import resolve_backend, resolve_pooling, step_backend
from condense.ops.types import POOLINGS, Pooling, StepSettings, StepState

__all__ = [
    "POOLINGS",
    "ArrayBounds",
    "Bounds",
    "Pooling",
    "StepSettings",
    "StepState",
    "UniformBounds",
    "UniformRule",
    "Windows",
    "attend",
    "decode_step",
    "group_scores",
    "importance",
    "pool",
    "pool_groups",
    "resolve_backend",
    "resolve_pooling",
    "step_backend",
    "summarize",
]
