"""Prepared decode steps, for a loop on the host: all that does not depend on the token is computed once. Also the
kernels, one or two, of a step over rings of tokens and entries without stored groups.

Shapes as in `condense.ops.step.call` and `condense.ops.step.state`; S splits.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from condense.ops.step.call import NewToken, StepCall
from condense.ops.step.state import StepState
from condense.ops.triton.host import dense_rows, on_device_of
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.step_kernels import step_join_kernel, step_kernel
from condense.ops.triton.step_plan import StepShape, launch_of
from condense.ops.types import Extras

STEP, JOIN = Launcher(step_kernel), Launcher(step_join_kernel)
# the kernel takes the first nine buffers of a state, up to the biases, and the strides of the first five
NUM_BUFFERS, _NUM_STRIDED = 9, 5


class PreparedStep(ABC):
    """A step for one state and for tokens of one layout: dtype, device, shape, strides and alignment.

    state: the buffers. A call checks nothing (see `takes` for the layout), allocates outputs and starts kernels.
    """

    # no `__dict__`: `condense.caches.cache_nbytes` walks through attributes and must not walk into compiled kernels
    __slots__ = ("_is_dense", "_layout", "state")

    state: StepState

    def __init__(self, call: StepCall) -> None:
        """Keep the state and the layout of the token of ``call``, which all later tokens must have."""
        self.state = call.state
        self._layout = _layout_of(call.token, call.scale, call.extras)
        self._is_dense = all(dense_rows(x) is x for x in call.token[:3])

    def takes(self, call: StepCall) -> bool:
        """Return True if ``call`` has this state, and a token of the same layout as the first."""
        return call.state is self.state and _layout_of(call.token, call.scale, call.extras) == self._layout

    @abstractmethod
    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Read a token for which `takes` is true and return its attention. sink: `Extras.sink_logits`."""

    def _dense(self, token: NewToken) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, copied if their last dimension is not contiguous."""
        q, k, v = token[:3]
        return (q, k, v) if self._is_dense else (dense_rows(q), dense_rows(k), dense_rows(v))


def _layout_of(token: NewToken, scale: float, extras: Extras) -> tuple[Any, ...]:
    """Properties of a token and of its extras on which compiled kernels and their arguments depend."""
    q, k, v, real, counter = token
    sink = extras.sink_logits
    return (
        scale, extras.softcap, q.dtype, k.dtype, v.dtype, q.device, q.shape, k.shape, v.shape,
        q.stride(), k.stride(), v.stride(), q.data_ptr() % 16 == 0, k.data_ptr() % 16 == 0, v.data_ptr() % 16 == 0,
        real is None or _kind_of(real), counter is None or _kind_of(counter), sink is None or _kind_of(sink),
    )  # fmt: skip


def _kind_of(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16 == 0


class RingKernels(PreparedStep):
    """The kernels of steps without a choice of stored groups."""

    __slots__ = ("_join", "_latent", "_num_splits", "_others", "_step")

    def __init__(self, call: StepCall, *, host_bound: bool = False) -> None:
        """Prepare ``call``, which `condense.ops.triton.step` has checked. host_bound: as in `launch_of`."""
        super().__init__(call)
        token, state, settings, _, self._latent, _ = call
        q, k, v = self._dense(token)
        # tables of pages, and fine entries
        self._others: tuple[Tensor | None, ...] = (None,) * 5
        if settings.coarse is not None:
            self._others = None, None, None, state.fine_k, state.fine_v
        launch = launch_of(StepShape.of(call), host_bound)
        has_token = state.seen if token.real is None else token.real
        strides = (
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            *(n for x in state[:_NUM_STRIDED] for n in x.stride()[:3]),
            state.seen.stride(0), *state.first.stride(), *state.arrived.stride(), has_token.stride(0),
        )  # fmt: skip
        self._num_splits = launch.num_splits
        self._step = Prepared(STEP, launch.step, strides)
        self._join: Prepared | None = None
        if launch.join is not None:
            self._join = Prepared(JOIN, launch.join, (state.seen.stride(0), has_token.stride(0)))

    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Return attention ``[B, H, 1, Dv]``."""
        q, k, v = self._dense(token)
        state, real, counter = self.state, token.real, token.counter
        Dv = self._latent or v.shape[3]
        part, lse = split_scratch(q, self._num_splits, Dv)
        out = torch.empty(*q.shape[:3], Dv, dtype=q.dtype, device=q.device)
        has_token = state.seen if real is None else real
        with on_device_of(q):
            self._step((q, k, v, *state[:NUM_BUFFERS], has_token, sink, counter, part, lse, out, *self._others))
            if self._join is not None:
                self._join((part, lse, out, state.seen, has_token, sink, counter, None))
        return out


def split_scratch(q: Tensor, S: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Allocate output ``[B, H, S, Dv]`` and log-sum-exp ``[B, H, S]`` of S splits, float32. q: ``[B, H, ...]``."""
    B, H = q.shape[:2]
    part = torch.empty(B, H, S, Dv, dtype=torch.float32, device=q.device)
    return part, torch.empty(B, H, S, dtype=torch.float32, device=q.device)
