"""One decode step over pages in Triton, by the kernels for buffers, which look up page tables. The host never waits.

Without a choice of stored groups `step_kernel` is started twice: to store, and to attend. On Hopper, for few requests,
each kernel starts while the one before still runs, and waits for it before it reads its results.

With a choice, all requests share one stretch of scratch memory, in which each takes as many places as it has groups: a
few requests may be long, or many short. Its size is bounded by the pool of pages, not by requests times the longest
text: if requests have more groups together, they attend in several parts, one after the other.

Shapes: R requests, H query heads, K KV heads, D and Dv widths, P pages.
"""

from typing import Any, NamedTuple

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

# groups per program of `recall_share_kernel`
_SHARE_TILE = 256


class PagedStep(NamedTuple):
    """A step of one token of each request over pages.

    settings, scale, state: as in `condense.ops.paged.read_paged`, which has checked them. widths: D and Dv. seen int32
    ``[R]`` on the device: tokens of each request, the new one included; 0 for an unused place, where nothing is stored.
    Tokens are bfloat16, float16 or float32, the dtype of the window. On latents (``state.up``) queries are absorbed, K
    is 1 and Dv is 0.
    """

    settings: StepSettings
    scale: float
    widths: tuple[int, int]
    state: PagedState
    seen: Tensor

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the tokens, and the entry of a group that is due, or the record of a group that a token completes.

        k ``[R, K, D]``, v ``[R, K, Dv]``, q ``[R, H, D]``; with a choice only the shape of q is read. On latents q may
        be the mean over all processes' heads.
        """
        (pages, stamps), state, seen = self._buffers(), self.state, self.seen
        shape = self._shape(q, pages)
        with on_device_of(q):
            if self.settings.choice is None:
                # this launch has no outputs: `seen` fills their places
                self._start(launch_of(shape).store, (q, k, v), pages, (seen, seen))
                return
            k, v, tables = dense_rows(k), dense_rows(v), (state.window.table, state.entries.table)
            clock, matrix = None if state.slots is None else state.slots.clock, rotation(q.shape[2], k.device, k.dtype)
            tensors = k, v, *recall_step.kept_of(pages), seen, *tables, stamps, clock, matrix
            recall_step.CLOSE.start(close_of(shape), tensors, (*k.stride()[:2], *v.stride()[:2]))

    def attend(self, q: Tensor, out: Tensor, before: Tensor | None) -> None:
        """Write the attention of q ``[R, H, D]``, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

        before: int64 ``[R]`` on the device, only with a choice: tokens of all requests before each one. On latents out
        is as wide as a latent.
        """
        R, q = len(q), dense_rows(q)
        with on_device_of(q):
            if self.settings.choice is None:
                pages, _ = self._buffers()
                launch = launch_of(self._shape(q, pages))
                splits = split_scratch(q, launch.num_splits, out.shape[2])
                # keys and values are read from pages: q fills their places
                self._start(launch.step, (q, q, q), pages, splits)
                self._join(launch.join, (*splits, None), out)
                return
            assert before is not None
            rows = cdiv(R, cdiv(R, rows_at_once(self.state.entries)))
            for i in range(0, R, rows):
                part = slice(i, i + rows)
                step = self._replace(state=self.state.rows(i, i + rows), seen=self.seen[part])
                step._attend_to_open(q[part], out[part], before[part])

    def _attend_to_open(self, q: Tensor, out: Tensor, before: Tensor) -> None:
        """Run `attend` with a choice, for at most `rows_at_once` requests."""
        (pages, stamps), state, seen = self._buffers(), self.state, self.seen
        plan, slots = plan_of(self._shape(q, pages)), state.slots
        scratch, of_q = recall_step.scratch_of(plan.scratch, q.device), q.stride()[:2]
        copied = (None, None) if slots is None else (slots.tags, slots.clock)
        tables = state.window.table, state.entries.table, before, stamps, *copied
        matrix = rotation(self.widths[0], q.device, q.dtype)
        rotated, scored, chosen, opened, attended = recall_step.tensors_of(q, pages, seen, scratch, matrix, tables)
        if plan.rotate is not None:
            recall_step.ROTATE.start(plan.rotate, rotated, of_q)
        recall_step.SCORE.start(plan.score, scored, of_q)
        choose = plan.choose
        if state.ranks is not None:
            most = state.most_groups(self.settings.rule.chunk)
            choose, chosen = _of_all_heads(choose, chosen, before, most, state.ranks)
        recall_step.CHOOSE.start(choose, chosen, (0, 0) if slots is None else slots.held.shape[::2])
        if plan.opened is not None:
            recall_step.OPENED.start(plan.opened, opened, ())
        recall_step.ATTEND.start(plan.attend, attended, of_q)
        self._join(plan.join, (scratch.part, scratch.lse, matrix), out)

    def _join(self, join: tuple[Any, ...] | None, splits: tuple[Tensor, Tensor, Tensor | None], out: Tensor) -> None:
        """Join all splits to ``out``. splits: outputs, log-sum-exps, and the rotation if outputs are still rotated."""
        assert join is not None
        grid, numbers, (*sizes, _, early, _), options = join
        join = grid, numbers, (*sizes, True, early, out.stride()[:2]), options
        part, lse, matrix = splits
        tensors = part, lse, out, None, self.seen, self.state.extras.sink_logits, None, matrix
        JOIN.start(join, tensors, (0, self.seen.stride(0)))

    def _start(
        self, plan: tuple[Any, ...], qkv: tuple[Tensor, ...], pages: StepState, splits: tuple[Tensor, Tensor]
    ) -> None:
        """Start `step_kernel` over pages. splits: outputs and log-sum-exps of all splits."""
        state, seen, qkv = self.state, pages.seen, tuple(map(dense_rows, qkv))
        tables = state.window.table, state.entries.table, None if state.ring is None else state.ring.table
        # strides of rings and arrays are not read: those of pages are constants in their forms
        none = (0,) * 15
        strides = (*(n for x in qkv for n in x.stride()[:2]), *none, seen.stride(0), 0, 0, 0, 0, 0)
        STEP.start(
            plan, (*qkv, *pages[:NUM_BUFFERS], seen, None, None, *splits, splits[0], *tables, None, None), strides
        )

    def _buffers(self) -> tuple[StepState, Tensor | None]:
        """The buffers of a step as views of pages ``[P, K, N, columns]``; the window or ``seen`` stand in for buffers
        that kernels do not read over pages. Also the stamps of records, ``[P, K, N, 1]``, or None.
        """
        state, seen, settings, widths = self.state, self.seen, self.settings, self.widths
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

    def _shape(self, q: Tensor, pages: StepState) -> StepShape:
        """The shape of the step. pages: from `_buffers`."""
        state, settings, widths = self.state, self.settings, self.widths
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
        sizes = StateSizes(R, K, widths, entries, rule.window + rule.chunk, sums=0)
        forms = PageForm.of(state.window), form, None if state.ring is None else PageForm.of(state.ring)
        scores, number = (self.scale, state.extras.softcap), settings.number
        return StepShape(q.device, q.dtype, H, sizes, state.latent, scores, number, False, slots, *forms, groups)


def _of_all_heads(
    plan: tuple[Any, ...], tensors: tuple[Tensor | None, ...], before: Tensor, groups: int, ranks: Ranks
) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """Plan and tensors of a choice by the heads of all processes, from plan and tensors of a choice by this process's.

    Each process reduces its heads to their largest softmax weight per group; the maximum over processes is then passed
    as the scores of a single head. groups: the most groups of a request.
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
