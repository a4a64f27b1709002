"""What stands in the buffers of decode steps, and how it gets there and back.

A ring holds the token at position t of its row in slot ``t % W``.
Shapes: B rows, K KV heads, M prefix entries, W ring slots, N columns, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.functional import Past, num_entries
from condense.methods import Method
from condense.ops import StepState
from condense.ops.tensors.per_row import PerRow, as_rows, max_row, min_row
from condense.ops.tensors.right_aligned import per_entry


def empty_state(k: Tensor, v: Tensor, M: int, W: int, Q: int) -> StepState:
    """Buffers for rows, heads, widths, dtype and device of k ``[B, K, L, D]`` and v, with nothing in them."""
    (B, K, _, D), Dv = k.shape, v.shape[3]
    buffers = [k.new_zeros(B, K, *size) for size in ((M, D), (M, Dv), (W, D), (W, Dv), (Q, D))]
    numbers = [torch.zeros(B, *size, dtype=torch.int64, device=k.device) for size in ((), (3,))]
    arrived = torch.zeros(B, K + 1, dtype=torch.int32, device=k.device)
    return StepState._make([*buffers, *numbers, arrived])


def read_past(method: Method, state: StepState, seen: PerRow, origin: PerRow, num_band: int, num_queries: int) -> Past:
    """What the buffers hold, in order: the newest tokens and queries, at most so many. seen and origin as in `Past`."""
    num_prefix = max_row(num_entries(method, seen, origin))
    return Past(
        state.entries_k[:, :, :num_prefix],
        state.entries_v[:, :, :num_prefix],
        newest_columns(state.ring_k, seen, num_band),
        newest_columns(state.ring_v, seen, num_band),
        newest_columns(state.ring_q, seen, num_queries),
        seen,
        origin,
    )


def write_past(method: Method, state: StepState, before: Past | None, past: Past) -> None:
    """Bring the buffers from what they held ``before``, None for nothing, to the past."""
    first = 0 if before is None else min_row(num_entries(method, before.seen, before.origin))
    last = max_row(num_entries(method, past.seen, past.origin))
    state.entries_k[:, :, first:last].copy_(past.entries_k[:, :, first:last])
    state.entries_v[:, :, first:last].copy_(past.entries_v[:, :, first:last])
    for ring, columns in zip(state[2:5], past[2:5], strict=True):
        store_newest(ring, columns, past.seen)
    rows = state.seen.shape[0]
    # from pageable memory: staged before the call returns, and no wait for the GPU
    state.seen.copy_(as_rows(past.seen, rows), non_blocking=True)
    if before is None and method.reads_prompt:
        write_prompt(method, state, past.origin)


def write_prompt(method: Method, state: StepState, origin: PerRow) -> None:
    """Remember prompts of ``origin`` tokens that were read at once."""
    numbers = (origin, method.prompt_entries(origin), method.num_focal_of_prompt(origin))
    rows = state.prompt.shape[0]
    state.prompt.copy_(torch.stack([as_rows(x, rows) for x in numbers], dim=1), non_blocking=True)


def entry_bias(method: Method, rows: int, capacity: int, device: torch.device, origin: PerRow = 0) -> Tensor | None:
    """Bias ``[B|1, 1, M]`` of entries after prompts of ``origin`` tokens; None: there is none, or a plan tells it."""
    if method.pooling is not None:
        return None
    bias = per_entry(method.prefix_bias(capacity, device, origin), capacity, device)
    if bias is None or not method.reads_prompt:
        return bias
    return bias.expand(rows, 1, capacity).contiguous()


def newest_columns(ring: Tensor, seen: PerRow, limit: int) -> Tensor:
    """The newest columns of a ring ``[B, K, W, D]`` in order, right-aligned: all there are, at most ``limit``."""
    n = min(limit, ring.shape[2])
    if n == 0:
        return ring[:, :, :0]
    return ring.gather(2, _slots(seen, n, ring).expand(-1, ring.shape[1], -1, ring.shape[3]))


def store_newest(ring: Tensor, columns: Tensor, seen: PerRow) -> None:
    """The last of ``columns`` ``[B, K, N, D]``, which end at position ``seen - 1`` of each row, into a ring."""
    n = min(ring.shape[2], columns.shape[2])
    if n > 0:
        # what stands before a row's start goes to slots of its own and is never seen
        slots = _slots(seen, n, ring)
        ring.scatter_(2, slots.expand(-1, ring.shape[1], -1, ring.shape[3]), columns[:, :, -n:])


def _slots(seen: PerRow, n: int, ring: Tensor) -> Tensor:
    """Ring slots of the newest n positions, ``[B, 1, n, 1]``."""
    slots = (as_rows(seen, ring.shape[0])[:, None] - n + torch.arange(n)) % ring.shape[2]
    return slots.to(ring.device, non_blocking=True)[:, None, :, None]
