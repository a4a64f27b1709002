"""A growing cache in buffers that decode steps change in place: one operation, no copy, no wait for the device.

The buffers have spare room and are copied to larger ones when it is used up. The rings keep as much as
`condense.functional.extend` does: `condense.state.SLACK` tokens and queries more than a step needs, so that as
many can be taken back. Shapes as in `condense.ops.step.state`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.caches.buffers import Buffered, whole_blocks
from condense.caches.store import Store, finish_writes, with_pinned_store
from condense.methods import FirstEntries, Method
from condense.ops import NO_EXTRAS, Extras, NewToken, StepCall, StepState, decode_step
from condense.ops.step import StateSizes, empty_state, entry_names
from condense.ops.tensors.per_row import PerRow, int_if_equal, larger, max_row, min_row
from condense.state import SLACK, LayerState, fine_slots, kept_sums, num_entries

if TYPE_CHECKING:
    from condense.ops.triton.ring_step import PreparedStep


def room_for(needed: int) -> int:
    """Buffer size: ``needed`` plus 1/32, in whole blocks."""
    return whole_blocks(needed + needed // 32 + 1)


class RingState(Buffered):
    """The buffers of one layer and numbers about them on the host; always for `condense.Recall`, else while decoding.

    Buffers grow by 1/32, a store in host memory by a quarter, because it takes long to pin.
    first: as in `condense.state.LayerState`. num_window, num_queries: columns that `state` returns.
    """

    def __init__(self, method: Method, store: Store, state: LayerState, latent: int) -> None:
        """Copy a state into new buffers; latent: width of the latents in its keys (`Method.for_latents`), else 0."""
        self.method, self.store, self.settings, self.latent = method, store, store.settings, latent
        settings = store.settings
        rule, S = settings.rule, settings.num_summary
        self.num_window, self.num_queries = state.window_k.shape[2], state.mean_q.shape[2]
        self._most_window = sys.maxsize if rule.window is None else whole_blocks(rule.window + rule.chunk + SLACK)
        # with num_summary = 1 the step's own query is the summary, so no query is kept
        self._most_queries = 0 if S <= 1 else S - 1 + SLACK
        self.first = state.first
        # number of groups in the oldest sum that had not been overwritten at the last crop
        self._first_sum: PerRow = 0
        # `seen` is the sum of both; `_taken` counts steps of all rows, so that an ordinary step changes no tensor
        self._before, self._taken = state.seen, 0
        M, W = self._entry_slots(state.entries[0].shape[2]), min(room_for(max_row(state.seen)), self._most_window)
        k, widths = state.window_k, (state.window_k.shape[3], state.window_v.shape[3])
        queries, stored = max(S, self._most_queries), 0 if settings.choice is None else M * rule.chunk
        sums, fine = kept_sums(rule.chunk), fine_slots(method)
        sizes = StateSizes(k.shape[0], k.shape[1], widths, M, W, queries, stored, sums, fine)
        self.buffers = empty_state(k, settings, sizes)
        self.backend = self._backend()
        self._write_state(None, state)
        self._steps_left = self._count_steps()
        # launch arguments of the last step, reused while token layout and buffers stay the same
        self._prepared: PreparedStep | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or pickle, without launch arguments: they are for this object's buffers."""
        return super().__getstate__() | {"_prepared": None}

    @property
    def seen(self) -> PerRow:
        """Real tokens per row, as in `condense.state.LayerState`."""
        return self._before + self._taken

    @property
    def first_sum(self) -> PerRow:
        """Number of groups in each row's oldest sum in the buffers; sums that a crop took back overwrote older ones."""
        return larger(self._first_sum, self.seen // self.settings.rule.chunk + 1 - self.buffers.sums.shape[2])

    def state(self) -> LayerState:
        """A copy of the state, which further steps do not change."""
        state = self.view()
        entries, fine = (tuple(x.clone() for x in kept) for kept in (state.entries, state.fine))
        return state._replace(entries=entries, fine=fine)

    def view(self) -> LayerState:
        """The state, whose entries share memory with the buffers; the next step changes it."""
        return self._read_state(self.seen, self.first, self.num_window, self.num_queries)

    def write(self, before: LayerState, after: LayerState) -> None:
        """Copy in the state ``after``, which `condense.functional.extend` made from ``before``, the buffers' state."""
        self._make_room(after.seen)
        self._write_state(before, after)
        self._before, self._taken = after.seen, 0
        self.num_window, self.num_queries = after.window_k.shape[2], after.mean_q.shape[2]
        self._steps_left = self._count_steps()

    def step(self, token: NewToken, *, scale: float, extras: Extras = NO_EXTRAS) -> Tensor:
        """Run `condense.ops.decode_step` on the buffers; the token's ``real`` is int64 CPU ``[B]``, None: all count."""
        if self._steps_left <= 0:
            self._make_room(self.seen + 1)
        real = token.real
        if real is not None:
            token = token._replace(real=real.to(token.q.device, non_blocking=True))
        out = self._decode(StepCall(token, self.buffers, self.settings, scale, self.latent, extras))
        self._steps_left -= 1
        self.num_window = min(self.num_window + 1, self.buffers.ring_k.shape[2])
        self.num_queries = min(self.num_queries + 1, self._most_queries)
        if real is None:
            self._taken += 1
        else:
            self._before = int_if_equal(self._before + real)
        return out

    def _decode(self, call: StepCall) -> Tensor:
        # a trace or a subclass of tensors needs a torch operation, which a prepared step is not
        can_prepare = not torch.compiler.is_compiling() and type(call.token.q) is Tensor
        if self.backend != "triton" or not can_prepare:
            return decode_step(call, self.method.represent, backend=self.backend)
        if self._prepared is None or not self._prepared.takes(call):
            from condense.ops.triton.step import prepare_step  # Triton may be missing

            self._prepared = prepare_step(call)
        return self._prepared(call.token, call.extras.sink_logits)

    def crop(self, count: int) -> None:
        """Take the newest ``count`` tokens back; the caller has checked that enough tokens, queries, sums are kept.

        Only ``seen`` is lowered: slots of rings past it are overwritten before they are read again.
        """
        self.store.forget()
        if self.settings.sees_rest:
            self._first_sum = self.first_sum
        self._taken -= count
        self.num_window -= count
        self.num_queries = max(0, self.num_queries - count)
        held = torch.full_like(self.buffers.held, -1)
        self.buffers = self.buffers._replace(seen=self.buffers.seen - count, held=held)
        self._steps_left = self._count_steps()

    def map_tensors(self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow]) -> None:
        """Apply ``change`` to all buffers and ``change_number`` to the numbers per row; a pinned store stays pinned."""
        finish_writes(self.buffers)
        self.store.forget()
        self.buffers = with_pinned_store(StepState._make(map(change, self.buffers)))
        self._prepared = None  # it would keep the old buffers alive
        self._before, self.first = change_number(self._before), FirstEntries(*map(change_number, self.first))
        self._first_sum = change_number(self._first_sum)

    @property
    def is_writable(self) -> bool:
        """True if the buffers can be changed in place: those made in inference mode only while it is on."""
        return torch.is_inference_mode_enabled() or not any(x.is_inference() for x in self.buffers)

    def _make_room(self, seen: PerRow) -> None:
        """Enlarge buffers that lack room for ``seen`` tokens per row, with room for more to come."""
        buffers, tokens = self.buffers, max_row(seen)
        entries = max_row(num_entries(self.method, seen, self.first.num))
        if entries > buffers.entries_k.shape[2]:
            M, names = self._entry_slots(entries), [name for name in entry_names(self.settings) if name != "store"]
            enlarged = {name: longer(getattr(buffers, name), M) for name in names}
            enlarged |= self.store.more_slots(buffers, M)
            buffers = buffers._replace(store=self.store.longer(buffers, M), **enlarged)
        # a ring below its final size has never wrapped around: slot t holds position t, so padding the end is enough
        if buffers.ring_k.shape[2] < min(tokens, self._most_window):
            slots = min(room_for(tokens), self._most_window)
            buffers = buffers._replace(ring_k=longer(buffers.ring_k, slots), ring_v=longer(buffers.ring_v, slots))
        if buffers is not self.buffers:
            self._prepared = None  # it would keep the shorter buffers in memory until the next step
            self.buffers = buffers
            self.backend = self._backend()
        self._steps_left = self._count_steps()

    def _backend(self) -> str:
        """The backend of the steps over these buffers."""
        buffers = self.buffers
        return self.store.backend(buffers.ring_k, buffers.ring_v, self.latent, buffers.entries_k.shape[2])

    def _entry_slots(self, entries: int) -> int:
        """Columns to allocate for ``entries`` entries: with spare room, but at most what the rule ever needs."""
        limit, slots = self.settings.rule.max_chunks, room_for(entries)
        return slots if limit is None else min(slots, limit * self.settings.rule.entries + max_row(self.first.num))

    def _count_steps(self) -> int:
        """The number of further steps for which every row has room."""
        (rule, delay), num_tokens = self.method.layout.made, self.buffers.ring_k.shape[2]
        steps = num_tokens - max_row(self.seen) if num_tokens < self._most_window else sys.maxsize
        chunks = (self.buffers.entries_k.shape[2] - self.first.num) // rule.entries
        if rule.max_chunks is not None and min_row(chunks) >= rule.max_chunks:
            return steps
        return min(steps, min_row((chunks + 1) * rule.chunk + delay - 1 - self.seen))


def longer(x: Tensor, slots: int) -> Tensor:
    """A copy of x ``[B, K, n, D]`` with zeros up to column ``slots``."""
    return F.pad(x, (0, 0, 0, slots - x.shape[2]))
