"""Recall's growing cache layer: its state always lies in buffers with spare room, so that when a group closes only that
group is written and no other is copied.

Single tokens are read by `condense.ops.decode_step`, several by `condense.functional.extend`; both write to the
same buffers. Shapes as in `condense.ops.step.state`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from condense.caches.buffers import new_buffers, write_state
from condense.caches.growing import CondensedLayer
from condense.caches.ring import RingState, longer, room_for
from condense.caches.token_store import (
    PinnedCopies,
    check_store,
    fetch_tokens,
    finish_writes,
    longer_store,
    refuse_reorder,
    with_pinned_store,
)
from condense.methods import Method, Recall
from condense.ops import StepState
from condense.ops.step import entry_names, fields_of
from condense.ops.tensors.per_row import PerRow, max_row
from condense.state import LayerState, num_entries


class RecallRing(PinnedCopies, RingState):
    """The buffers of one layer, a `StepState`, which are copied to longer ones when their room is used up.

    A store in host memory has room for a power of two groups, since PyTorch takes pinned memory in powers of two, and
    doubles once that is full; all else grows by 1/32.
    """

    method: Recall

    def _take_memory(self, k: Tensor, v: Tensor, M: int, W: int) -> StepState:
        queries, stored = max(self.settings.num_summary, self._most_queries), self._store_slots(M)
        return new_buffers(k, v, self.settings, entries=M, tokens=W, queries=queries, stored=stored)

    def write(self, before: LayerState, after: LayerState) -> None:
        """Copy in the state ``after``, which `condense.functional.extend` made from ``before``, the buffers' state."""
        self._make_room(after.seen)
        write_state(self.method, self.settings, self.buffers, before, after)
        self._before, self._taken = after.seen, 0
        self.num_window, self.num_queries = after.window_k.shape[2], after.mean_q.shape[2]
        self._steps_left = self._count_steps()

    def crop(self, count: int) -> None:
        """As `RingState.crop`. Slots are emptied: groups that close again may be others."""
        super().crop(count)
        self.buffers = self.buffers._replace(held=torch.full_like(self.buffers.held, -1))

    def map_tensors(self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow]) -> None:
        """Apply ``change`` to all buffers and ``change_number`` to the numbers per row; a pinned store stays pinned."""
        if self.buffers.is_apart:
            finish_writes(self.buffers.seen.device)
        super().map_tensors(change, change_number)
        self.buffers = with_pinned_store(self.buffers)

    def _entry_slots(self, entries: int) -> int:
        slots = super()._entry_slots(entries)
        # no spare room beyond the power of two that a store in host memory takes: one group more would double it
        return slots if self.method.store == "device" else min(slots, self._store_slots(max(entries, room_for(0))))

    def _longer_entries(self, buffers: StepState, slots: int) -> StepState:
        *entries, store = buffers.entries(self.settings)
        tokens = self._store_slots(slots) * self.method.group_size
        if tokens > store.shape[2]:
            store = longer_store(store, tokens, buffers.seen.device)
        new = zip(entry_names(self.settings), (*(longer(x, slots) for x in entries), store), strict=True)
        return buffers._replace(**dict(new))

    def _store_slots(self, groups: int) -> int:
        return groups if self.method.store == "device" else 1 << (groups - 1).bit_length()


class RecallLayer(CondensedLayer):
    """As `CondensedLayer`, for `condense.Recall`.

    Raises ValueError, nothing stored, for keys that the index cannot hold (4 bits and an odd width), and for what
    `condense.caches.token_store.check_store` refuses; RuntimeError where the host cannot pin what a store needs.
    """

    def __init__(self, method: Recall) -> None:
        super().__init__(method)
        self.recall = method

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor, latent_width: int | None = None) -> None:
        """Note the device, once it is clear that tokens like these can be kept."""
        (_, K, _, D), Dv = key_states.shape, value_states.shape[3]
        fields_of(self._settings, K, (D, Dv), key_states.dtype)  # raises ValueError
        check_store(self._settings, key_states, value_states, latent=latent_width or 0)
        super().lazy_initialization(key_states, value_states, latent_width)

    @property
    def host_bytes(self) -> int:
        """Bytes of the store if it is for host memory, which on a CPU is the same memory; else 0."""
        if self._ring is None or self.recall.store == "device":
            return 0
        assert isinstance(self._ring, RecallRing)
        return self._ring.buffers.store.nbytes

    def fetch(self) -> Tensor | None:
        """Begin to copy the stored tokens to the device, for the next `read`; None if there is nothing to copy."""
        if self._ring is None:
            return None
        assert isinstance(self._ring, RecallRing)
        tokens = max_row(num_entries(self.method, self._ring.seen)) * self.recall.group_size
        return fetch_tokens(self._ring.buffers.store, tokens, self._ring.buffers.seen.device)

    def _before(self, fetched: Tensor | None) -> LayerState | None:
        if self._ring is None:
            return None
        if not self._ring.is_writable:
            self._map_tensors(torch.clone)
        # autograd may keep what attention reads, and later tokens are written to the buffers in place
        return self._ring.state(fetched) if torch.is_grad_enabled() else self._ring.view(fetched)

    def _keep(self, method: Method, before: LayerState | None, after: LayerState, latent: int) -> None:
        if before is None:
            self._ring = RecallRing(method, self._settings, after, latent)
        else:
            assert isinstance(self._ring, RecallRing)
            self._ring.write(before, after)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of ``beam_idx`` (int ``[B]``). Raises ValueError for a store in host memory."""
        refuse_reorder(self.recall)
        super().reorder_cache(beam_idx)

    def offload(self) -> None:
        """Move the state to the CPU. Raises ValueError for a store that is there already."""
        if self.recall.store == "host":
            raise ValueError(
                "offloaded caches move all layers to the CPU and back, and store='host' keeps most of them there: "
                "leave cache_implementation unset, or use store='device'"
            )
        super().offload()
