"""Who sees what: the three bounds of prefix-band attention, from the uniform rule or as arrays.

Query t sees prefix entries ``[0, rep_end)`` and band columns ``[raw_start, raw_end)``.
Positions count a row's real tokens from 0; padding sees nothing.

Shapes: B rows, K KV heads, L queries. A dimension that does not matter is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from condense.ops.tensors.per_row import IntT, PerRow, as_rows, at_least, at_most, broadcast_rows, int_if_equal


class Extent(NamedTuple):
    """Host-side hull of a block's bounds: prefix entries ``[0, rep_end)``, band ``[raw_start, raw_end)``."""

    rep_end: int
    raw_start: int
    raw_end: int


class Arrays(NamedTuple):
    """Bounds of a block of queries, int64 ``[B|1, K|1, L]`` on the device of the queries."""

    rep_end: Tensor
    raw_start: Tensor
    raw_end: Tensor


class Windows(NamedTuple):
    """Windows of queries of each row: window j holds positions ``[start + stride * j, start + stride * j + size)``.

    Positions below 0 do not count. num >= 1. start: where window 0 begins; before and after: real tokens of the row
    before and after the new queries were read.
    """

    start: PerRow
    before: PerRow
    after: PerRow
    num: int
    size: int
    stride: int

    def int_if_equal(self) -> tuple[int, int, int] | None:
        """start, before and after if they are the same in all rows."""
        start, before, after = (int_if_equal(x) for x in self[:3])
        if isinstance(start, Tensor) or isinstance(before, Tensor) or isinstance(after, Tensor):
            return None
        return start, before, after

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """start, before and after of each row, int64 CPU ``[B]``."""
        return as_rows(self.start, num_rows), as_rows(self.before, num_rows), as_rows(self.after, num_rows)


class Bounds(Protocol):
    """What an attention backend asks of bounds."""

    def arrays(self, start: int, stop: int, device: torch.device) -> Arrays:
        """Bounds of queries ``[start, stop)``."""
        ...

    def extents(self, blocks: list[tuple[int, int]]) -> list[Extent]:
        """Hull of the bounds of each block of queries, as Python ints."""
        ...

    def is_hull(self, start: int, stop: int) -> bool:
        """True if queries ``[start, stop)`` are known to see all of their hull, in every row and head."""
        ...

    def is_causal(self, num_queries: int, num_band: int) -> bool:
        """True if query i sees no prefix entry and exactly the band columns ``[0, num_band - L + i]``."""
        ...


@dataclass(frozen=True)
class UniformRule:
    """``n(t) = max(0, t + 1 - window) // chunk`` closed chunks; ``entries`` prefix entries stand for each.

    ``window=None``: nothing ever closes (dense attention). ``max_chunks``: only the first ones have entries
    (StreamingLLM's sinks; 0 for a pure window).
    """

    chunk: int
    window: int | None
    entries: int = 1
    max_chunks: int | None = None

    def closed(self, seen: IntT) -> IntT:
        """Chunks no longer visible token by token once ``seen`` tokens (int, or int64 of any shape) have been read."""
        if self.window is None:
            return seen * 0
        # in this order: what torch 2.13's inductor makes of a quotient of a clamped number does not compile on a CPU
        return at_least((seen - self.window) // self.chunk, 0)

    def ready(self, seen: IntT, summary_delay: int) -> IntT:
        """Chunks pooled once ``seen`` tokens have been read, each ``summary_delay`` tokens after its last."""
        ready = at_least((seen - summary_delay) // self.chunk, 0)
        return ready if self.max_chunks is None else at_most(ready, self.max_chunks)

    def visible_entries(self, closed: IntT) -> IntT:
        """Prefix entries that stand for ``closed`` chunks."""
        if self.max_chunks is not None:
            closed = at_most(closed, self.max_chunks)
        return closed * self.entries


@dataclass(frozen=True)
class UniformBounds:
    """The uniform rule on rows that may start anywhere.

    query_start: position of each row's query 0, counted back from the real ones, an int or int64 CPU ``[B]``.
    band_start: likewise, position of the token in band column 0.
    padding: likewise, queries before a row's first real one; None: those at negative positions.
    offset: likewise, prefix entries ahead of the rule's own, which every query sees.
    Tensors whose rows agree become ints.
    """

    rule: UniformRule
    query_start: PerRow
    band_start: PerRow
    padding: PerRow | None = None
    offset: PerRow = 0

    def __post_init__(self) -> None:
        padding = at_least(-self.query_start, 0) if self.padding is None else self.padding
        numbers = {"query_start": self.query_start, "band_start": self.band_start, "padding": padding}
        for name, x in (*numbers.items(), ("offset", self.offset)):
            object.__setattr__(self, name, int_if_equal(x))

    def arrays(self, start: int, stop: int, device: torch.device) -> Arrays:
        """Bounds of queries ``[start, stop)``: int64 ``[B|1, 1, L]``."""
        return self._at(torch.arange(start, stop, device=device)[None, None])

    def extents(self, blocks: list[tuple[int, int]]) -> list[Extent]:
        """Hull per block. Bounds never decrease with t, so a block's ends are all that is looked at."""
        if self.same_in_all_rows() is not None:
            # a decode step in every layer: plain integers cost far less than tensors of one element
            return [self._extent(start, stop - 1) for start, stop in blocks]
        starts, stops = (x[None, None] for x in torch.tensor(blocks, dtype=torch.int64).T)
        last = self._at(stops - 1)
        # a left-padded row begins at its first real token
        first = self._at(starts.clamp(min=broadcast_rows(self._pads, 3))).raw_start
        none = torch.iinfo(torch.int64).max
        raw_start = torch.where(last.raw_end > 0, first, none).amin((0, 1))
        raw_end = last.raw_end.amax((0, 1))
        hulls = torch.stack([last.rep_end.amax((0, 1)), torch.minimum(raw_start, raw_end), raw_end], dim=1)
        return [Extent(*row) for row in hulls.tolist()]

    def same_in_all_rows(self) -> tuple[int, int, int, int] | None:
        """query_start, band_start, padding and offset if all rows agree."""
        query_start, band_start, pads, offset = self.query_start, self.band_start, self._pads, self.offset
        if isinstance(query_start, Tensor) or isinstance(band_start, Tensor):
            return None
        if isinstance(pads, Tensor) or isinstance(offset, Tensor):
            return None
        return query_start, band_start, pads, offset

    def starts(self) -> Tensor:
        """query_start, band_start, padding and offset of each row, int64 CPU ``[B, 4]``; ``[1, 4]`` if all agree."""
        numbers = (self.query_start, self.band_start, self._pads, self.offset)
        return torch.stack(torch.broadcast_tensors(*(as_rows(x, 1) for x in numbers)), dim=1)

    def is_hull(self, start: int, stop: int) -> bool:
        """True for a single query that means the same in all rows: a decode step without padding."""
        return stop - start == 1 and self.same_in_all_rows() is not None

    def _extent(self, first: int, last: int) -> Extent:
        """The hull of queries first to last of the one row that stands for all."""
        numbers = self.same_in_all_rows()
        assert numbers is not None
        query_start, origin, pads, offset = numbers
        if last < pads:
            return Extent(0, 0, 0)
        earliest = self.rule.closed(query_start + max(first, pads) + 1) * self.rule.chunk
        seen = query_start + last + 1
        return Extent(
            self.rule.visible_entries(self.rule.closed(seen)) + offset,
            min(max(earliest - origin, 0), seen - origin),
            seen - origin,
        )

    def is_causal(self, num_queries: int, num_band: int) -> bool:
        """True if no row is padded, the band starts at its row's start and no chunk is closed yet."""
        return self.same_in_all_rows() == (num_band - num_queries, 0, 0, 0) and self.rule.closed(num_band) == 0

    @property
    def _pads(self) -> PerRow:
        assert self.padding is not None
        return self.padding

    def _at(self, steps: Tensor) -> Arrays:
        """Bounds of queries ``[B|1, 1, L]``, on their device."""
        query_start, origin, pads, offset = (
            broadcast_rows(x, 3, steps.device) for x in (self.query_start, self.band_start, self._pads, self.offset)
        )
        real = steps >= pads
        seen = query_start + steps + 1
        closed = self.rule.closed(seen)
        entries = self.rule.visible_entries(closed) + offset
        starts = (closed * self.rule.chunk - origin).clamp(min=0)
        return Arrays(*(torch.where(real, x, 0) for x in torch.broadcast_tensors(entries, starts, seen - origin)))


@dataclass(frozen=True)
class ArrayBounds:
    """Bounds given entry by entry: int64 ``[B|1, K|1, L]`` each, never decreasing along L."""

    rep_end: Tensor
    raw_start: Tensor
    raw_end: Tensor

    def arrays(self, start: int, stop: int, device: torch.device) -> Arrays:
        """Bounds of queries ``[start, stop)``."""
        return Arrays(*(x[..., start:stop].to(device) for x in (self.rep_end, self.raw_start, self.raw_end)))

    def extents(self, blocks: list[tuple[int, int]]) -> list[Extent]:
        """Hull per block; one transfer to the host for all blocks."""
        hulls = []
        for start, stop in blocks:
            rep_end, raw_start, raw_end = (x[..., start:stop] for x in (self.rep_end, self.raw_start, self.raw_end))
            seen = raw_end > raw_start
            first = torch.where(seen, raw_start, raw_end.amax()).amin()
            hulls.append(torch.stack([rep_end.amax(), torch.minimum(first, raw_end.amax()), raw_end.amax()]))
        return [Extent(*row) for row in torch.stack(hulls).tolist()]

    def is_hull(self, start: int, stop: int) -> bool:
        """Never taken for granted, as `is_causal`."""
        return False

    def is_causal(self, num_queries: int, num_band: int) -> bool:
        """Never taken for granted: answering would need a transfer to the host."""
        return False
