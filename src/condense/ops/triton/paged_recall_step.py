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
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.paged_step import buffers_of, join_pages
from condense.ops.triton.recall_step import ATTEND, CHOOSE, CLOSE, SCORE, kept_of, scratch_of, tensors_of
from condense.ops.triton.recall_step_plan import Room, close_of, plan_of


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
    kept, tables = kept_of(buffers_of(state, D, seen, settings)), (state.window.table, state.entries.table)
    with on_device_of(q):
        # no rows to leave out
        tensors = k, v, *kept, seen, *tables, rotation(D, k.device, k.dtype)
        CLOSE.start(plan, tensors, (*k.stride()[:2], *v.stride()[:2]))


def attend(
    q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor, before: Tensor
) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    before int64 ``[R]`` on the device: tokens of the requests before each. Requests that come behind more groups than
    `room_for` says get NaN. On latents out is d_c wide. Other arguments and errors as in `store`.
    """
    plan = plan_of(*_sizes_of(q, state, settings), (scale, state.extras.softcap), False)
    q, D = dense_rows(q), q.shape[2]
    pages, tables = buffers_of(state, D, seen, settings), (state.window.table, state.entries.table, before)
    scratch, of_q = scratch_of(plan.scratch, q.device), q.stride()[:2]
    scored, chosen, attended = tensors_of(q, pages, seen, scratch, rotation(D, q.device, q.dtype), tables)
    with on_device_of(q):
        SCORE.start(plan.score, scored, of_q)
        CHOOSE.start(plan.choose, chosen, ())
        ATTEND.start(plan.attend, attended, of_q)
        join_pages(plan.join, scratch.part, scratch.lse, seen, state.extras.sink_logits, out)


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
