"""Methods that keep exact tokens alone, to compare others with: all of them, or the first ones and a window.

StreamingLLM (Xiao et al., 2024) and LM-Infinite (Han et al., 2024) drop the tokens between.
"""

from dataclasses import dataclass
from typing import ClassVar

from condense.config import Natural, Positive
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


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """The first ``sink`` (>= 0) and the last ``window`` (>= 1) tokens, exact, at their absolute positions."""

    name: ClassVar[str] = "streaming_llm"
    sink: Natural = 4
    window: Positive = 2000

    @property
    def layout(self) -> Layout:
        """Tokens outside the window are dropped, except the first ``sink``."""
        return first_tokens(self.window, self.sink)


@dataclass(frozen=True, kw_only=True)
class LMInfinite(Method):
    """The first ``n_global`` (>= 0) and the last ``window`` (>= 1) tokens, exact.

    Positions stay absolute: the paper's distance ceiling, which matters beyond the trained length, is left out.
    """

    name: ClassVar[str] = "lm_infinite"
    n_global: Natural = 10
    window: Positive = 4096

    @property
    def layout(self) -> Layout:
        """Tokens outside the window are dropped, except the first ``n_global``."""
        return first_tokens(self.window, self.n_global)
