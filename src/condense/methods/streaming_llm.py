"""StreamingLLM (Xiao et al., 2024): attention sinks and a sliding window. A baseline: it drops tokens."""

from dataclasses import dataclass
from typing import ClassVar

from condense.config import check_int
from condense.methods.base import Method
from condense.methods.layout import Layout, first_tokens


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """The first ``sink`` (>= 0) and the last ``window`` (>= 1) tokens, exact, at their absolute positions.

    Raises ValueError for a field out of range.
    """

    name: ClassVar[str] = "streaming_llm"
    sink: int = 4
    window: int = 2000

    def __post_init__(self) -> None:
        check_int("sink", self.sink, 0)
        check_int("window", self.window, 1)

    @property
    def layout(self) -> Layout:
        """Tokens outside the window are dropped, except the first ``sink``."""
        return first_tokens(self.window, self.sink)
