"""Attention over pages for requests that no step of kernels reads: pages are copied to tensors for `condense.ops`.

Requests of like lengths are right-aligned rows of one call: a step takes few operations, however many requests it has.

Shapes: B rows, H query heads, K KV heads, L queries, N tokens, T new tokens of all requests, G groups of g tokens, C
columns of a slot, D and Dv widths; on latents K is 1 and Dv is 0 but for outputs, whose width then is d_v.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.api import attend, attend_recall, keep_groups, make_entries, running_sums, summarize, unpack_store
from condense.ops.latents import UpProjection
from condense.ops.paged.rows import Call, DueGroups, Summary, reading_of
from condense.ops.paged.slots import CallSums, Slots
from condense.ops.recall.choice import Askers, IndexChoice, RecallSources
from condense.ops.recall.index import GroupIndex
from condense.ops.recall.rest import GroupMeans
from condense.ops.spans import Source
from condense.ops.step.pages import NewTokens, PagedState, Pages, Places, as_words, copied, window_columns, words
from condense.ops.step.records import record_format
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import entry_names
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.torch.step import packed
from condense.ops.types import Chunks


@dataclass(frozen=True)
class PagedLayer:
    """One layer in one step. qkv: q ``[T, H, D]``, k ``[T, K, D]`` and v ``[T, K, Dv]`` of all requests.

    closes: makes, from a state and the number of tokens per row, the step of kernels that stores each row's last token
    and the record of the group that this token completes; None: `condense.ops` makes entries and records.
    """

    qkv: tuple[Tensor, Tensor, Tensor]
    state: PagedState
    new: NewTokens
    settings: StepSettings
    scale: float
    backend: str
    closes: Callable[..., Any] | None

    def read(self, out: Tensor, first: int) -> None:
        """Read requests from ``first`` on: store their tokens and groups, then write their attention to ``out``."""
        state, new, settings = self.state, self.new, self.settings
        pages = state.window.slots, state.entries.slots, 0 if state.ring is None else state.ring.slots
        reading = new.once((first, settings.number, pages), lambda: reading_of(new, first, state, settings))
        if reading is None:
            return
        q, k, v = self.qkv
        self.store(state.window, reading.window, k[reading.new], v[reading.new])
        if reading.made is not None:
            self._keep(reading.made, reading.calls)
        if reading.newest is not None:
            assert state.ring is not None
            newest, slots = reading.newest
            mean_q = self.mean_queries(q[newest].transpose(0, 1)[None])[0].transpose(0, 1)
            self.store(state.ring, slots, mean_q)
        seen: list[GroupMeans | None] = [None] * len(reading.calls)
        # write sums again: the kernel that closed groups may have made them from earlier sums that were not final
        for _ in range(reading.passes):
            seen = [None if call.sums is None else self._sum(call.sums) for call in reading.calls]
        for call, means in zip(reading.calls, seen, strict=True):
            rows = self.attend(call, means)
            if call.real is None:
                out[call.queries] = rows[0].transpose(0, 1)
            else:
                row, column, token = call.real
                to, rows = as_words(out, rows)
                to[token] = rows[row, :, column]

    @property
    def widths(self) -> tuple[int, int]:
        """Widths D of keys and Dv of values."""
        _, k, v = self.qkv
        return k.shape[2], v.shape[2]

    @property
    def tokens(self) -> Pages:
        """Keys and values in pages of the window, ``[k | v]``."""
        return self.state.window.columns(0, sum(self.widths))

    def store(self, pages: Pages, at: Slots, *rows: Tensor) -> None:
        """Write rows ``[n, K, c]``, one after another, to the first columns of slots ``[n]``."""
        start = 0
        for part in rows:
            stop = start + part.shape[2]
            to, new = as_words(pages.cache[..., start:stop], part)
            to[self._page(pages, at), :, at.slot] = new
            start = stop

    def load(self, pages: Pages, at: Slots) -> Tensor:
        """A copy ``[B, K, n, C]`` of what the slots ``at`` ``[B, n]`` hold."""
        return copied(pages.cache, self._places(pages, at))

    def _places(self, pages: Pages, at: Slots) -> Places:
        """Places of slots ``[B, n]`` in all KV heads, found once for layers whose pages have one table."""
        K, page = pages.cache.shape[1], self._page(pages, at)
        return self.new.once((id(at), pages.table.data_ptr(), K), lambda: Places.of(page, at.slot, K))

    def _page(self, pages: Pages, at: Slots) -> Tensor:
        """The page of each slot, int64, found once for layers whose pages have one table."""
        table = pages.table
        return self.new.once((id(at), table.data_ptr()), lambda: table[at.row, at.column].long())

    def _keep(self, groups: DueGroups, calls: tuple[Call, ...]) -> None:
        """Store the entries or records of groups; kernels get each group as a row whose new token is its last one."""
        window, entries = self.state.window, self.state.entries
        if self.closes is None:
            form = record_format(self.settings, self.widths, window.cache.dtype)
            planes = form.planes(entries.cache, self.state.store) if self.state.holds_records else (entries.cache,)
            made = self.made(self.load(self.tokens, groups.tokens), calls)
            for plane, rows in zip(planes, made, strict=True):
                self.store(entries._replace(cache=plane), groups.entries, rows)
            return
        k, v = (x[groups.last] for x in self.qkv[1:])

        def of_groups(pages: Pages) -> Pages:
            table = pages.table
            return pages._replace(table=self.new.once((id(groups), table.data_ptr()), lambda: table[groups.row]))

        state = self.state._replace(window=of_groups(window), entries=of_groups(entries))
        self.closes(state, groups.seen).store(k, k, v)

    def made(self, tokens: Tensor, calls: tuple[Call, ...]) -> tuple[Tensor, ...]:
        """Entries ``[G, K, D + Dv]`` of groups with these tokens ``[1, K, G * g, D + Dv]``, or all planes ``[G, K, n]``
        of their records.
        """
        settings, (D, _), g = self.settings, self.widths, self.settings.rule.chunk
        chunks = Chunks(tokens[..., :D], tokens[..., D:], 0, tokens.shape[2] // g, g, 0)
        assert settings.key_pooling is not None
        assert settings.value_pooling is not None
        if settings.choice is not None:
            kept = keep_groups(chunks, settings.store_format, backend=self.backend)
        else:
            summaries = [self._summarize(call, call.summary) for call in calls if call.summary is not None]
            summary = torch.cat(summaries, dim=2) if len(summaries) > 1 else next(iter(summaries), None)
            kept = make_entries(
                chunks, summary, (settings.key_pooling, settings.value_pooling), scale=self.scale,
                matched=settings.matched, backend=self.backend, latent=self.state.latent,
            )  # fmt: skip
        if self.state.holds_records:
            named = dict(zip(entry_names(settings), packed(kept, settings), strict=True))
            made: tuple[Tensor, ...] = record_format(settings, self.widths, tokens.dtype).pack(named)
        else:
            made = (torch.cat(kept, dim=3),)
        return tuple(x[0].transpose(0, 1) for x in made)

    def _sum(self, at: CallSums) -> GroupMeans:
        """Store the sums that a call's tokens complete, and return the means that its queries see, float32 or
        wider ``[B, K, 1 + n, Dv]``, or ``[B, K, 1 + n, D]`` for latents.
        """
        window, (D, Dv), g = self.state.window, self.widths, self.settings.rule.chunk
        width, (start, _) = Dv or D, window_columns(D, Dv, self.settings, window.cache.itemsize)
        pages, values = window.columns(start).view(torch.float64), self.tokens.columns(-width)
        part = pages.cache.shape[3]
        base = self.load(pages, at.base).flatten(2)[:, :, None, :width]
        tokens = self.load(values, at.tokens)
        groups = Chunks(tokens[..., :0], tokens, 0, at.counts.shape[2] - 1, g, 0)
        base = base.masked_fill(~at.exists[..., None], 0.0)
        sums, means = running_sums(base, groups, at.counts, backend=self.backend)
        row, number = at.made
        parts = F.pad(sums[row, :, number], (0, g * part - width)).unflatten(2, (g, part))
        self.store(pages, at.slots, parts.transpose(1, 2).flatten(0, 1))
        return GroupMeans(means, at.first)

    def mean_queries(self, q: Tensor) -> Tensor:
        """Means ``[B, K, L, D]`` of queries q ``[B, H, L, D]`` over the heads that share a KV head."""
        up, K = self.state.up, self.state.window.cache.shape[1]
        return head_mean(q, K) if up is None else up.mean_queries(q, self.state.ranks)

    def _summarize(self, call: Call, summary: Summary) -> Tensor:
        """Summary queries ``[1, K, G, D]`` of the groups that a call makes due."""
        q = self._rows(self.qkv[0], call)
        if self.state.up is not None:
            q = self.mean_queries(q)
        tail = q[:, : self.state.window.cache.shape[1], :0]
        if summary.tail is not None:
            assert self.state.ring is not None
            tail = self.load(self.state.ring, summary.tail)[..., : self.widths[0]]
        means = summarize(q, tail, summary.spans, backend=self.backend)
        if summary.made is None:
            return means
        row, group = summary.made
        return means[row, :, group].transpose(0, 1)[None]

    def attend(self, call: Call, means: GroupMeans | None) -> Tensor:
        """Attention ``[B, H, L, Dv]`` of a call's queries. means: from `_sum`, None if the call has no sums."""
        (_, k, v), D = self.qkv, self.widths[0]
        if call.window is None:
            window = Source(self._rows(k, call), self._rows(v, call))
        else:
            tokens = self.load(self.tokens, call.window)
            window = Source(tokens[..., :D], tokens[..., D:])
        if not self.state.holds_records:
            rows = self.load(self.state.entries, call.entries)
            entries = Source(rows[..., :D], rows[..., D:], self.settings.bias or None)
        elif call.entries.slot.shape[1] == 0:
            entries = Source(*(x[:, :, :0] for x in window[:2]))
        else:
            records = self._records(call.entries)
            if self.settings.choice is not None and not call.exact:
                return self._attend_groups(call, *records, window, means)
            entries = self._tokens(*records, self._index(*records)) if call.exact else self._entries(*records)
        q, sources, up = self._seen(call, entries, window)
        out, _ = attend(q, sources, call.spans, scale=self.scale, backend=self.backend, extras=self.state.extras)
        return out if up is None else up.project_out(out)

    def _seen(self, call: Call, *sources: Source) -> tuple[Tensor, tuple[Source, ...], UpProjection | None]:
        """A call's queries ``[B, H, L, D]``, the sources in the form that these read, and the projection of outputs.

        Latents are either expanded, or read as they are by absorbed queries; outputs need a projection only then.
        """
        q, up = self._rows(self.qkv[0], call), self.state.up
        if up is None:
            return q, sources, None
        absorbs = up.absorbing_pays(q.shape[2], sum(x.k.shape[2] for x in sources))
        seen = tuple(up.view(x, absorbs) for x in sources)
        return (up.absorb(q), seen, up) if absorbs else (q, seen, None)

    def _rows(self, x: Tensor, call: Call) -> Tensor:
        """The rows of x ``[T, heads, C]`` that belong to a call's queries, ``[B, heads, L, C]``."""
        if isinstance(call.queries, slice):
            return x[call.queries].transpose(0, 1)[None]
        return words(x)[call.queries].view(x.dtype).transpose(1, 2)

    def _records(self, at: Slots) -> tuple[dict[str, Tensor], Places]:
        """Views of all pages, one for each part of a record by name, and the places of the records at ``[B, G]``."""
        pages = self.state.entries
        form = record_format(self.settings, self.widths, self.state.window.cache.dtype)
        return form.views(pages.cache, self.state.store), self._places(pages, at)

    def _entries(self, parts: dict[str, Tensor], places: Places) -> Source:
        """The entries in records."""
        settings, dtype, (D, Dv) = self.settings, self.state.window.cache.dtype, self.widths
        rows = copied(parts["entries_k"], places)
        k = settings.entry_format.unpack(rows, D, dtype)
        # records of latents have no values
        v = settings.entry_format.unpack(copied(parts["entries_v"], places) if Dv > 0 else rows[..., :0], Dv, dtype)
        return Source(k, v, copied(parts["biases"], places)[..., 0] if settings.matched else settings.bias or None)

    def _tokens(self, parts: dict[str, Tensor], places: Places, index: GroupIndex) -> Source:
        """The stored tokens in records, ``[B, K, G * g, D]`` and ``[B, K, G * g, Dv]``."""
        form, store, dtype = self.settings.store_format, parts["store"], self.state.window.cache.dtype
        return Source(*unpack_store(form, store, index, self.widths, dtype, places=places, backend=self.backend))

    def _index(self, parts: dict[str, Tensor], places: Places) -> GroupIndex:
        """The index in records."""
        return GroupIndex(*(copied(parts[name], places) for name in ("signs", "steps")))

    def _attend_groups(
        self, call: Call, parts: dict[str, Tensor], places: Places, window: Source, means: GroupMeans | None
    ) -> Tensor:
        """Attention to the window and to the closed groups at ``places``, of which each query opens some."""
        choice, index = self.settings.choice, self._index(parts, places)
        assert choice is not None
        q, (window, store), up = self._seen(call, window, self._tokens(parts, places, index))
        expands = self.state.up if up is None else None
        on_latents = q if expands is None else expands.absorb(q)
        if means is not None:
            means = means.as_values(window.v.dtype, window.v.shape[3], expands)
        sources, L = RecallSources(store, window, call.spans), q.shape[2]
        askers = Askers.of_call(sources, L) if choice.prompt == "shared" and L > 1 else None
        by_index = IndexChoice(on_latents, index, self.scale, choice.quota, askers, self.state.ranks)
        out, _ = attend_recall(
            q, sources, by_index, scale=self.scale, means=means, backend=self.backend, extras=self.state.extras
        )
        return out if up is None else up.project_out(out)
