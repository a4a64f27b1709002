"""Numerics: prefix-band attention and group pooling, with a plain reference and faster backends."""

from condense.ops.api import POOLINGS, Pooling, attend, decode_step, group_scores, pool
from condense.ops.bounds import ArrayBounds, Bounds, UniformBounds, UniformRule
from condense.ops.checks import resolve_backend, resolve_step_backend
from condense.ops.step import StepPlan, StepState

__all__ = [
    "POOLINGS",
    "ArrayBounds",
    "Bounds",
    "Pooling",
    "StepPlan",
    "StepState",
    "UniformBounds",
    "UniformRule",
    "attend",
    "decode_step",
    "group_scores",
    "pool",
    "resolve_backend",
    "resolve_step_backend",
]
