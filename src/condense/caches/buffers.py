"""What stands in a static layer's buffers, and how it gets there.

A ring holds the token at position t of its row in slot ``t % W``.
Shapes: B rows, K KV heads, M prefix entries, W ring slots, N columns, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.methods import Method
from condense.ops.aligned import per_entry
from condense.ops.rows import PerRow, spread


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
    slots = (spread(seen, ring.shape[0])[:, None] - n + torch.arange(n)) % ring.shape[2]
    return slots.to(ring.device, non_blocking=True)[:, None, :, None]
