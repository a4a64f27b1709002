"""Methods that compute what stock layers do: layers that stay stock inside a condensed model attend by these.

Stock attention would fail there: a condensed model's mask expresses padding alone, and no layer may count tokens on the
host in a graph that is replayed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from condense.methods import Dense, Layout, Method, StreamingLLM
from condense.methods.layout import MEANS
from condense.models.families import is_chunked, sliding_window
from condense.ops import UniformRule


@dataclass(frozen=True, kw_only=True)
class LocalChunks(Method):
    """The exact tokens of a query's own chunk of ``size`` tokens.

    It has no ``name``, because it computes what stock layers compute and is never saved.
    """

    size: int

    @property
    def layout(self) -> Layout:
        """A chunk's first token closes the chunks before it, which leave no entries."""
        return Layout(UniformRule(chunk=self.size, window=1, max_chunks=0), pooling=MEANS)


def stock_method(module: nn.Module) -> Method:
    """The method that computes the same as a stock layer."""
    size = sliding_window(module)
    if size is None:
        return Dense()
    return LocalChunks(size=size) if is_chunked(module) else StreamingLLM(sink=0, window=size)


def reads_otherwise(methods: Iterable[Method]) -> Method | None:
    """The first method that reads a prompt in another way than single tokens; None if there is none."""
    return next((method for method in methods if method.as_steps is not method), None)


def method_of(module: Any) -> Method:
    """The method that a layer computes: the one it was given, or for a layer that stays stock its `stock_method`."""
    return module.condense_method or module.condense_stock
