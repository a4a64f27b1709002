"""Attention over pages request by request: pages are copied to contiguous tensors for `condense.ops`.

Shapes: H query heads, K KV heads, L new tokens of a request, G groups, D and Dv widths, N slots of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.api import attend, pool_groups, summarize
from condense.ops.spans import RuleSpans, Source
from condense.ops.step.pages import NewTokens, PagedState, Pages
from condense.ops.step.settings import StepSettings
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.types import Chunks, SummarySpans


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
    """See `condense.ops.paged.read_paged`: requests from ``first`` on, in three rounds."""
    requests = [
        _Request(row, slice(new.starts[row], new.starts[row + 1]), new.seen[row], qkv, state, settings, scale, backend)
        for row in range(first, len(new.seen))
        if new.starts[row + 1] > new.starts[row]
    ]
    for request in requests:
        request.store()
    for request in requests:
        request.pool()
    for request in requests:
        out[request.tokens] = request.attend()[0].transpose(0, 1)


class _Request:
    """One request that reads tokens ``[before, seen)``: q ``[1, H, L, D]``, k and v ``[1, K, L, width]``."""

    def __init__(
        self,
        row: int,
        tokens: slice,
        seen: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        state: PagedState,
        settings: StepSettings,
        scale: float,
        backend: str,
    ) -> None:
        self.row, self.tokens, self.state, self.settings = row, tokens, state, settings
        self.before, self.seen = seen - (tokens.stop - tokens.start), seen
        self.q, self.k, self.v = (x[tokens].transpose(0, 1)[None] for x in qkv)
        self.scale, self.backend, self.rule = scale, backend, settings.rule

    def store(self) -> None:
        """Write keys and values to the window's pages."""
        _store(self.state.window, self.row, self.before, torch.cat([self.k, self.v], dim=3))

    def pool(self) -> None:
        """Write the entries of groups that are due, and the newest mean queries to the ring."""
        settings, ring = self.settings, self.state.ring
        first, end = (self.rule.pooled(n, settings.summary_delay) for n in (self.before, self.seen))
        if end > first:
            _store(self.state.entries, self.row, first + self._shift, self._entries(first, end))
        if ring is not None:
            kept = min(self.seen - self.before, settings.num_summary)
            means = head_mean(self.q[:, :, self.q.shape[2] - kept :], self.k.shape[1])
            _store_ring(ring, self.row, self.seen - kept, means)

    def attend(self) -> Tensor:
        """Attention of the new tokens, ``[1, H, L, Dv]``."""
        rule, D = self.rule, self.k.shape[3]
        window_start = rule.closed(self.before + 1) * rule.chunk
        window = _load(self.state.window, self.row, window_start, self.seen)
        entries = _load(self.state.entries, self.row, self._shift, self._shift + rule.closed(self.seen))
        sources = (
            Source(entries[..., :D], entries[..., D:], self.settings.bias or None),
            Source(window[..., :D], window[..., D:]),
        )
        spans = RuleSpans(rule, self.before, window_start)
        return attend(self.q, sources, spans, scale=self.scale, backend=self.backend)[0]

    @property
    def _shift(self) -> int:
        """Slot of the entry of group 0."""
        return self.settings.summary_delay // self.rule.chunk

    def _entries(self, first: int, end: int) -> Tensor:
        """Entries of groups ``[first, end)``, ``[1, K, G, D + Dv]``."""
        settings, num, (g, D) = self.settings, end - first, (self.rule.chunk, self.k.shape[3])
        assert settings.key_pooling is not None
        assert settings.value_pooling is not None
        tokens, summary = _load(self.state.window, self.row, first * g, end * g), None
        if settings.num_summary > 0:
            start = (first + 1) * g + settings.summary_delay - settings.num_summary
            spans = SummarySpans(start, self.before, self.seen, num, settings.num_summary, g)
            summary = summarize(self.q, self._past_queries(start), spans, backend=self.backend)
        pooled = pool_groups(
            Chunks(tokens[..., :D], tokens[..., D:], 0, num, g, first),
            summary,
            scale=self.scale,
            key_pooling=settings.key_pooling,
            value_pooling=settings.value_pooling,
            backend=self.backend,
        )
        return torch.cat(pooled, dim=3)

    def _past_queries(self, start: int) -> Tensor:
        """Mean queries of positions from ``start`` on that were read before, ``[1, K, Q, D]``; Q may be 0."""
        if self.state.ring is None or start >= self.before:
            return self.k[:, :, :0]
        return _load_ring(self.state.ring, self.row, start, self.before, self.k.shape[3])


def _load(pages: Pages, row: int, start: int, stop: int) -> Tensor:
    """Slots ``[start, stop)`` of a request, ``[1, K, n, C]``: a view of copied whole pages."""
    first, N = start // pages.slots, pages.slots
    whole = pages.cache[pages.table[row, first : -(-stop // N)].long()].transpose(0, 1).flatten(1, 2)
    return whole[None, :, start - first * N : stop - first * N]


def _store(pages: Pages, row: int, start: int, new: Tensor) -> None:
    """Write ``new`` ``[1, K, n, C]`` to slots from ``start`` on."""
    position = torch.arange(start, start + new.shape[2], device=new.device)
    page = pages.table[row, position // pages.slots].long()
    pages.cache[page, :, position % pages.slots] = new[0].transpose(0, 1)


def _load_ring(ring: Pages, row: int, start: int, stop: int, width: int) -> Tensor:
    """The mean queries of positions ``[start, stop)``, ``[1, K, n, D]``."""
    slot = torch.arange(start, stop, device=ring.cache.device) % ring.slots
    return ring.cache[ring.table[row, :1].long()][:, :, slot, :width]


def _store_ring(ring: Pages, row: int, start: int, means: Tensor) -> None:
    """Write mean queries ``[1, K, n, D]`` of positions from ``start`` on."""
    slot = torch.arange(start, start + means.shape[2], device=means.device) % ring.slots
    page = ring.table[row, :1].long().expand_as(slot)
    ring.cache[page, :, slot, : means.shape[3]] = means[0].transpose(0, 1)
