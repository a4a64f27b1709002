"""A number for each row of a batch: one Python int if all rows agree, else a tensor.

Without padding all rows agree, so a decode step computes with ints, which ``torch.compile`` takes as constants, and no
tensor is made, moved or read. Plain ``+ - * // %`` and comparisons work on ints and tensors.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

# an int for all rows, or int64 CPU ``[B]``
PerRow = int | Tensor
IntT = TypeVar("IntT", int, Tensor, PerRow)


def int_if_equal(x: PerRow) -> PerRow:
    """The int that all rows of x (int64 CPU ``[B]``) have, or x itself if they differ."""
    if isinstance(x, Tensor):
        least, most = (int(end) for end in x.aminmax())
        return least if least == most else x
    return x


def at_least(x: IntT, bound: int) -> IntT:
    """``max(x, bound)`` for every row."""
    return x.clamp(min=bound) if isinstance(x, Tensor) else max(x, bound)


def at_most(x: IntT, bound: int) -> IntT:
    """``min(x, bound)`` for every row."""
    return x.clamp(max=bound) if isinstance(x, Tensor) else min(x, bound)


def larger(x: PerRow, y: PerRow) -> PerRow:
    """The larger of two numbers for every row."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.maximum(torch.as_tensor(x, device="cpu"), torch.as_tensor(y, device="cpu"))
    return max(x, y)


def min_row(x: PerRow) -> int:
    """The smallest number of any row."""
    return int(x.min()) if isinstance(x, Tensor) else x


def max_row(x: PerRow) -> int:
    """The largest number of any row."""
    return int(x.max()) if isinstance(x, Tensor) else x


def map_rows(function: Callable[[int], int], x: PerRow) -> PerRow:
    """``function`` applied to every row's number."""
    return torch.tensor([function(n) for n in x.tolist()], device="cpu") if isinstance(x, Tensor) else function(x)


def comparable(x: PerRow) -> int | tuple[int, ...]:
    """x in a form that ``==`` compares as a whole: an int, or a tuple of all rows' numbers."""
    return tuple(x.tolist()) if isinstance(x, Tensor) else x


def broadcast_rows(x: PerRow, ndim: int, device: torch.device | None = None) -> PerRow:
    """x as an int, or as ``[B, 1, ...]`` of ``ndim`` dimensions on the device, to broadcast against ``[B, ...]``."""
    if not isinstance(x, Tensor):
        return x
    # `to` copies pageable memory before it returns: x may change afterwards, and the host does not wait for the GPU
    return x.reshape(-1, *(1,) * (ndim - 1)).to(device, non_blocking=True)


def as_rows(x: PerRow, num_rows: int) -> Tensor:
    """The number of every row, int64 CPU ``[B]``."""
    return x if isinstance(x, Tensor) else torch.full((num_rows,), x, dtype=torch.int64, device="cpu")
