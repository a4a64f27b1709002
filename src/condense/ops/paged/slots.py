"""The slots of pages that requests read and write, found from their lengths alone.

Shapes: R requests.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.step.pages import PagedState


class Request(NamedTuple):
    """One request: its row in the tables, its new tokens ``[start, stop)`` among all, the tokens that it then has."""

    row: int
    start: int
    stop: int
    seen: int

    @property
    def num(self) -> int:
        """Number of new tokens."""
        return self.stop - self.start

    @property
    def before(self) -> int:
        """Number of tokens read before."""
        return self.seen - self.num


class Slots(NamedTuple):
    """Slots of pages: row and column of the page in the tables, slot in the page; int64 of any one shape."""

    row: Tensor
    column: Tensor
    slot: Tensor

    @classmethod
    def of(cls, row: Tensor, number: Tensor, size: int) -> Self:
        """Slots by their numbers in a request. size: slots of a page."""
        return cls(row, number // size, number % size)


def on_device(numbers: Sequence[tuple[int, ...]], state: PagedState) -> Tensor:
    """Numbers of each request, int64 ``[numbers, R]``."""
    return torch.tensor(numbers, dtype=torch.int64).T.to(state.window.table.device, non_blocking=True)


def spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of ``total`` things, ``counts`` of each request, its request and its number among those of it."""
    which = torch.repeat_interleave(counts, output_size=total)
    return which, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[which]
