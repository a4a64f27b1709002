"""Rings of columns: that of number t of its row stands in slot ``t % W``.

Shapes: B rows, K KV heads, W slots, N columns, D width.
"""

import torch
from torch import Tensor

from condense.ops.tensors.per_row import PerRow, as_rows


def newest_columns(ring: Tensor, seen: PerRow, limit: int) -> Tensor:
    """The newest ``limit`` columns (at most W) of a ring ``[B, K, W, D]``, in order of position, right-aligned."""
    n = min(limit, ring.shape[2])
    if n == 0:
        return ring[:, :, :0]
    return ring.take_along_dim(_slots(seen, n, ring), 2)


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
