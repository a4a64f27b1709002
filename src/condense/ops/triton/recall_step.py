"""The five kernels of a decode step that chooses among stored groups.

Shapes as in `condense.ops.step.state`; R = H / K query heads per KV head, S splits of the work on one KV head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.recall.index import rotation
from condense.ops.step.call import NewToken, StepCall
from condense.ops.triton.host import cdiv, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.prepared import PreparedStep
from condense.ops.triton.recall_close_kernels import recall_close_kernel
from condense.ops.triton.recall_step_choice_kernels import recall_choose_kernel
from condense.ops.triton.recall_step_kernels import recall_attend_kernel
from condense.ops.triton.recall_step_plan import Room, plan_of
from condense.ops.triton.recall_step_score_kernels import recall_score_kernel
from condense.ops.triton.step_kernels import step_join_kernel

_close, _score, _choose = (Launcher(x) for x in (recall_close_kernel, recall_score_kernel, recall_choose_kernel))
_attend, _join = Launcher(recall_attend_kernel), Launcher(step_join_kernel)


class _Scratch(NamedTuple):
    """Scratch memory of one step; all tensors have one dimension and hold, in order, numbers of the shapes given here.

    float32: score ``[B, H, G as a power of two]``, top and total ``[B, H, S0]``, offset ``[B, K, G]``, part
    ``[B, H, S1, Dv]``, lse ``[B, H, S1]``, turned ``[B, H, D]``, base ``[B, H, r]``; int32: groups and
    place ``[B, K, r]``, slot_of ``[B, K, G]``, used and free ``[B, K, S]`` of S slots.
    """

    score: Tensor
    top: Tensor
    total: Tensor
    offset: Tensor
    part: Tensor
    lse: Tensor
    turned: Tensor
    base: Tensor
    groups: Tensor
    place: Tensor
    slot_of: Tensor
    used: Tensor
    free: Tensor


# fields of `_Scratch` that are float32
_NUM_FLOATS = 8


def _scratch_sizes(
    rows: tuple[int, int], G: int, r: int, slots: int, splits: tuple[int, int], D: int, Dv: int
) -> tuple[int, ...]:
    """The `rounded` sizes of the fields of `_Scratch`. rows: B * H, B * K; D: 0 if nobody reads turned queries."""
    (queries, heads), (S0, S1) = rows, splits
    floats = queries * power_of_2(max(G, 4)), queries * S0, queries * S0, heads * G, queries * S1 * Dv, queries * S1
    turns = queries * D, queries * r if D else 0
    return rounded((*floats, *turns, heads * r, heads * r, heads * G if slots else 0, heads * slots, heads * slots))


def rounded(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the fields of `_Scratch`, rounded up so that each begins at a multiple of 128 bytes."""
    return tuple(cdiv(n, 32) * 32 for n in sizes)


def scratch_of(sizes: tuple[int, ...], device: torch.device) -> _Scratch:
    """Allocate scratch memory in two pieces, because each allocation takes time on the host. sizes: `rounded`."""
    floats, integers = sizes[:_NUM_FLOATS], sizes[_NUM_FLOATS:]
    return _Scratch(
        *torch.empty(sum(floats), dtype=torch.float32, device=device).split_with_sizes(floats),
        *torch.empty(sum(integers), dtype=torch.int32, device=device).split_with_sizes(integers),
    )


class RecallKernels(PreparedStep):
    """The kernels of steps with a choice."""

    __slots__ = ("_attend", "_choose", "_close", "_join", "_rotation", "_score", "_sizes", "_width")

    def __init__(self, call: StepCall) -> None:
        """call: checked by `condense.ops.triton.step.step`."""
        super().__init__(call)
        token, state, settings, scale, latent, extras = call
        choice = settings.choice
        assert choice is not None
        q, k, v = self._dense(token)
        (B, H, _, D), (_, K, _, Dv), G, S = q.shape, v.shape, state.entries_k.shape[2], state.held.shape[2]
        sizes = Room(G, state.ring_k.shape[2], state.store.shape[2], S)
        widths, scores, has_real = (D, Dv, latent), (scale, extras.softcap), token.real is not None
        plan = plan_of(q.device, q.dtype, (B, H, K), widths, sizes, settings.number, scores, has_real)
        self._width, turned = latent or Dv, D if choice.store.bits < 16 else 0
        self._sizes = _scratch_sizes((B * H, B * K), G, choice.quota.at(G), S, plan.splits, turned, self._width)
        self._rotation = rotation(D, q.device, q.dtype)
        of_q = q.stride()[:2]
        self._close = Prepared(_close, plan.close, (*k.stride()[:2], *v.stride()[:2]))
        self._score = Prepared(_score, plan.score, of_q)
        self._choose = Prepared(_choose, plan.choose, ())
        self._attend = Prepared(_attend, plan.attend, of_q)
        # strides 1: `seen` and the rows that count are contiguous
        self._join = Prepared(_join, plan.join, (1, 1))

    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Attention ``[B, H, 1, Dv]``, or ``[B, H, 1, latent]``."""
        q, k, v = self._dense(token)
        entries_k, entries_v, ring_k, ring_v, _, seen, _, _, _, signs, steps, store, slots, held, order = self.state
        scratch = scratch_of(self._sizes, q.device)
        score, top, total, offset, part, lse, turned, base, groups, place, *found = scratch
        asked = turned if turned.numel() > 0 else None
        out = torch.empty(*q.shape[:3], self._width, dtype=q.dtype, device=q.device)
        counts = seen if token.real is None else token.real.contiguous()
        changed = (entries_k, entries_v, signs, steps, store, ring_k, ring_v, seen)
        # kernels start on the current device, which may not be that of the tensors in a model spread over several
        with on_device_of(q):
            self._close((k, v, *changed, counts, None, None, self._rotation))
            if entries_k.shape[2] > 0:
                self._score((q, signs, steps, seen, counts, score, top, total, asked, self._rotation, None, None))
                chosen = (groups, place, offset, held, order, *found)
                self._choose((score, top, total, seen, counts, *chosen, None))
            keys = (entries_k, entries_v, signs, steps, store, ring_k, ring_v, slots, asked, self._rotation)
            self._attend((q, *keys, base, groups, place, offset, seen, counts, part, lse, None, None, None))
            self._join((part, lse, out, seen, counts, sink, token.counter))
        return out
