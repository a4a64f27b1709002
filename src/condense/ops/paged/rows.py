"""The requests of a step that are read as rows: which of them share a call, and where their tokens and entries lie.

This follows from lengths, which the host knows, so nothing waits for the device; all layers of a step share it.

Shapes: B rows of a call, L queries, N window tokens, G groups of g tokens, T new tokens, n groups that are made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.paged.slots import CallSums, Request, Slots, num_passes, on_device, spread, sums_of
from condense.ops.spans import RuleSpans
from condense.ops.step.pages import NewTokens, PagedState
from condense.ops.step.settings import StepSettings
from condense.ops.tensors.per_row import PerRow
from condense.ops.types import SummarySpans

# most tokens of all rows that share a call, padding included
TOGETHER = 2**15
# a call may have at most this many more queries of padding than real ones
_PADDING = 2**12


class Summary(NamedTuple):
    """The queries that weigh the groups which a call makes due. tail: slots ``[B, Q]`` in the ring of the mean queries
    before the new ones, None for none. made: row and number of each such group; None if the call has one row.
    """

    spans: SummarySpans
    tail: Slots | None
    made: tuple[Tensor, Tensor] | None


class Call(NamedTuple):
    """Requests that are read in one call, as right-aligned rows.

    queries: number of each query among all new tokens, int64 ``[B, L]``, any number for padding; a slice for one
    request. real: row, column and number of each query that is not padding, int64; None for one request. window: slots
    ``[B, N]`` of the newest tokens; None if all tokens of the requests are new, and so the queries' tokens are the
    window. entries: slots ``[B, G]``. Rows with fewer tokens or entries repeat one. exact: queries see the stored
    tokens of all groups. summary, sums: None if the call needs none.
    """

    queries: Tensor | slice
    real: tuple[Tensor, Tensor, Tensor] | None
    spans: RuleSpans
    window: Slots | None
    entries: Slots
    exact: bool
    summary: Summary | None
    sums: CallSums | None


class DueGroups(NamedTuple):
    """The n groups that new tokens make due. tokens: slots ``[1, n * g]`` of their tokens. entries: slots ``[n]``.

    For each group, row: its request's row of the tables, int64. seen: tokens of the request up to the group's last
    token, int32. last: number of that token among all new tokens, int64, right if ``summary_delay`` is 0.
    """

    tokens: Slots
    entries: Slots
    row: Tensor
    seen: Tensor
    last: Tensor


class Reading(NamedTuple):
    """The requests of a step. new: their new tokens among all. window: slots ``[T]`` of their new tokens.

    made: the groups that are due, in the order of the calls; None if there are none. newest: numbers, among all new
    tokens, of the tokens whose mean queries the ring keeps, and their slots; None without a ring. passes: how often
    sums are written (`num_passes`); 0 without sums.
    """

    new: slice
    window: Slots
    made: DueGroups | None
    newest: tuple[Tensor, Slots] | None
    calls: tuple[Call, ...]
    passes: int


def reading_of(new: NewTokens, first: int, state: PagedState, settings: StepSettings) -> Reading | None:
    """The requests from ``first`` on that have new tokens; None if there are none."""
    starts = zip(new.starts, new.starts[1:], strict=False)
    spans = zip(range(len(new.seen)), starts, new.seen, strict=True)
    requests = [Request(row, *ends, seen) for row, ends, seen in spans if row >= first and ends[0] < ends[1]]
    if not requests:
        return None
    together = calls_of(requests, singles_apart=settings.reads_otherwise)
    row, start, before, num = on_device([(r.row, r.start, r.before, r.num) for r in requests], state)
    which, own = spread(num, sum(r.num for r in requests))
    newest = None
    if state.ring is not None:
        kept = num.clamp(max=settings.num_summary)
        of, number = spread(kept, sum(min(r.num, settings.num_summary) for r in requests))
        number = number + (num - kept)[of]
        # a request has one page in the ring, so slots count from its beginning
        newest = start[of] + number, Slots.of(row[of], (before[of] + number) % state.ring.slots, state.ring.slots)
    window = Slots.of(row[which], before[which] + own, state.window.slots)
    made = _made([r for call in together for r in call], state, settings)
    calls = tuple(_call(call, state, settings) for call in together)
    passes = num_passes(requests, state, settings) if settings.sees_rest else 0
    return Reading(slice(requests[0].start, requests[-1].stop), window, made, newest, calls, passes)


def calls_of(requests: Sequence[Request], *, singles_apart: bool = False) -> list[list[Request]]:
    """Lists of requests that share a call: of like lengths, within the bounds on padding and memory.

    singles_apart: requests with one new token share no call with requests that have more.
    """
    calls: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: (r.num, r.seen), reverse=True):
        call = next((call for call in calls if _fits([*call, request], singles_apart)), None)
        if call is None:
            calls.append([request])
        else:
            call.append(request)
    return calls


def _fits(call: Sequence[Request], singles_apart: bool) -> bool:
    """True if these requests, in falling order of their numbers of new tokens, may share a call."""
    if singles_apart and call[0].num > 1 and call[-1].num == 1:
        return False
    is_alike = len(call) * call[0].num <= 2 * sum(r.num for r in call) + _PADDING
    return is_alike and len(call) * max(r.seen for r in call) <= TOGETHER


def _call(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> Call:
    rule, B = settings.rule, len(requests)
    seen, num = (torch.tensor(x, device="cpu") for x in ([r.seen for r in requests], [r.num for r in requests]))
    oldest = rule.closed(seen - num + 1) * rule.chunk
    visible = rule.visible_entries(rule.closed(seen))
    L, is_new = int(num.max()), torch.equal(seen, num)
    N = L if is_new else int((seen - oldest).max())
    starts: tuple[PerRow, PerRow, PerRow] = seen - L, seen - N, L - num
    if B == 1:
        # ints reach kernels without a copy, and let tiles of queries begin where queries begin to share a choice
        starts = int(seen) - L, int(seen) - N, 0
    spans, exact = RuleSpans(rule, *starts), settings.reads_exactly and L > 1
    if exact:
        # a store of 16 bits holds the same numbers as the window, which is enough if the window holds all tokens
        window_alone = settings.store_format.bits == 16 and not oldest.any()
        spans = spans.of_tokens(window_alone=window_alone)
        visible = visible * (not window_alone)
    G = int(visible.max())
    # a row without entries repeats an entry of the row that has the most
    most = requests[int(visible.argmax())].row
    rows = [
        (r.row, r.start, r.stop, r.seen, begin, count, r.row if count else most)
        for r, begin, count in zip(requests, oldest.tolist(), visible.tolist(), strict=True)
    ]
    row, start, stop, end, begin, count, lender = on_device(rows, state)[..., None]

    def columns(num: int) -> Tensor:
        return torch.arange(num, device=row.device)

    queries: Tensor | slice = slice(requests[0].start, requests[0].stop)
    real = None
    if B > 1:
        queries = (stop - L + columns(L)).clamp(min=0)
        which, own = spread((stop - start)[:, 0], int(num.sum()))
        real = which, (L - stop + start)[which, 0] + own, start[which, 0] + own
    window = None
    if not is_new:
        # a row whose window is empty repeats its last token
        position = torch.minimum(torch.maximum(end - N + columns(N), begin), end - 1)
        window = Slots.of(row, position, state.window.slots)
    group = torch.minimum(columns(G), (count - 1).clamp(min=0)) + settings.summary_delay // rule.chunk
    entries = Slots.of(lender, group, state.entries.slots)
    summary = _summary(requests, state, settings) if settings.num_summary > 0 else None
    sums = sums_of(requests, state, settings) if settings.sees_rest else None
    return Call(queries, real, spans, window, entries, exact, summary, sums)


def _summary(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> Summary | None:
    first, counts = _due(requests, settings)
    g, S, B = settings.rule.chunk, settings.num_summary, len(requests)
    if max(counts) == 0:
        return None
    before, seen = (torch.tensor(x, device="cpu") for x in ([r.before for r in requests], [r.seen for r in requests]))
    start = (torch.tensor(first, device="cpu") + 1) * g + settings.summary_delay - S
    spans = SummarySpans(start, before, seen, max(counts), S, g)
    row, end, count = on_device([(r.row, r.before, n) for r, n in zip(requests, counts, strict=True)], state)
    Q, tail = int((before - start).max()), None
    if state.ring is not None and Q > 0:
        slot = (end[:, None] - Q + torch.arange(Q, device=end.device)) % state.ring.slots
        tail = Slots.of(row[:, None], slot, state.ring.slots)
    return Summary(spans, tail, spread(count, sum(counts)) if B > 1 else None)


def _due(requests: Sequence[Request], settings: StepSettings) -> tuple[list[int], list[int]]:
    """The number of the first group that each request's new tokens make due, and how many they make due."""
    rule, delay = settings.rule, settings.summary_delay
    first = [rule.pooled(r.before, delay) for r in requests]
    return first, [rule.pooled(r.seen, delay) - begin for r, begin in zip(requests, first, strict=True)]


def _made(requests: Sequence[Request], state: PagedState, settings: StepSettings) -> DueGroups | None:
    """The groups that new tokens of these requests make due, None if there are none."""
    first, counts = _due(requests, settings)
    if sum(counts) == 0:
        return None
    g, shift = settings.rule.chunk, settings.summary_delay // settings.rule.chunk
    numbers = [(r.row, r.start - r.before, *x) for r, *x in zip(requests, first, counts, strict=True)]
    row, start, begin, count = on_device(numbers, state)
    which, own = spread(count, sum(counts))
    group, row = begin[which] + own, row[which]
    position = (group[:, None] * g + torch.arange(g, device=row.device)).flatten()
    tokens = Slots.of(row.repeat_interleave(g)[None], position[None], state.window.slots)
    entries, seen = Slots.of(row, group + shift, state.entries.slots), (group + 1) * g
    return DueGroups(tokens, entries, row, seen.int(), start[which] + seen - 1)
