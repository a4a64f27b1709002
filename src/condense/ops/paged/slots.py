"""The slots of pages that requests read and write, found from their lengths alone, and the slots in pages of the window
that hold sums of the values of whole groups.

On a CPU every sum is the one before it plus the values of one group, so sums have the same bits however a request's
tokens come; on a GPU they have them where float64 rounds nothing, as with most numbers of 16 bits.

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
    """One request: its row in the tables, its new tokens ``[start, stop)`` among all, and ``seen``, all its tokens."""

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
    """Slots of pages: row and column of the page in the tables, slot in the page; three int64 tensors of one shape."""

    row: Tensor
    column: Tensor
    slot: Tensor

    @classmethod
    def of(cls, row: Tensor, number: Tensor, size: int) -> Self:
        """Slots by their ``number`` in the request of a ``row``. size: slots of a page."""
        return cls(row, number // size, number % size)


def on_device(numbers: Sequence[tuple[int, ...]], state: PagedState) -> Tensor:
    """Tuples of numbers, one per request, as int64 ``[numbers, R]`` on the device of the state."""
    return torch.tensor(numbers, dtype=torch.int64).T.to(state.window.table.device, non_blocking=True)


def spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The request of each of ``total`` things, and its number within it; request i has ``counts[i]`` of them."""
    which = torch.repeat_interleave(counts, output_size=total)
    return which, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[which]


class CallSums(NamedTuple):
    """The 1 + n sums of values that queries of a row see: of the groups that were whole before the call, then after
    each group that new tokens complete.

    first: groups in a row's first sum, int64 CPU ``[B]``, an int for one row; exists: bool ``[B, 1, 1]``, False where
    ``first`` is 0. counts: tokens in each sum, at least 1, int64 ``[B, 1, 1 + n, 1]``. base: slots ``[B, g]`` that hold
    a row's first sum. tokens: slots ``[B, n * g]`` of the completed groups. Rows with fewer of these repeat one.
    made, slots: row and number of each sum that new tokens complete, and the slots ``[m * g]`` to write it to.
    """

    first: PerRow
    exists: Tensor
    counts: Tensor
    base: Slots
    tokens: Slots
    made: tuple[Tensor, Tensor]
    slots: Slots


def sums_of(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> CallSums:
    """The sums that queries of requests in one call see."""
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
    """Number of times that all sums must be written until each was made from a final one: a request may begin with a
    prefix that another request completes in the same step, and that request with a prefix of a third.

    Requests share whole pages of entries. Which ones do, only tables on the device say, so all that may are counted.
    """
    page = state.entries.slots * settings.rule.chunk
    passes: dict[Request, int] = {}
    for r in sorted(requests, key=lambda r: r.before):
        behind = [n for a, n in passes.items() if a.before < r.before <= a.seen] if r.before % page == 0 else []
        passes[r] = 1 + max(behind, default=0)
    return max(passes.values())
