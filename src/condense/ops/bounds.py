"""Who sees what: the three bounds of prefix-band attention, from the uniform rule or as arrays.

Query t sees prefix entries ``[0, rep_end)`` and band columns ``[raw_start, raw_end)``.
Positions count a row's real tokens from 0; padding sees nothing.

Shapes: B rows, K KV heads, L queries. A dimension that does not matter is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

IntT = TypeVar("IntT", int, Tensor)


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

    Positions below 0 do not count. start, before and after are int64 CPU ``[B]``: where window 0 begins, and the
    real tokens of the row before and after the new queries were read.
    """

    start: Tensor
    before: Tensor
    after: Tensor
    num: int
    size: int
    stride: int

    def agreed(self) -> tuple[int, int, int] | None:
        """start, before and after if they are the same in all rows."""
        rows = self[:3]
        if any(x.numel() > 1 and bool((x != x[0]).any()) for x in rows):
            return None
        start, before, after = (int(x[0]) for x in rows)
        return start, before, after


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
        behind = seen - self.window
        return behind * (behind > 0) // self.chunk

    def ready(self, seen: IntT, lag: int) -> IntT:
        """Chunks whose entries are made once ``seen`` tokens have been read, each ``lag`` tokens after its last."""
        behind = seen - lag
        ready = behind * (behind > 0) // self.chunk
        return ready if self.max_chunks is None else ready - (ready - self.max_chunks) * (ready > self.max_chunks)

    def visible_entries(self, closed: IntT) -> IntT:
        """Prefix entries that stand for ``closed`` chunks."""
        if self.max_chunks is not None:
            closed = closed - (closed - self.max_chunks) * (closed > self.max_chunks)
        return closed * self.entries


@dataclass(frozen=True)
class UniformBounds:
    """The uniform rule on rows that may start anywhere.

    query_start: int64 CPU ``[B]`` or ``[1]``, position of each row's query 0, counted back from the real ones.
    band_start: likewise, position of the token in band column 0.
    padding: likewise, queries before a row's first real one; by default those at negative positions.
    offset: likewise, prefix entries ahead of the rule's own, which every query sees; by default none.
    """

    rule: UniformRule
    query_start: Tensor
    band_start: Tensor
    padding: Tensor | None = None
    offset: Tensor | None = None

    def arrays(self, start: int, stop: int, device: torch.device) -> Arrays:
        """Bounds of queries ``[start, stop)``: int64 ``[B|1, 1, L]``."""
        steps = torch.arange(start, stop, device=device)
        return self._at(steps, device)

    def extents(self, blocks: list[tuple[int, int]]) -> list[Extent]:
        """Hull per block. Bounds never decrease with t, so a block's ends are all that is looked at."""
        if self._rows_agree():
            # a decode step in every layer: plain integers cost far less than tensors of one element
            return [self._extent(start, stop - 1) for start, stop in blocks]
        starts, stops = torch.tensor(blocks, dtype=torch.int64).T
        last = self._at(stops - 1)
        # a left-padded row begins at its first real token
        first = self._at(torch.maximum(starts, self._pads()[:, None])[:, None]).raw_start
        none = torch.iinfo(torch.int64).max
        raw_start = torch.where(last.raw_end > 0, first, none).amin((0, 1))
        raw_end = last.raw_end.amax((0, 1))
        hulls = torch.stack([last.rep_end.amax((0, 1)), torch.minimum(raw_start, raw_end), raw_end], dim=1)
        return [Extent(*row) for row in hulls.tolist()]

    def starts(self) -> Tensor:
        """query_start, band_start, padding and offset of each row, int64 CPU ``[B, 4]``; ``[1, 4]`` if all agree."""
        offset = torch.zeros(1, dtype=torch.int64) if self.offset is None else self.offset
        parts = torch.broadcast_tensors(self.query_start, self.band_start, self._pads(), offset)
        return torch.stack(parts, dim=1)

    def is_hull(self, start: int, stop: int) -> bool:
        """True for a single query that means the same in all rows: a decode step without padding."""
        return stop - start == 1 and self._rows_agree()

    def _rows_agree(self) -> bool:
        offsets = 1 if self.offset is None else self.offset.numel()
        return self.query_start.numel() == self.band_start.numel() == self._pads().numel() == offsets == 1

    def _extent(self, first: int, last: int) -> Extent:
        """The hull of queries first to last of the one row that stands for all."""
        query_start, origin, pads = int(self.query_start), int(self.band_start), int(self._pads())
        if last < pads:
            return Extent(0, 0, 0)
        earliest = self.rule.closed(query_start + max(first, pads) + 1) * self.rule.chunk
        seen = query_start + last + 1
        return Extent(
            self.rule.visible_entries(self.rule.closed(seen)) + (0 if self.offset is None else int(self.offset)),
            min(max(earliest - origin, 0), seen - origin),
            seen - origin,
        )

    def is_causal(self, num_queries: int, num_band: int) -> bool:
        """True if no row is padded, the band starts at its row's start and no chunk is closed yet."""
        if bool((self.band_start != 0).any()) or bool((self._pads() != 0).any()):
            return False
        if self.offset is not None and bool((self.offset != 0).any()):
            return False
        if bool((self.query_start != num_band - num_queries).any()):
            return False
        return self.rule.closed(num_band) == 0

    def _pads(self) -> Tensor:
        return (-self.query_start).clamp(min=0) if self.padding is None else self.padding

    def _at(self, steps: Tensor, device: torch.device | None = None) -> Arrays:
        # from pageable memory: staged before the call returns, and no wait for the GPU in every decode step
        query_start, origin, pads = (
            x.to(device, non_blocking=True)[:, None, None] for x in (self.query_start, self.band_start, self._pads())
        )
        real = steps >= pads
        seen = query_start + steps + 1
        closed = self.rule.closed(seen)
        entries = self.rule.visible_entries(closed)
        if self.offset is not None:
            entries = entries + self.offset.to(device, non_blocking=True)[:, None, None]
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
