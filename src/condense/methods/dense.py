"""Ordinary causal attention as a method, to compare others with."""

from dataclasses import dataclass
from typing import ClassVar

from condense.methods.base import Method
from condense.methods.layout import Layout, first_tokens


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """All earlier tokens, exact. Whole sequences run on PyTorch's fused causal attention."""

    name: ClassVar[str] = "dense"

    @property
    def layout(self) -> Layout:
        """No token is ever pooled."""
        return first_tokens(window=None, kept=0)
