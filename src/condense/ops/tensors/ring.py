"""Rings of columns: a row's column number t stands in slot ``t % W``.

Shapes: B rows, K KV heads, W slots, N columns, D width.
"""

import torch
from torch import Tensor

from condense.ops.tensors.per_row import PerRow
from condense.ops.tensors.right_aligned import newest


def read_columns(ring: Tensor, start: Tensor, count: int) -> Tensor:
    """The ``count`` columns from number ``start`` ``[B]`` on, ``[B, K, count, D]``."""
    return ring.take_along_dim(_slots(ring, start, count), 2)


def write_columns(ring: Tensor, start: Tensor, new: Tensor, chosen: Tensor) -> None:
    """Write ``new`` ``[B, K, N, D]`` from number ``start`` ``[B]`` on, in the ``chosen`` rows only."""
    index = _slots(ring, start, new.shape[2]).expand_as(new)
    ring.scatter_(2, index, torch.where(chosen[:, None, None, None], new, ring.gather(2, index)))


def newest_numbers(last: Tensor, ring: Tensor) -> Tensor:
    """The number of the column in each slot of a ring, ``[B, W]``, negative if empty; last: the newest one's number."""
    W = ring.shape[2]
    return last[:, None] - (last[:, None] - torch.arange(W, device=ring.device)) % W


def newest_columns(ring: Tensor, seen: PerRow, limit: int) -> Tensor:
    """A copy of the newest ``limit`` columns (at most W) of a ring ``[B, K, W, D]``, by position, right-aligned."""
    n = min(limit, ring.shape[2])
    if n == 0:
        return ring[:, :, :0]
    return read_columns(ring, seen - n, n) if isinstance(seen, Tensor) else torch.cat(_parts(ring, seen, n), 2)


def store_newest(ring: Tensor, columns: Tensor, seen: PerRow) -> None:
    """Store the last W of ``columns`` ``[B, K, N, D]``, whose last one is position ``seen - 1``, in a ring."""
    n = min(ring.shape[2], columns.shape[2])
    if n == 0:
        return
    new = newest(columns, n)
    # columns before a row's first token get negative positions, whose slots no token of the row uses yet
    if isinstance(seen, Tensor):
        ring.scatter_(2, _slots(ring, seen - n, n).expand_as(new), new)
        return
    for part in _parts(ring, seen, n):
        part.copy_(new[:, :, : part.shape[2]])
        new = new[:, :, part.shape[2] :]


def _parts(ring: Tensor, seen: int, n: int) -> list[Tensor]:
    """Views of the newest n of ``seen`` columns: the part up to the ring's end, and the part from its beginning."""
    start = (seen - n) % ring.shape[2]
    return [ring[:, :, start : start + n], ring[:, :, : max(0, start + n - ring.shape[2])]]


def _slots(ring: Tensor, start: Tensor, count: int) -> Tensor:
    """Slots of ``count`` columns from number ``start`` ``[B]`` on, ``[B, 1, count, 1]`` on the device of the ring."""
    slots = (start[:, None] + torch.arange(count, device=start.device)) % ring.shape[2]
    return slots.to(ring.device, non_blocking=True)[:, None, :, None]
