"""The slots of pages that requests read and write, found from their lengths alone; and those of the sums of values of
whole groups, in pages of the window.

Every sum is the one before it plus a group's, in this order, however a request's tokens come. So on a CPU all have the
same bits; on a GPU too where float64 rounds nothing, as with most numbers of 16 bits.

Shapes: R requests, B rows of a call, n groups that new tokens complete in any row at most, m in all rows, g tokens per
group.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.step.pages import PagedState
from condense.ops.step.settings import StepSettings
from condense.ops.tensors.per_row import PerRow


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


class CallSums(NamedTuple):
    """The sums that the queries of a call see, 1 + n of a row: those up to the first that is not whole before the new
    tokens, then those that these complete.

    first: number of groups in a row's first sum, of several rows int64 on the CPU ``[B]``; exists: bool ``[B, 1, 1]``,
    False where it is 0. counts: tokens in each sum, at least 1, int64 ``[B, 1, 1 + n, 1]``. base: slots ``[B, g]`` that
    hold a row's first sum. tokens: slots ``[B, n * g]`` of the groups of the others. Rows with fewer sums repeat one.
    made, slots: row and number of each sum that new tokens complete, and the slots ``[m * g]`` that are to hold them.
    """

    first: PerRow
    exists: Tensor
    counts: Tensor
    base: Slots
    tokens: Slots
    made: tuple[Tensor, Tensor]
    slots: Slots


def sums_of(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> CallSums:
    """The sums of requests that share a call."""
    g, size = settings.rule.chunk, state.window.slots
    first = [r.before // g for r in requests]
    counts = [r.seen // g - begin for r, begin in zip(requests, first, strict=True)]
    numbers = [(r.row, r.seen, *x) for r, *x in zip(requests, first, counts, strict=True)]
    row, seen, begin, count = on_device(numbers, state)[..., None]

    def steps(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=row.device)

    n = max(counts)
    position = torch.minimum(begin * g + steps(-g, n * g), seen - 1).clamp(min=0)
    which, own = spread(count[:, 0], sum(counts))
    token = ((begin[which, 0] + own)[:, None] * g + steps(0, g)).flatten()
    in_sums = ((begin + steps(0, n + 1)) * g).clamp(min=1)[:, None, :, None]
    base, tokens = Slots.of(row, position[:, :g], size), Slots.of(row, position[:, g:], size)
    slots = Slots.of(row[which, 0].repeat_interleave(g), token, size)
    rows = torch.tensor(first, device="cpu") if len(first) > 1 else first[0]
    return CallSums(rows, (begin > 0)[..., None], in_sums, base, tokens, (which, own + 1), slots)


def num_passes(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> int:
    """Number of times that sums are written until each was added to a final one: a request may begin with a prefix that
    another request completes in the same step, and that one with a prefix of a third.

    Requests share whole pages of entries. Only the tables on the device say whether they do, so all that may are
    counted.
    """
    page = state.entries.slots * settings.rule.chunk
    passes: dict[Request, int] = {}
    for r in sorted(requests, key=lambda r: r.before):
        behind = [n for a, n in passes.items() if a.before < r.before <= a.seen] if r.before % page == 0 else []
        passes[r] = 1 + max(behind, default=0)
    return max(passes.values())
