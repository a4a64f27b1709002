"""Numerics: prefix-band attention and group pooling, with a plain reference and faster backends."""

from condense.ops.api import POOLINGS, Pooling, attend, group_scores, importance, pool
from condense.ops.bounds import ArrayBounds, Bounds, UniformBounds, UniformRule
from condense.ops.checks import resolve_backend

__all__ = [
    "POOLINGS",
    "ArrayBounds",
    "Bounds",
    "Pooling",
    "UniformBounds",
    "UniformRule",
    "attend",
    "group_scores",
    "importance",
    "pool",
    "resolve_backend",
]
