"""A decode step that a loop on the host repeats: all that does not depend on the token is computed once.

Shapes as in `condense.ops.step.call` and `condense.ops.step.state`.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from condense.ops.extras import Extras
from condense.ops.step.call import NewToken, StepCall
from condense.ops.step.state import StepState
from condense.ops.triton.host import dense_rows


class PreparedStep(ABC):
    """A step for tokens of one layout and one state.

    state: the buffers. A call checks only that its token is like the first (`takes`), allocates and starts kernels.
    """

    # no `__dict__`: `condense.caches.cache_nbytes` walks through attributes and must not walk into compiled kernels
    __slots__ = ("_is_dense", "_layout", "state")

    state: StepState

    def __init__(self, call: StepCall) -> None:
        """call: its token has the layout that all later ones have."""
        self.state = call.state
        self._layout = _layout_of(call.token, call.scale, call.extras)
        self._is_dense = all(dense_rows(x) is x for x in call.token[:3])

    def takes(self, call: StepCall) -> bool:
        """True if this is the state, and the token laid out as the first one was."""
        return call.state is self.state and _layout_of(call.token, call.scale, call.extras) == self._layout

    @abstractmethod
    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Read a token for which `takes` is true and return its attention. sink: `Extras.sink_logits`."""

    def _dense(self, token: NewToken) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as kernels read them."""
        q, k, v = token[:3]
        return (q, k, v) if self._is_dense else (dense_rows(q), dense_rows(k), dense_rows(v))


def _layout_of(token: NewToken, scale: float, extras: Extras) -> tuple[Any, ...]:
    """Properties of a token and of its extras for which kernels are compiled or started."""
    q, k, v, real, counter = token
    sink = extras.sink_logits
    return (
        scale, extras.softcap, q.dtype, k.dtype, v.dtype, q.device, q.shape, k.shape, v.shape,
        q.stride(), k.stride(), v.stride(), q.data_ptr() % 16 == 0, k.data_ptr() % 16 == 0, v.data_ptr() % 16 == 0,
        real is None or _kind_of(real), counter is None or _kind_of(counter), sink is None or _kind_of(sink),
    )  # fmt: skip


def _kind_of(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16 == 0
