"""Sources of keys and values, and the span of each source that a query sees.

Attention reads a list of sources under one softmax: entries that stand for groups of tokens, and the window of exact
tokens, which comes last. Query t sees entries ``[lo, hi)`` of each source. Positions count a row's real tokens from 0;
padding sees nothing. From one query to the next, lo and hi of a source never decrease.

Shapes: B rows, K KV heads, L queries, N entries of a source, D and Dv widths. ``B|1`` is 1 if all rows are alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from condense.ops.tensors.per_row import IntT, PerRow, as_rows, at_least, at_most, broadcast_rows, int_if_equal

T = TypeVar("T")


class Source(NamedTuple):
    """Keys and values; each query sees one span of them.

    k ``[B, K, N, D]``, v ``[B, K, N, Dv]``; all sources have one dtype and device. bias is added to the scaled scores
    of its entries: a number for all of them, or float ``[B|1, K|1, N]``; None for none.
    """

    k: Tensor
    v: Tensor
    bias: Tensor | float | None = None


def entry_bias(
    bias: Sequence[float], num_entries: int, device: torch.device, first: tuple[PerRow, PerRow] | None = None
) -> Tensor | float | None:
    """Bias of ``num_entries`` entries, as in `Source`. bias: one number for each entry of a chunk; empty for none.

    first: number of first entries, before those of chunk 0, and how many of them, at the beginning, stand for single
    tokens and have no bias; the rest have that of a chunk's last entry. Both an int or ``[B, 1]`` on the device.
    """
    if not any(bias):
        return None
    if len(set(bias)) == 1 and first is None:
        return bias[0]
    count, single = (0, 0) if first is None else first
    entry = torch.arange(num_entries, device=device)[None]
    place = (entry - count) % len(bias)
    values = torch.zeros_like(place, dtype=torch.float64)
    for i, value in enumerate(bias):  # no tensor of these numbers, which would have to be copied to the device
        if value:
            values = values.masked_fill(place == i, value)
    if first is not None:
        values = values.masked_fill(entry < count, bias[-1]).masked_fill(entry < single, 0.0)
    return values[:, None]


def joined_bias(biases: Sequence[Tensor | float | None], sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """The biases of all sources, ``[B|1, K|1, n]`` for n entries; None if no source has one. sizes: entries of each."""
    if all(bias is None for bias in biases):
        return None
    parts = [
        bias.double()
        if isinstance(bias, Tensor)
        else torch.full((1, 1, size), bias or 0.0, dtype=torch.float64, device=device)
        for bias, size in zip(biases, sizes, strict=True)
    ]
    rows, heads = (max(part.shape[dim] for part in parts) for dim in (0, 1))
    return torch.cat([part.expand(rows, heads, -1) for part in parts], dim=2)


class Span(NamedTuple):
    """Entries ``[lo, hi)`` of one source that each query of a block sees: lo and hi int64 ``[B|1, K|1, L]``."""

    lo: Tensor
    hi: Tensor


class Hull(NamedTuple):
    """The smallest ``[lo, hi)`` of one source that holds the spans of all queries of a block, in all rows and heads."""

    lo: int
    hi: int


class SpanRule(Protocol):
    """The span of each source that a query sees, computed from its position."""

    def spans(self, seen: IntT) -> list[tuple[IntT, IntT]]:
        """``(lo, hi)`` per source for a query that is the last of ``seen`` tokens (an int, or int64 of any shape).

        The last pair, of the window, holds positions of tokens; the others number entries.
        """


@dataclass(frozen=True)
class UniformRule:
    """The rule of closed chunks: ``n(t) = max(0, t + 1 - window) // chunk``; ``entries`` entries stand for each.

    ``window=None``: no chunk ever closes (dense attention). ``max_chunks``: only so many chunks, the first ones, have
    entries (StreamingLLM's sinks; 0 for a window alone).
    """

    chunk: int
    window: int | None
    entries: int = 1
    max_chunks: int | None = None

    def closed(self, seen: IntT) -> IntT:
        """Closed chunks once ``seen`` tokens (int, or int64 of any shape) have been read."""
        if self.window is None:
            return seen * 0
        # divide first, then clamp: in the other order, inductor of torch 2.13 generates code that fails on a CPU
        return at_least((seen - self.window) // self.chunk, 0)

    def pooled(self, seen: IntT, summary_delay: int) -> IntT:
        """Chunks whose entries exist once ``seen`` tokens are read: ``summary_delay`` tokens must follow a chunk."""
        pooled = at_least((seen - summary_delay) // self.chunk, 0)
        return pooled if self.max_chunks is None else at_most(pooled, self.max_chunks)

    def visible_entries(self, closed: IntT) -> IntT:
        """Entries that stand for ``closed`` chunks."""
        if self.max_chunks is not None:
            closed = at_most(closed, self.max_chunks)
        return closed * self.entries

    def spans(self, seen: IntT) -> list[tuple[IntT, IntT]]:
        """Two sources: the entries of closed chunks, and the window from the first chunk that is not closed on."""
        closed = self.closed(seen)
        return [(seen * 0, self.visible_entries(closed)), (closed * self.chunk, seen)]


class RowStart(NamedTuple):
    """The fields query_start, window_start, padding and first_entries of `RuleSpans` for one row, as ints."""

    query: int
    window: int
    padding: int
    first_entries: int


class SharedByLayers:
    """Base of objects that keep what the first layer finds for all others. In a dataclass ``_found`` must come after
    the positional fields, because the compiler of PyTorch 2.11 counts it among them.
    """

    _found: dict[Any, Any]

    def once(self, key: Any, find: Callable[[], T]) -> T:
        """Return what ``find`` returns, called by the first layer that asks under ``key``; all others share it."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


@dataclass(frozen=True)
class RuleSpans(SharedByLayers):
    """Spans by a rule, for rows that start at different positions. All numbers are an int or int64 CPU ``[B]``.

    query_start: query i is at position ``query_start + i``; negative if a row's first queries are padding.
    window_start: position of column 0 of the window; negative if a row's first columns are padding.
    padding: number of queries before a row's first real one; by default those at negative positions.
    first_entries: entries that stand before the rule's own in the first source; all queries see them.
    Tensors whose rows agree become ints. Layers may share the spans: what one has asked for is found once.
    """

    rule: SpanRule
    query_start: PerRow
    window_start: PerRow
    padding: PerRow = None  # type: ignore[assignment]
    first_entries: PerRow = 0
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        padding = at_least(-self.query_start, 0) if self.padding is None else self.padding
        numbers = {"query_start": self.query_start, "window_start": self.window_start, "padding": padding}
        for name, x in (*numbers.items(), ("first_entries", self.first_entries)):
            object.__setattr__(self, name, int_if_equal(x))

    def at(self, start: int, stop: int, device: torch.device) -> list[Span]:
        """Spans of queries ``[start, stop)``, one per source: int64 ``[B|1, 1, L]``."""
        steps = torch.arange(start, stop, device=device)[None, None]
        query_start, window_start, padding, first_entries = (
            broadcast_rows(x, 3, device)
            for x in (self.query_start, self.window_start, self.padding, self.first_entries)
        )
        real = steps >= padding
        *others, (lo, hi) = self.rule.spans(query_start + steps + 1)
        spans = [*others, ((lo - window_start).clamp(min=0), hi - window_start)]
        if others:
            spans[0] = (spans[0][0], spans[0][1] + first_entries)
        return [Span(*(torch.where(real, x, 0) for x in torch.broadcast_tensors(*span))) for span in spans]

    def hulls(self, blocks: Sequence[tuple[int, int]]) -> list[list[Hull]]:
        """For each block ``(start, stop)`` of queries the hull of every source, as ints on the host."""
        # int(): of a length that torch.export keeps dynamic it makes a constant, and torch.export's own error says so
        key = tuple((int(start), int(stop)) for start, stop in blocks)
        return self.once(key, lambda: self._hulls(key))

    def _hulls(self, blocks: Sequence[tuple[int, int]]) -> list[list[Hull]]:
        """`hulls`, from the first and last real query of each block: lo and hi never decrease."""
        if (row := self.same_in_all_rows()) is not None:
            # ints, because a decode step comes here in every layer and one-element tensors are slow
            return [self._hulls_of(row, start, stop - 1) for start, stop in blocks]
        rows = [RowStart(*numbers) for numbers in self.starts().tolist()]
        hulls = []
        for start, stop in blocks:
            of_sources = zip(*(self._hulls_of(row, start, stop - 1) for row in rows), strict=True)
            # a row that sees nothing, as all of its queries are padding, must not lower the start
            ends = [(min((lo for lo, hi in x if hi > 0), default=0), max(hi for _, hi in x)) for x in of_sources]
            hulls.append([Hull(*pair) for pair in ends])
        return hulls

    def same_in_all_rows(self) -> RowStart | None:
        """The `RowStart` of all rows if it is the same, else None."""
        numbers = (self.query_start, self.window_start, self.padding, self.first_entries)
        return None if any(isinstance(x, Tensor) for x in numbers) else RowStart(*numbers)  # type: ignore[arg-type]

    def starts(self) -> Tensor:
        """The numbers of `RowStart` for each row, int64 CPU ``[B, 4]``; ``[1, 4]`` if all agree."""
        numbers = (self.query_start, self.window_start, self.padding, self.first_entries)
        return self.once("starts", lambda: torch.stack(torch.broadcast_tensors(*(as_rows(x, 1) for x in numbers)), 1))

    def of_tokens(self, *, window_alone: bool) -> Self:
        """Spans with which the same queries see all tokens one by one; only for a `UniformRule`.

        The first source then holds the tokens of closed chunks; with window_alone it is empty, and the window has all.
        """
        rule = self.rule
        assert isinstance(rule, UniformRule)
        return replace(self, rule=UniformRule(rule.chunk, None if window_alone else rule.window, entries=rule.chunk))

    def is_causal(self, num_queries: int, num_tokens: int) -> bool:
        """True if query i sees columns ``[0, num_tokens - L + i]`` of the window and nothing else.

        Then rows have no padding, and the window holds them from position 0 on.
        """
        if self.same_in_all_rows() != (num_tokens - num_queries, 0, 0, 0):
            return False
        *others, (lo, _) = self.rule.spans(num_tokens)
        return lo == 0 and all(first >= last for first, last in others)

    def _hulls_of(self, row: RowStart, first: int, last: int) -> list[Hull]:
        """Hulls of the queries ``first`` to ``last`` of one row."""
        begin = self.rule.spans(row.query + max(first, row.padding) + 1)
        end = self.rule.spans(row.query + last + 1)
        if last < row.padding:
            return [Hull(0, 0)] * len(end)
        spans = [(lo, hi) for (lo, _), (_, hi) in zip(begin, end, strict=True)]
        spans[0] = (spans[0][0], spans[0][1] + row.first_entries) if len(spans) > 1 else spans[0]
        spans[-1] = (max(spans[-1][0] - row.window, 0), spans[-1][1] - row.window)
        return [Hull(min(lo, hi), hi) for lo, hi in spans]


@dataclass(frozen=True)
class ArraySpans:
    """Spans given query by query, one per source; every tensor as in `Span`, never decreasing along L."""

    spans: tuple[Span, ...]

    def at(self, start: int, stop: int, device: torch.device) -> list[Span]:
        """Spans of queries ``[start, stop)``."""
        return [Span(*(x[..., start:stop].to(device) for x in span)) for span in self.spans]

    def hulls(self, blocks: Sequence[tuple[int, int]]) -> list[list[Hull]]:
        """Hulls per block; one transfer to the host for all blocks."""
        hulls = []
        for start, stop in blocks:
            for span in self.at(start, stop, self.spans[0].hi.device):
                end = span.hi.amax()
                first = torch.where(span.hi > span.lo, span.lo, end).amin()
                hulls.append(torch.stack([torch.minimum(first, end), end]))
        ends = [Hull(*pair) for pair in torch.stack(hulls).tolist()] if hulls else []
        return [ends[i : i + len(self.spans)] for i in range(0, len(ends), len(self.spans))]

    def is_causal(self, num_queries: int, num_tokens: int) -> bool:
        """False: to know it, the spans would have to be copied to the host."""
        return False


# the spans of a list of sources, as backends read them
Spans = RuleSpans | ArraySpans


def document_spans(rule: SpanRule, lengths: Tensor, device: torch.device) -> ArraySpans:
    """Spans in a row of packed documents: ``rule`` starts anew in each, and no query sees another document.

    lengths: int64 CPU ``[n]``, tokens per document. In the first source, each document's entries follow those of the
    document before; a document has as many as its last query sees.
    """
    spans = rule.spans(lengths)
    assert len(spans) == 2, "entries and window"
    ends, num_entries = lengths.cumsum(0), spans[0][1]
    columns = torch.arange(int(ends[-1]), device=device)
    numbers = torch.stack([ends, ends - lengths, num_entries.cumsum(0) - num_entries]).to(device, non_blocking=True)
    document = torch.searchsorted(numbers[0], columns, right=True)
    start, first_entry = numbers[1:, document]
    of_entries, of_window = rule.spans(columns - start + 1)
    shifted = ((first_entry, of_entries), (start, of_window))
    return ArraySpans(tuple(Span(*((shift + x)[None, None] for x in ends)) for shift, ends in shifted))
