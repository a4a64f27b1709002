"""The kernels of a decode step over rings of tokens and entries, without a choice: one kernel or two.

Shapes: B rows, H query heads, S splits, Dv width.
"""

import torch
from torch import Tensor

from condense.ops.step.call import NewToken, StepCall
from condense.ops.triton.host import on_device_of
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.prepared import PreparedStep
from condense.ops.triton.step_kernels import step_join_kernel, step_kernel
from condense.ops.triton.step_plan import StepShape, launch_of

STEP, JOIN = Launcher(step_kernel), Launcher(step_join_kernel)
# the kernel takes the first nine buffers of a state, up to the biases, and the strides of the first five
NUM_BUFFERS, _NUM_STRIDED = 9, 5


class RingKernels(PreparedStep):
    """The kernels of steps without a choice."""

    __slots__ = ("_join", "_latent", "_num_splits", "_others", "_step")

    def __init__(self, call: StepCall, *, host_bound: bool = False) -> None:
        """call: checked by `condense.ops.triton.step.step`. host_bound: as in `launch_of`."""
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
        """Attention ``[B, H, 1, Dv]``."""
        q, k, v = self._dense(token)
        state, real, counter = self.state, token.real, token.counter
        Dv = self._latent or v.shape[3]
        part, lse = split_scratch(q, self._num_splits, Dv)
        out = torch.empty(*q.shape[:3], Dv, dtype=q.dtype, device=q.device)
        has_token = state.seen if real is None else real
        # kernels start on the current device, which may not be that of the tensors in a model spread over several
        with on_device_of(q):
            self._step((q, k, v, *state[:NUM_BUFFERS], has_token, sink, counter, part, lse, out, *self._others))
            if self._join is not None:
                self._join((part, lse, out, state.seen, has_token, sink, counter, None))
        return out


def split_scratch(q: Tensor, S: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, S, Dv]`` and log-sum-exp ``[B, H, S]`` of every split. q: ``[B, H, ...]``."""
    B, H = q.shape[:2]
    part = torch.empty(B, H, S, Dv, dtype=torch.float32, device=q.device)
    return part, torch.empty(B, H, S, dtype=torch.float32, device=q.device)
