"""One decode step of Recall over pages of records in Triton: the kernels of a step in buffers, rows found by tables.

Scratch memory by groups is one stretch for all requests, in which each has as many places as it has groups: a few
requests may be long, or many short. It is bounded by the pool of pages, not by requests times the longest text.

Shapes: R requests, H query heads, K KV heads, D and Dv widths, P pages of N records, n columns of a table.
"""

from typing import Any

from torch import Tensor

from condense.ops.recall.index import rotation
from condense.ops.step.pages import PagedState, Pages, room_for
from condense.ops.step.records import record_format
from condense.ops.step.settings import StepSettings
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.host import cdiv, dense_rows, on_device_of
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.paged_step import join_pages, parts_of
from condense.ops.triton.recall_close_kernels import recall_close_kernel
from condense.ops.triton.recall_step import rounded, scratch_of
from condense.ops.triton.recall_step_choice_kernels import recall_choose_kernel
from condense.ops.triton.recall_step_kernels import recall_attend_kernel
from condense.ops.triton.recall_step_plan import Room, close_of, plan_of
from condense.ops.triton.recall_step_score_kernels import recall_score_kernel

_close, _score, _choose = (Launcher(x) for x in (recall_close_kernel, recall_score_kernel, recall_choose_kernel))
_attend = Launcher(recall_attend_kernel)


def store(q: Tensor, k: Tensor, v: Tensor, state: PagedState, seen: Tensor, settings: StepSettings) -> None:
    """Store one token of each request, and the record of a group that it completes.

    q ``[R, H, D]``, of which only the shape counts, k ``[R, K, D]``, v ``[R, K, Dv]``: bfloat16, float16 or float32,
    one dtype with the window. seen int32 ``[R]`` on the device: tokens of each request, the new one included; 0 for an
    unused place, where nothing is stored. settings: as in `condense.ops.paged.read_paged`. On latents (``state.up``) q
    is absorbed, K is 1, Dv is 0.
    Raises ValueError for what `condense.ops.triton.limits.step_obstacle` names.
    """
    plan = close_of(*_sizes_of(q, state, settings), False)
    k, v, D = dense_rows(k), dense_rows(v), q.shape[2]
    near, far, parts = state.window, state.entries, parts_of(state, D, settings)
    buffers = parts["entries_k"], parts["entries_v"], parts["signs"], parts["steps"], parts["store"]
    # no rows to leave out
    others = near.cache, near.cache[..., D:], seen, seen
    tensors = k, v, *buffers, *others, near.table, far.table, rotation(D, k.device, k.dtype)
    with on_device_of(q):
        _close.start(plan, tensors, (*k.stride()[:2], *v.stride()[:2]))


def attend(
    q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor, before: Tensor
) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    before int64 ``[R]`` on the device: tokens of the requests before each. Requests that come behind more groups than
    `room_for` says get NaN. On latents out is d_c wide. Other arguments and errors as in `store`.
    """
    plan = plan_of(*_sizes_of(q, state, settings), (scale, state.extras.softcap), False)
    (R, H, Dv), K = out.shape, state.window.cache.shape[1]
    q, D, near, far = dense_rows(q), q.shape[2], state.window, state.entries
    parts, room = parts_of(state, D, settings), _room(far)
    S0, S1 = plan.splits
    assert settings.choice is not None
    width = D if settings.choice.store.bits < 16 else 0
    floats = H * room, R * H * S0, R * H * S0, K * room, R * H * S1 * Dv, R * H * S1
    turns = R * H * width, H * room if width else 0
    scratch = scratch_of(rounded((*floats, *turns, K * room, 1, 1, 1, 1)), q.device)
    score, top, total, offset, part, lse, turned, base, groups, place, *_ = scratch
    asked = turned if width > 0 else None
    of_q, turn = q.stride()[:2], rotation(D, q.device, q.dtype)
    # kernels get the window in place of what they do not read: rings, slots
    other = near.cache
    of_groups = (parts[name] for name in ("entries_k", "entries_v", "signs", "steps", "store"))
    buffers = *of_groups, near.cache, near.cache[..., D:], other, asked, turn
    lists = groups, place, offset, other, other, place, place, place
    with on_device_of(q):
        scored = parts["signs"], parts["steps"], seen, seen, score, top, total, asked, turn
        _score.start(plan.score, (q, *scored, far.table, before), of_q)
        _choose.start(plan.choose, (score, top, total, seen, seen, *lists, before), ())
        attended = *buffers, base, groups, place, offset, seen, seen, part, lse
        _attend.start(plan.attend, (q, *attended, near.table, far.table, before), of_q)
        join_pages(plan.join, part, lse, seen, state.extras.sink_logits, out)


def _room(far: Pages) -> int:
    """Groups of all requests together, where those of each begin at a multiple of four."""
    return room_for(far) + cdiv(4 * far.table.shape[0], 16) * 16


def _sizes_of(q: Tensor, state: PagedState, settings: StepSettings) -> tuple[Any, ...]:
    """The first arguments of `plan_of` for these tensors, up to the settings' number. Raises ValueError as `store`."""
    (R, H, D), (_, K, _, C), far = q.shape, state.window.cache.shape, state.entries
    groups, widths, latent = far.table.shape[1] * far.slots, (D, C - D), state.latent
    obstacle = step_obstacle(q.device, q.dtype, widths, settings, latent=latent, entries=groups)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    assert settings.rule.window is not None
    records = PageForm.of_records(far, record_format(settings, (D, C - D), q.dtype))
    tokens, pages = settings.rule.window + settings.rule.chunk, (PageForm.of(state.window), records)
    room = Room(groups, tokens, 0, 0, *pages, _room(far))
    return q.device, q.dtype, (R, H, K), (*widths, latent), room, settings.number
