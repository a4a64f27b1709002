"""Numerics: prefix-band attention and group pooling, with a plain reference and faster backends."""

from condense.ops.api import POOLINGS, Pooling, attend, group_scores, pool, pool_groups, summarize
from condense.ops.bounds import ArrayBounds, Bounds, UniformBounds, UniformRule, Windows
from condense.ops.checks import resolve_backend, resolve_pooling

__all__ = [
    "POOLINGS",
    "ArrayBounds",
    "Bounds",
    "Pooling",
    "UniformBounds",
    "UniformRule",
    "Windows",
    "attend",
    "group_scores",
    "pool",
    "pool_groups",
    "resolve_backend",
    "resolve_pooling",
    "summarize",
]
