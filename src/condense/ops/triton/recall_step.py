"""Launches of the kernels of a decode step with `Recall`: five kernels; for some latents six, on Hopper seven.

Shapes as in `condense.ops.step.state`; R = H / K query heads per KV head, S splits of the work on one KV head.
"""

from collections import namedtuple

import torch
from torch import Tensor

from condense.ops.recall.index import rotation
from condense.ops.step.call import NewToken, StepCall
from condense.ops.step.state import StepState
from condense.ops.triton.host import on_device_of
from condense.ops.triton.latent_groups_kernels import latent_groups_kernel
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.recall_close_kernels import recall_close_kernel
from condense.ops.triton.recall_step_choice_kernels import recall_choose_kernel, recall_share_kernel
from condense.ops.triton.recall_step_kernels import recall_attend_kernel
from condense.ops.triton.recall_step_plan import plan_of
from condense.ops.triton.recall_step_score_kernels import recall_rotate_kernel, recall_score_kernel
from condense.ops.triton.ring_step import JOIN, PreparedStep
from condense.ops.triton.step_plan import StepShape

CLOSE, ROTATE = (Launcher(x) for x in (recall_close_kernel, recall_rotate_kernel))
SCORE, CHOOSE = (Launcher(x) for x in (recall_score_kernel, recall_choose_kernel))
OPENED, ATTEND = (Launcher(x) for x in (latent_groups_kernel, recall_attend_kernel))
# runs between score and choose, if other processes have query heads of the same KV head
SHARE = Launcher(recall_share_kernel)


class StepScratch(
    namedtuple(
        "StepScratch",
        "part lse score top total centre centre_top centre_total rotated whole base groups place slot_of used free",
    )
):
    """Scratch memory of one step: tensors of one dimension, whose numbers are in the order of the shapes given here.

    float32: part ``[B, H, S1, Dv]`` and lse ``[B, H, S1]``, results of attention's splits; score ``[B, H, G as a power
    of two]``; top and total ``[B, H, S0]``, largest score and sum of exponentials per split; centre, centre_top and
    centre_total, the same for scores of centres; rotated ``[B, H, D]``, rotated queries; whole, int8 queries of
    `recall_rotate_kernel` (these five are empty if no kernel reads them); base ``[B, H, r]``, products with centres of
    open groups, twice as many numbers for latents. int32: groups ``[B, K, r]``, the open groups, and place, where each
    is read; slot_of ``[B, K, G]``, used and free ``[B, K, S]`` of S slots, to find slots. In pages score, centre and
    base are ``[H, all]``, base of latents ``[H, 2 all]``, groups and slot_of ``[K, all]``, for all groups of all rows.
    """


def scratch_of(sizes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> StepScratch:
    """Allocate scratch memory with two calls, because each takes time on the host. sizes: ``scratch`` of the plan."""
    floats, integers = sizes
    return StepScratch(
        *torch.empty(sum(floats), dtype=torch.float32, device=device).split_with_sizes(floats),
        *torch.empty(sum(integers), dtype=torch.int32, device=device).split_with_sizes(integers),
    )


def kept_of(state: StepState) -> tuple[Tensor | None, ...]:
    """The buffers of a state that `recall_close_kernel` takes, in its order; no sums if queries do not see them."""
    sums = state.sums if state.sums.numel() > 0 else None
    return state.signs, state.steps, state.store, state.ring_k, state.ring_v, sums, state.seen


def tensors_of(
    q: Tensor, state: StepState, counts: Tensor, scratch: StepScratch, matrix: Tensor, tables: tuple[Tensor | None, ...]
) -> tuple[tuple[Tensor | None, ...], ...]:
    """The tensors of five kernels: rotate queries, score, choose, read open groups of latents, and attend.

    counts: which rows count. matrix: the rotation. tables: page tables of tokens and of records, tokens of all rows
    before each row, stamps of records, and tags and clock of `PagedSlots`; each None for buffers.
    """
    _, _, ring_k, ring_v, _, seen, _, _, _, signs, steps, store, slots, held, order, sums, *_ = state
    part, lse, score, top, total, *optional, base, groups, place, slot_of, used, free = scratch
    *centres, rotated, whole = (x if x.numel() > 0 else None for x in optional)
    near, far, before, *copied = tables
    in_slots = (place, slots) if place.numel() > 0 else (None, None)
    return (
        (q, rotated, whole, matrix),
        (q, signs, steps, seen, counts, score, top, total, *centres, rotated, whole, matrix, far, before),
        (score, top, total, seen, counts, groups, place, held, order, slot_of, used, free, before, far, *copied),
        (rotated, signs, steps, store, base, groups, seen, counts, part, lse, far, before, *in_slots),
        (
            q, signs, steps, store, ring_k, ring_v, sums, slots, rotated, matrix, base, groups, place, *centres, seen,
            counts, part, lse, near, far, before,
        ),
    )  # fmt: skip


class RecallKernels(PreparedStep):
    """The kernels of steps with a choice of stored groups."""

    __slots__ = ("_kept", "_kernels", "_rotation", "_sizes", "_width")

    def __init__(self, call: StepCall) -> None:
        """Prepare ``call``, which `condense.ops.triton.step` has checked."""
        super().__init__(call)
        q, k, v = self._dense(call.token)
        plan, of_q = plan_of(StepShape.of(call)), q.stride()[:2]
        self._width, self._sizes, self._kept = call.latent or v.shape[3], plan.scratch, kept_of(call.state)
        self._rotation = rotation(q.shape[3], q.device, q.dtype)
        # the strides (1, 1) of the last kernel: `seen` and `real` are contiguous
        strides = (*k.stride()[:2], *v.stride()[:2]), of_q, of_q, call.state.held.shape[::2], (), of_q, (1, 1)
        launchers, (_, *plans) = (CLOSE, ROTATE, SCORE, CHOOSE, OPENED, ATTEND, JOIN), plan
        kernels = zip(launchers, plans, strides, strict=True)
        self._kernels = [None if launch is None else Prepared(kernel, launch, own) for kernel, launch, own in kernels]

    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Return attention ``[B, H, 1, Dv]``, or ``[B, H, 1, latent]`` for latents."""
        q, k, v = self._dense(token)
        state, seen = self.state, self.state.seen
        scratch = scratch_of(self._sizes, q.device)
        out = torch.empty(*q.shape[:3], self._width, dtype=q.dtype, device=q.device)
        counts = seen if token.real is None else token.real.contiguous()
        tensors = (
            (k, v, *self._kept, counts, None, None, None, None, self._rotation),
            *tensors_of(q, state, counts, scratch, self._rotation, (None,) * 6),
            (scratch.part, scratch.lse, out, seen, counts, sink, token.counter, self._rotation),
        )
        with on_device_of(q):
            for kernel, given in zip(self._kernels, tensors, strict=True):
                if kernel is not None:
                    kernel(given)
        return out
