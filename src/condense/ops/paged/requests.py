"""Attention over pages request by request: pages are copied to contiguous tensors for `condense.ops`.

Shapes: H query heads, K KV heads, L new tokens of a request, G groups, D and Dv widths, N slots of a page.
"""

import torch
from torch import Tensor

from condense.ops.api import attend, attend_recall, make_entries, summarize
from condense.ops.recall.choice import IndexChoice
from condense.ops.recall.index import GroupIndex, build_index
from condense.ops.recall.sources import RecallSources
from condense.ops.spans import RuleSpans, Source
from condense.ops.step.pages import NewTokens, PagedState, Pages
from condense.ops.step.records import record_format
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import entry_names
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.torch.step import packed
from condense.ops.types import Chunks, SummarySpans

# records are unpacked so many numbers at a time
_NUMBERS = 2**25


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
        """Write the entries or records of groups that are due, and the newest mean queries to the ring."""
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
        tokens = _load(self.state.window, self.row, window_start, self.seen)
        window, spans = Source(tokens[..., :D], tokens[..., D:]), RuleSpans(rule, self.before, window_start)
        visible = rule.visible_entries(rule.closed(self.seen))
        if not self.state.holds_records:
            rows = _load(self.state.entries, self.row, self._shift, self._shift + visible)
            entries = Source(rows[..., :D], rows[..., D:], self.settings.bias or None)
        elif visible == 0:
            entries = Source(*(x[:, :, :0] for x in window[:2]))
        else:
            parts = self._unpacked(visible)
            if self.settings.choice is not None:
                return self._attend_groups(parts, window, spans)
            entries = self._entries_in(parts)
        return attend(self.q, (entries, window), spans, scale=self.scale, backend=self.backend)[0]

    def _unpacked(self, count: int) -> dict[str, Tensor]:
        """The parts of the first ``count`` records by name, their keys and values as numbers.

        Some records at a time: in float32, while they are unpacked, their numbers take several times as many bytes.
        """
        step = max(1, _NUMBERS // (self.k.shape[1] * self.rule.chunk * sum(self._widths)))
        kept: dict[str, Tensor] = {}
        for start in range(0, count, step):
            num = min(step, count - start)
            piece = self._unpack(_load(self.state.entries, self.row, self._shift + start, self._shift + start + num))
            if num == count:
                return piece
            for name, x in piece.items():
                per = x.shape[2] // num
                if start == 0:
                    kept[name] = x.new_empty(*x.shape[:2], per * count, x.shape[3])
                kept[name][:, :, per * start : per * (start + num)] = x
        return kept

    def _unpack(self, records: Tensor) -> dict[str, Tensor]:
        """The parts of records ``[1, K, n, C]``, as `_unpacked` returns them."""
        settings, dtype = self.settings, self.k.dtype
        parts = record_format(settings, self._widths, dtype).unpack(records)
        if settings.sees_entries:
            for name, width in zip(("entries_k", "entries_v"), self._widths, strict=True):
                parts[name] = settings.entry_format.unpack(parts[name], width, dtype)
        if settings.choice is not None:
            parts["store_k"], parts["store_v"] = settings.store_format.unpack(parts.pop("store"), *self._widths, dtype)
        return parts

    def _entries_in(self, parts: dict[str, Tensor]) -> Source:
        """The entries among the parts of records."""
        bias = parts["biases"][..., 0] if self.settings.matched else self.settings.bias or None
        return Source(parts["entries_k"], parts["entries_v"], bias)

    def _attend_groups(self, parts: dict[str, Tensor], window: Source, spans: RuleSpans) -> Tensor:
        """Attention to the window and to closed groups, of which each query opens some, by the parts of records."""
        choice, g, store = self.settings.choice, self.rule.chunk, Source(parts["store_k"], parts["store_v"])
        assert choice is not None
        # if no query sees entries, the first token of each group takes the place of its entry
        entries = self._entries_in(parts) if choice.pool else Source(store.k[:, :, ::g], store.v[:, :, ::g])
        index = GroupIndex(parts["signs"], parts["steps"])
        return attend_recall(
            self.q,
            RecallSources(entries, store, window, spans),
            IndexChoice(self.q, index, self.scale, choice.quota),
            scale=self.scale,
            unchosen="pool" if choice.pool else "drop",
            backend=self.backend,
        )[0]

    @property
    def _widths(self) -> tuple[int, int]:
        return self.k.shape[3], self.v.shape[3]

    @property
    def _shift(self) -> int:
        """Slot of the entry of group 0."""
        return self.settings.summary_delay // self.rule.chunk

    def _entries(self, first: int, end: int) -> Tensor:
        """Entries of groups ``[first, end)``, ``[1, K, G, D + Dv]``, or their records ``[1, K, G, C]``."""
        settings, num, (g, D) = self.settings, end - first, (self.rule.chunk, self.k.shape[3])
        tokens, summary = _load(self.state.window, self.row, first * g, end * g), None
        if settings.num_summary > 0:
            start = (first + 1) * g + settings.summary_delay - settings.num_summary
            spans = SummarySpans(start, self.before, self.seen, num, settings.num_summary, g)
            summary = summarize(self.q, self._past_queries(start), spans, backend=self.backend)
        chunks = Chunks(tokens[..., :D], tokens[..., D:], 0, num, g, first)
        kept = _represent(chunks, summary, settings, scale=self.scale, backend=self.backend)
        if not self.state.holds_records:
            return torch.cat(kept, dim=3)
        named = dict(zip(entry_names(settings), packed(kept, settings), strict=True))
        return record_format(settings, self._widths, self.k.dtype).pack(named)

    def _past_queries(self, start: int) -> Tensor:
        """Mean queries of positions from ``start`` on that were read before, ``[1, K, Q, D]``; Q may be 0."""
        if self.state.ring is None or start >= self.before:
            return self.k[:, :, :0]
        return _load_ring(self.state.ring, self.row, start, self.before, self.k.shape[3])


def _represent(
    chunks: Chunks, summary: Tensor | None, settings: StepSettings, *, scale: float, backend: str
) -> tuple[Tensor, ...]:
    """Entries ``[B, K, G, D]`` and ``[B, K, G, Dv]`` of chunks, of width 0 where no query sees them; their biases
    ``[B, K, G, 1]``, if matched; then, with a choice, the index and the packed tokens of the groups: in the order of
    `condense.ops.step.entry_names`.
    """
    assert settings.key_pooling is not None
    assert settings.value_pooling is not None
    kept: tuple[Tensor, ...] = ()
    if settings.choice is not None:
        tokens = chunks.tokens()
        kept = *build_index(tokens[0]), settings.store_format.pack(*tokens)
        if not settings.choice.pool:
            return tokens[0][:, :, :, 0, :0], tokens[1][:, :, :, 0, :0], *kept
    entries = make_entries(
        chunks, summary, scale=scale, key_pooling=settings.key_pooling, value_pooling=settings.value_pooling,
        matched=settings.matched, backend=backend,
    )  # fmt: skip
    return *entries, *kept


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
