"""One decode step over pages in Triton: the kernels of a step in buffers, rows found by tables. Nobody waits.

Without a choice the kernel of rings is started once to store and once to attend. On Hopper, for few requests, each
kernel starts while the one before still runs, and waits for it before it reads that one's results.

With a choice, scratch memory by groups is one stretch for all requests, in which each has as many places as it has
groups: a few requests may be long, or many short. It is bounded by the pool of pages, not by requests times the longest
text: where these are more, requests attend one part after another.

Shapes: R requests, H query heads, K KV heads, D and Dv widths, P pages.
"""

from typing import Any

from torch import Tensor

from condense.ops.latents import Ranks
from condense.ops.recall.index import rotation
from condense.ops.step.pages import PagedState, rows_at_once, window_columns
from condense.ops.step.records import STAMP, record_format
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StateSizes, StepState
from condense.ops.triton import recall_step
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.host import cdiv, dense_rows, on_device_of
from condense.ops.triton.recall_step_plan import apart, close_of, plan_of
from condense.ops.triton.ring_step import JOIN, NUM_BUFFERS, STEP, split_scratch
from condense.ops.triton.step_plan import StepShape, launch_of

# groups whose largest shares a program finds
_SHARE_TILE = 256


def store(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float
) -> None:
    """Store one token of each request, and the entry of a group that is due, or the record of one that it completes.

    q ``[R, H, D]``, of which only the shape counts with a choice, k ``[R, K, D]``, v ``[R, K, Dv]``: bfloat16, float16
    or float32, one dtype with the window. seen int32 ``[R]`` on the device: tokens of each request, the new one
    included; 0 for an unused place, where nothing is stored. settings: as in `condense.ops.paged.read_paged`.
    On latents (``state.up``) q is absorbed, of these heads or the mean of all ranks', K is 1 and Dv is 0. Nothing is
    checked, as `read_paged` has checked all.
    """
    widths = q.shape[2], v.shape[2]
    pages, stamps = _buffers_of(state, widths, seen, settings)
    shape = _shape_of(q, widths, state, pages, settings, scale)
    with on_device_of(q):
        if settings.choice is None:
            # no outputs
            _start(launch_of(shape).store, (q, k, v), state, pages, (seen, seen))
            return
        k, v, tables = dense_rows(k), dense_rows(v), (state.window.table, state.entries.table)
        # no rows to leave out
        clock, turn = None if state.slots is None else state.slots.clock, rotation(q.shape[2], k.device, k.dtype)
        tensors = k, v, *recall_step.kept_of(pages), seen, *tables, stamps, clock, turn
        recall_step.CLOSE.start(close_of(shape), tensors, (*k.stride()[:2], *v.stride()[:2]))


def attend(
    q: Tensor,
    state: PagedState,
    seen: Tensor,
    settings: StepSettings,
    *,
    scale: float,
    out: Tensor,
    before: Tensor | None,
) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    before int64 ``[R]`` on the device, with a choice: tokens of the requests before each. On latents out is d_c wide.
    Other arguments as in `store`.
    """
    widths, R = (q.shape[2], 0 if state.latent else out.shape[2]), len(q)
    q = dense_rows(q)
    with on_device_of(q):
        if settings.choice is None:
            pages, _ = _buffers_of(state, widths, seen, settings)
            launch = launch_of(_shape_of(q, widths, state, pages, settings, scale))
            splits = split_scratch(q, launch.num_splits, out.shape[2])
            # keys and values are in pages by now
            _start(launch.step, (q, q, q), state, pages, splits)
            _join(launch.join, (*splits, None), out, seen, state)
            return
        assert before is not None
        rows = cdiv(R, cdiv(R, rows_at_once(state.entries)))
        for i in range(0, R, rows):
            part = slice(i, i + rows)
            parts = q[part], state.rows(i, i + rows), seen[part], before[part], out[part]
            _attend_to_open(*parts, widths, settings, scale)


def _attend_to_open(
    q: Tensor,
    state: PagedState,
    seen: Tensor,
    before: Tensor,
    out: Tensor,
    widths: tuple[int, int],
    settings: StepSettings,
    scale: float,
) -> None:
    """`attend` with a choice, of no more requests than `rows_at_once`. widths: D and Dv."""
    (pages, stamps), slots = _buffers_of(state, widths, seen, settings), state.slots
    plan = plan_of(_shape_of(q, widths, state, pages, settings, scale))
    scratch, of_q = recall_step.scratch_of(plan.scratch, q.device), q.stride()[:2]
    copied = (None, None) if slots is None else (slots.tags, slots.clock)
    tables = state.window.table, state.entries.table, before, stamps, *copied
    turn = rotation(widths[0], q.device, q.dtype)
    turned, scored, chosen, opened, attended = recall_step.tensors_of(q, pages, seen, scratch, turn, tables)
    if plan.turn is not None:
        recall_step.TURN.start(plan.turn, turned, of_q)
    recall_step.SCORE.start(plan.score, scored, of_q)
    choose = plan.choose
    if state.ranks is not None:
        choose, chosen = _of_all_heads(choose, chosen, before, state.most_groups(settings.rule.chunk), state.ranks)
    recall_step.CHOOSE.start(choose, chosen, (0 if slots is None else len(slots.held),))
    if plan.opened is not None:
        recall_step.OPENED.start(plan.opened, opened, ())
    recall_step.ATTEND.start(plan.attend, attended, of_q)
    _join(plan.join, (scratch.part, scratch.lse, turn), out, seen, state)


def _of_all_heads(
    plan: tuple[Any, ...], tensors: tuple[Tensor | None, ...], before: Tensor, groups: int, ranks: Ranks
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """Plan and tensors of a choice by the heads of all processes, from those by the heads of this one: as if their
    largest shares were the scores of one head. groups: the most of a request.
    """
    grid, (K, H, row, splits, *numbers), constants, options = plan
    (g, _, ranking, *_), (score, top, total, seen, *others) = constants, tensors
    _, most_opened, *_ = numbers
    if most_opened == groups:
        return plan, tensors
    assert score is not None
    sizes = apart((row, grid[0], grid[0]))
    shares = score.new_empty(sum(sizes))
    recall_step.SHARE(
        (cdiv(groups, _SHARE_TILE), grid[0], 1), (score, top, total, seen, before, *shares.split_with_sizes(sizes)),
        (H, row, splits, *numbers), (g, _SHARE_TILE, ranking), {},
    )  # fmt: skip
    joined = grid, (K, 1, row, 1, *numbers), constants, options
    return joined, (*ranks.max(shares).split_with_sizes(sizes), seen, *others)


def _join(
    join: tuple[Any, ...] | None,
    splits: tuple[Tensor, Tensor, Tensor | None],
    out: Tensor,
    seen: Tensor,
    state: PagedState,
) -> None:
    """Write outputs from those of all splits, and the rotation by which they may be turned."""
    assert join is not None
    grid, numbers, (*sizes, _, early, _), options = join
    join = grid, numbers, (*sizes, True, early, out.stride()[:2]), options
    part, lse, turn = splits
    JOIN.start(join, (part, lse, out, None, seen, state.extras.sink_logits, None, turn), (0, seen.stride(0)))


def _start(
    plan: tuple[Any, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    state: PagedState,
    pages: StepState,
    splits: tuple[Tensor, Tensor],
) -> None:
    """Start the kernel over pages. splits: outputs and log-sum-exps of all splits."""
    qkv, seen = (dense_rows(qkv[0]), dense_rows(qkv[1]), dense_rows(qkv[2])), pages.seen
    tables = state.window.table, state.entries.table, None if state.ring is None else state.ring.table
    # strides of rings and arrays, which pages have in their forms
    none = (0,) * 15
    strides = (*(n for x in qkv for n in x.stride()[:2]), *none, seen.stride(0), 0, 0, 0, 0, 0)
    STEP.start(plan, (*qkv, *pages[:NUM_BUFFERS], seen, None, None, *splits, splits[0], *tables, None, None), strides)


def _buffers_of(
    state: PagedState, widths: tuple[int, int], seen: Tensor, settings: StepSettings
) -> tuple[StepState, Tensor | None]:
    """The buffers of a step in pages, views ``[P, K, N, columns]``; the window, or ``seen``, in place of those that
    kernels do not read there. Also the stamps of records, ``[P, K, N, 1]``, if they have some. widths: D and Dv.
    """
    near, far, past = state.window.cache, state.entries.cache, state.ring
    kept = dict.fromkeys(StepState._fields, near)
    D, sums = widths[0], near[..., window_columns(*widths, settings, near.itemsize)[0] :]
    kept |= {"ring_v": near[..., D:], "sums": sums, "seen": seen, "first": seen, "arrived": seen}
    if state.holds_records:
        kept |= record_format(settings, widths, near.dtype).views(far, state.store)
    else:
        kept |= {"entries_k": far, "entries_v": far[..., D:]}
    if state.slots is not None:
        kept |= {name: getattr(state.slots, name) for name in ("slots", "held", "order")}
    if past is not None:
        kept["ring_q"] = past.cache
    stamps = kept.pop(STAMP, None)
    return StepState(**kept), stamps


def _shape_of(
    q: Tensor, widths: tuple[int, int], state: PagedState, pages: StepState, settings: StepSettings, scale: float
) -> StepShape:
    """The shape of a step over pages. widths: D and Dv; pages: as of `_buffers_of`."""
    (R, H, _), K, far, rule = q.shape, state.window.cache.shape[1], state.entries, settings.rule
    assert rule.window is not None
    if settings.choice is None:
        entries, slots, groups = far.table.shape[1] * far.slots, 0, 0
        form = PageForm.of(far._replace(cache=pages.entries_k))
    else:
        entries, slots = state.most_groups(rule.chunk), 0 if state.slots is None else state.slots.held.shape[2]
        # the groups of each request begin at a multiple of four
        groups = R * entries + cdiv(4 * R, 16) * 16
        form = PageForm.of_records(far, record_format(settings, widths, q.dtype), state.store)
    sizes, scores = StateSizes(R, K, widths, entries, rule.window + rule.chunk, sums=0), (scale, state.extras.softcap)
    forms = PageForm.of(state.window), form, None if state.ring is None else PageForm.of(state.ring)
    return StepShape(q.device, q.dtype, H, sizes, state.latent, scores, settings.number, False, slots, *forms, groups)
