"""The buffers of decode steps: making them, and copying a `LayerState` into and out of them.

A ring stores the token at position t of its row in slot ``t % W``.
Shapes: B rows, K KV heads, M entries, W ring slots, N columns, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.caches.token_store import new_store, read_tokens, write_tokens
from condense.methods import NO_FIRST, FirstEntries, Method, Recall, entry_bias
from condense.ops import StepSettings, StepState
from condense.ops.recall import RecallState
from condense.ops.tensors.bias import per_entry
from condense.ops.tensors.per_row import PerRow, as_rows, max_row, min_row
from condense.state import LayerState, num_entries

# the buffers that a decode step changes in place: `RecallState` for `condense.Recall`, `StepState` for other methods
Buffers = StepState | RecallState


def empty_buffers(k: Tensor, v: Tensor, M: int, W: int, Q: int, settings: StepSettings) -> StepState:
    """Buffers full of zeros, with rows, heads, widths, dtype and device of k ``[B, K, L, D]`` and v; Q query slots.

    settings: how entries are kept, and whether they have biases of their own.
    """
    (B, K, _, D), Dv, form = k.shape, v.shape[3], settings.entry_format
    widths, matched = [form.width(x, k.itemsize) for x in (D, Dv)], settings.matched
    entries = [k.new_zeros(B, K, M, width, dtype=form.dtype(k.dtype)) for width in widths]
    buffers = [*entries, *(k.new_zeros(B, K, *size) for size in ((W, D), (W, Dv), (Q, D)))]
    numbers = [torch.zeros(B, *size, dtype=torch.int64, device=k.device) for size in ((), (2,))]
    arrived = torch.zeros(B, K + 1, dtype=torch.int32, device=k.device)
    biases = k.new_zeros(B, K, M if matched else 0, 1, dtype=torch.promote_types(k.dtype, torch.float32))
    return StepState._make([*buffers, *numbers, arrived, biases])


def empty_recall_buffers(method: Recall, k: Tensor, v: Tensor, M: int, W: int, *, stored: int, Q: int) -> RecallState:
    """As `empty_buffers`, with room for M groups, the tokens of ``stored`` groups, and the slots of a store.

    Raises ValueError, no memory taken, for widths that the index or the store cannot hold, and RuntimeError as
    `condense.caches.token_store.new_store` does.
    """
    (B, K, _, D), Dv, g = k.shape, v.shape[3], method.group_size
    index, S = method.index_settings, method.store_slots
    num_codes, num_grid = index.widths(D)
    codes = k.dtype if index.bits == 16 else torch.uint8
    form = method.store_format
    width, stored_dtype = form.width(D, Dv, k.dtype.itemsize), form.dtype(k.dtype)
    of_entries = method.layout.entry_format
    entry_widths = [of_entries.width(x, k.itemsize) if method.unchosen == "pool" else 0 for x in (D, Dv)]

    def zeros(columns: int, width: int, dtype: torch.dtype = k.dtype) -> Tensor:
        return k.new_zeros(B, K, columns, width, dtype=dtype)

    return RecallState(
        entries_k=zeros(M, entry_widths[0], of_entries.dtype(k.dtype)),
        entries_v=zeros(M, entry_widths[1], of_entries.dtype(k.dtype)),
        codes=zeros(M, num_codes, codes),
        grid=zeros(M, num_grid, torch.promote_types(k.dtype, torch.float32)),
        store=new_store(k, stored * g, width, stored_dtype, on_host=method.store == "host"),
        ring_k=zeros(W, D),
        ring_v=zeros(W, Dv),
        seen=torch.zeros(B, dtype=torch.int64, device=k.device),
        slots=zeros(S * g, width, stored_dtype),
        held=torch.full((B, K, S), -1, dtype=torch.int32, device=k.device),
        order=torch.arange(S, dtype=torch.int32, device=k.device).repeat(B, K, 1),
        ring_q=zeros(Q, D),
        biases=zeros(*((M, 1) if method.layout.matched else (0, 0)), torch.promote_types(k.dtype, torch.float32)),
    )


def clear_buffers(buffers: Buffers) -> None:
    """Reset buffers in place to the values of new ones.

    Pinned memory keeps its values, because clearing it takes seconds and no kernel reads groups that are not closed.
    """
    for x in buffers:
        if x.device == buffers.seen.device:
            x.zero_()
    if isinstance(buffers, RecallState):
        buffers.held.fill_(-1)
        buffers.order.copy_(torch.arange(buffers.order.shape[2], device=buffers.order.device))


def read_state(
    method: Method,
    buffers: Buffers,
    seen: PerRow,
    first: FirstEntries,
    num_window: int,
    num_queries: int,
    fetched: Tensor | None = None,
) -> LayerState:
    """The state in the buffers, with the newest ``num_window`` tokens and ``num_queries`` queries, or all if fewer.

    seen and first as in `condense.state.LayerState`; fetched: stored tokens, as in
    `condense.caches.token_store.read_tokens`.
    """
    entries, device = max_row(num_entries(method, seen, first.num)), buffers.ring_k.device
    store, counts = _store_of(buffers), [entries * n for n in _columns_per_entry(method, buffers)]
    return LayerState(
        tuple(
            x[:, :, :n] if x is not store else read_tokens(x, n, device, fetched)
            for x, n in zip(buffers.entries, counts, strict=True)
        ),
        newest_columns(buffers.ring_k, seen, num_window),
        newest_columns(buffers.ring_v, seen, num_window),
        newest_columns(buffers.ring_q, seen, num_queries),
        seen,
        first,
    )


def write_state(method: Method, buffers: Buffers, before: LayerState | None, state: LayerState) -> None:
    """Copy ``state`` into buffers that hold the state ``before`` (None: they are empty); of entries, only new ones."""
    first = 0 if before is None else min_row(num_entries(method, before.seen, before.first.num))
    last = max_row(num_entries(method, state.seen, state.first.num))
    if last > first:  # before the first group is pooled, a state has no tensors of the method's own
        for buffer, made, n in zip(buffers.entries, state.entries, _columns_per_entry(method, buffers), strict=True):
            write_tokens(buffer, n * first, made[:, :, n * first : n * last])
    store_newest(buffers.ring_k, state.window_k, state.seen)
    store_newest(buffers.ring_v, state.window_v, state.seen)
    store_newest(buffers.ring_q, state.mean_q, state.seen)
    rows = buffers.seen.shape[0]
    # pageable memory is staged before `copy_` returns, so the host does not wait for the GPU
    buffers.seen.copy_(as_rows(state.seen, rows), non_blocking=True)
    if before is None and state.first.exist:
        assert isinstance(buffers, StepState)
        buffers.first.copy_(torch.stack([as_rows(x, rows) for x in state.first], dim=1), non_blocking=True)


def static_bias(
    method: Method, rows: int, capacity: int, device: torch.device, first: FirstEntries = NO_FIRST
) -> Tensor | None:
    """Bias ``[B, 1, M]`` of entries that begin with ``first``; None if the step derives it from settings."""
    if method.layout.pooling is not None:
        return None
    bias = per_entry(entry_bias(method, capacity, device, first), capacity, device)
    return None if bias is None else bias.expand(rows, 1, capacity).contiguous()


def _columns_per_entry(method: Method, buffers: Buffers) -> tuple[int, ...]:
    """Columns per entry in each of ``buffers.entries``: g in a store of exact tokens, 1 in the others."""
    store = _store_of(buffers)
    return tuple(method.layout.rule.chunk if x is store else 1 for x in buffers.entries)


def _store_of(buffers: Buffers) -> Tensor | None:
    """The store of exact tokens, None in buffers without one."""
    return buffers.store if isinstance(buffers, RecallState) else None


def newest_columns(ring: Tensor, seen: PerRow, limit: int) -> Tensor:
    """The newest ``limit`` columns (at most W) of a ring ``[B, K, W, D]``, in order of position, right-aligned."""
    n = min(limit, ring.shape[2])
    if n == 0:
        return ring[:, :, :0]
    return ring.gather(2, _slots(seen, n, ring).expand(-1, ring.shape[1], -1, ring.shape[3]))


def store_newest(ring: Tensor, columns: Tensor, seen: PerRow) -> None:
    """Store the last W of ``columns`` ``[B, K, N, D]``, whose last one is position ``seen - 1``, in a ring."""
    n = min(ring.shape[2], columns.shape[2])
    if n > 0:
        # columns before a row's first token get negative positions, whose slots no token of the row uses yet
        slots = _slots(seen, n, ring)
        ring.scatter_(2, slots.expand(-1, ring.shape[1], -1, ring.shape[3]), columns[:, :, -n:])


def _slots(seen: PerRow, n: int, ring: Tensor) -> Tensor:
    """Ring slots of the newest n positions, ``[B, 1, n, 1]``."""
    slots = (as_rows(seen, ring.shape[0])[:, None] - n + torch.arange(n)) % ring.shape[2]
    return slots.to(ring.device, non_blocking=True)[:, None, :, None]
