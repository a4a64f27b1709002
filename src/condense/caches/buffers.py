"""The buffers of decode steps: copying a `LayerState` into and out of them.

Shapes: B rows, K KV heads, M entries, W ring slots, N columns, D width.
"""

from typing import Any

import torch
from torch import Tensor

from condense.caches.store import Store, finish_writes, with_pinned_store
from condense.methods import FirstEntries, Method
from condense.ops.tensors.per_row import PerRow, as_rows, max_row, min_row
from condense.ops.tensors.right_aligned import newest
from condense.ops.tensors.ring import newest_columns, store_newest
from condense.state import LayerState, num_entries

# sizes of growing buffers are multiples of this, as Triton compiles kernels anew for sizes that 16 does not divide
BLOCK = 16


def room_of(method: Method, entries: int, tokens: int) -> tuple[int, int]:
    """Columns for ``entries`` entries, and for the ring, which holds as many of ``tokens`` tokens as the method needs.

    A method that chooses groups gets whole blocks of entries, at least one: see `condense.ops.step.empty_state`.
    """
    layout, rule = method.layout, method.layout.rule
    N = max(1, tokens) if rule.window is None else min(max(1, tokens), rule.window + rule.chunk)
    return entries if layout.choice is None else whole_blocks(max(1, entries)), N


def whole_blocks(slots: int) -> int:
    """The number of slots, rounded up to a multiple of `BLOCK`."""
    return -(-slots // BLOCK) * BLOCK


class Buffered:
    """Mixin for classes that keep a layer's state in ``buffers``: reads the state from them and writes it to them.

    A store in pinned host memory is pinned in copies and unpickled objects too.
    """

    method: Method
    store: Store
    buffers: Any

    def __getstate__(self) -> dict[str, Any]:
        finish_writes(self.buffers)
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.buffers is not None:
            self.buffers = with_pinned_store(self.buffers)

    def _read_state(self, seen: PerRow, first: FirstEntries, num_window: int, num_queries: int) -> LayerState:
        """The state in the buffers, with the newest ``num_window`` tokens and ``num_queries`` queries, or all if fewer.

        seen and first as in `condense.state.LayerState`.
        """
        buffers, entries = self.buffers, max_row(num_entries(self.method, seen, first.num))
        settings, sums = self.store.settings, self.buffers.sums
        if settings.sees_rest:  # sums up to the one of all whole groups
            sums = newest_columns(sums, seen // settings.rule.chunk + 1, sums.shape[2])
        held = tuple(
            self.store.read(x, entries * n, buffers.seen.device) if x is buffers.store else x[:, :, : entries * n]
            for x, n in self._entries()
        )
        window_k, window_v = (newest_columns(ring, seen, num_window) for ring in (buffers.ring_k, buffers.ring_v))
        queries = newest_columns(buffers.ring_q, seen, num_queries)
        fine = (buffers.fine_k, buffers.fine_v) if settings.coarse is not None else ()
        return LayerState(held, window_k, window_v, queries, sums, seen, first, fine)

    def _write_state(self, before: LayerState | None, state: LayerState) -> None:
        """Write ``state`` to the buffers, which already hold its earlier part ``before`` (None: nothing)."""
        buffers, rows = self.buffers, self.buffers.seen.shape[0]
        new = max_row(state.seen if before is None else state.seen - before.seen)
        first = 0 if before is None else min_row(num_entries(self.method, before.seen, before.first.num))
        last = max_row(num_entries(self.method, state.seen, state.first.num))
        if last > first:  # before the first group is pooled, a state has no tensors of the method's own
            for (buffer, n), made in zip(self._entries(), state.entries, strict=True):
                self.store.write(buffer, n * first, made[:, :, n * first : n * last])
        rings = (buffers.ring_k, state.window_k), (buffers.ring_v, state.window_v), (buffers.ring_q, state.mean_q)
        for ring, columns in rings:
            store_newest(ring, newest(columns, min(new, columns.shape[2])), state.seen)
        if self.store.settings.sees_rest:
            store_newest(buffers.sums, state.sums, state.seen // self.store.settings.rule.chunk + 1)
        for ring, kept in zip((buffers.fine_k, buffers.fine_v), state.fine, strict=False):
            ring.copy_(kept)
        # pageable memory is staged before `copy_` returns, so the host does not wait for the GPU
        buffers.seen.copy_(as_rows(state.seen, rows), non_blocking=True)
        if before is None and state.first.exist:
            buffers.first.copy_(torch.stack([as_rows(x, rows) for x in state.first], dim=1), non_blocking=True)

    def _entries(self) -> list[tuple[Tensor, int]]:
        """The buffers of entries, index and store, each with its columns per entry: g in the store, else 1."""
        settings, store = self.store.settings, self.buffers.store
        return [(x, settings.rule.chunk if x is store else 1) for x in self.buffers.entries(settings)]
