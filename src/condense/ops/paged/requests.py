"""Reading new tokens request by request: pages into contiguous tensors, then today's operations on any backend.

Shapes: H query heads, K KV heads, L new tokens of a request, G groups, D and Dv widths, N slots of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.api import attend, pool_groups, summarize
from condense.ops.paged.pages import NewTokens, PagedState, Pages
from condense.ops.spans import RuleSpans, Source
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.types import StepSettings, SummarySpans


def read_requests(
    qkv: tuple[Tensor, Tensor, Tensor],
    state: PagedState,
    new: NewTokens,
    settings: StepSettings,
    out: Tensor,
    *,
    first: int,
    scale: float,
    backend: str,
) -> None:
    """See `condense.ops.paged.read_paged`: requests from ``first`` on, one after another."""
    for row in range(first, len(new.seen)):
        start, stop = new.starts[row], new.starts[row + 1]
        if stop > start:
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in qkv)
            request = _Request(row, new.seen[row] - (stop - start), new.seen[row], state, settings, scale, backend)
            out[start:stop] = request.read(q, k, v)[0].transpose(0, 1)


class _Request:
    """One request, of which tokens ``[before, seen)`` are read."""

    def __init__(
        self, row: int, before: int, seen: int, state: PagedState, settings: StepSettings, scale: float, backend: str
    ) -> None:
        self.row, self.before, self.seen, self.state, self.settings = row, before, seen, state, settings
        self.scale, self.backend, self.rule = scale, backend, settings.rule
        self.first_due, self.end_due = (self.rule.pooled(n, settings.summary_delay) for n in (before, seen))
        # position of the first token that the first new query sees, or that a group which is due begins with
        self.window_start = min(self.rule.closed(before + 1), self.first_due) * self.rule.chunk

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q ``[1, H, L, D]``, k ``[1, K, L, D]``, v ``[1, K, L, Dv]``: their attention ``[1, H, L, Dv]``."""
        state, rule, D = self.state, self.rule, k.shape[3]
        _store(state.window, self.row, self.before, torch.cat([k, v], dim=3))
        window = _load(state.window, self.row, self.window_start, self.seen)
        window_k, window_v = window[..., :D], window[..., D:]
        if self.end_due > self.first_due:
            entries = torch.cat(self._pool(q, window_k, window_v), dim=3)
            _store(state.entries, self.row, self.first_due + self._shift, entries)
        if state.ring is not None:
            kept = min(self.seen - self.before, self.settings.num_summary)
            means = head_mean(q[:, :, q.shape[2] - kept :], k.shape[1])
            _store_ring(state.ring, self.row, self.seen - kept, means)
        entries = _load(state.entries, self.row, self._shift, self._shift + rule.closed(self.seen))
        sources = (Source(entries[..., :D], entries[..., D:], self.settings.bias or None), Source(window_k, window_v))
        spans = RuleSpans(rule, self.before, self.window_start)
        return attend(q, sources, spans, scale=self.scale, backend=self.backend)[0]

    @property
    def _shift(self) -> int:
        """Slot of the entry of group 0."""
        return self.settings.summary_delay // self.rule.chunk

    def _pool(self, q: Tensor, window_k: Tensor, window_v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[1, K, G, D]`` and values ``[1, K, G, Dv]`` of the entries that are due."""
        settings, num, g = self.settings, self.end_due - self.first_due, self.rule.chunk
        assert settings.key_pooling is not None
        assert settings.value_pooling is not None
        summary = None
        if settings.num_summary > 0:
            start = (self.first_due + 1) * g + settings.summary_delay - settings.num_summary
            spans = SummarySpans(start, self.before, self.seen, num, settings.num_summary, g)
            summary = summarize(q, self._past_queries(start, window_k), spans, backend=self.backend)
        return pool_groups(
            window_k,
            window_v,
            summary,
            start=self.first_due * g - self.window_start,
            num_groups=num,
            group_size=g,
            scale=self.scale,
            key_pooling=settings.key_pooling,
            value_pooling=settings.value_pooling,
            backend=self.backend,
        )

    def _past_queries(self, start: int, window_k: Tensor) -> Tensor:
        """Mean queries of positions from ``start`` on that were read before, ``[1, K, Q, D]``; Q may be 0."""
        if self.state.ring is None or start >= self.before:
            return window_k[:, :, :0]
        return _load_ring(self.state.ring, self.row, start, self.before, window_k.shape[3])


def _load(pages: Pages, row: int, start: int, stop: int) -> Tensor:
    """Slots ``[start, stop)`` of a request, ``[1, K, n, C]``: whole pages, then a view of what is wanted."""
    first, N = start // pages.slots, pages.slots
    whole = pages.cache[pages.table[row, first : -(-stop // N)].long()].transpose(0, 1).flatten(1, 2)
    return whole[None, :, start - first * N : stop - first * N]


def _store(pages: Pages, row: int, start: int, new: Tensor) -> None:
    """Writes ``new`` ``[1, K, n, C]`` to slots from ``start`` on."""
    position = torch.arange(start, start + new.shape[2], device=new.device)
    page = pages.table[row, position // pages.slots].long()
    pages.cache[page, :, position % pages.slots] = new[0].transpose(0, 1)


def _load_ring(ring: Pages, row: int, start: int, stop: int, width: int) -> Tensor:
    """The mean queries of positions ``[start, stop)``, ``[1, K, n, D]``."""
    slot = torch.arange(start, stop, device=ring.cache.device) % ring.slots
    return ring.cache[ring.table[row, :1].long()][:, :, slot, :width]


def _store_ring(ring: Pages, row: int, start: int, means: Tensor) -> None:
    """Writes mean queries ``[1, K, n, D]`` of positions from ``start`` on."""
    slot = torch.arange(start, start + means.shape[2], device=means.device) % ring.slots
    page = ring.table[row, :1].long().expand_as(slot)
    ring.cache[page, :, slot, : means.shape[3]] = means[0].transpose(0, 1)
