"""Ordinary causal attention through the same corridor: the yardstick."""

from dataclasses import dataclass
from typing import ClassVar

from condense.methods.base import Method
from condense.ops import UniformRule


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Every past token, exact. Runs on PyTorch's fused causal attention."""

    name: ClassVar[str] = "dense"

    @property
    def rule(self) -> UniformRule:
        """Nothing ever closes."""
        return UniformRule(chunk=1, window=None, max_chunks=0)
