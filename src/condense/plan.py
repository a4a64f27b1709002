"""The numbers that all layers of one forward share: the first layer computes them, the others reuse them. Also
`run_planned`, which makes such a plan for padded rows or packed documents without a model.

Shapes: B rows, L new tokens, n packed documents, G chunks of c tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from condense.methods import Layout, Method
from condense.ops import ArraySpans, RuleSpans, SummaryColumns, SummarySpans, document_spans
from condense.ops.checks import check_cu_seqlens, check_padding
from condense.ops.coarse import CoarseSpans
from condense.ops.spans import SharedByLayers
from condense.ops.tensors.per_row import PerRow, as_rows, broadcast_rows, comparable, int_if_equal, max_row
from condense.ops.tensors.sampling import Sample, sample_queries
from condense.state import LayerState


class ChunkRange(NamedTuple):
    """Chunks ``[first, last)`` of each row. num: the most in any row. columns, numbers: see `condense.ops.Chunks`."""

    first: PerRow
    last: PerRow
    num: int
    columns: int | Tensor
    numbers: int | Tensor


class Reading(NamedTuple):
    """The chunks to pool when new tokens are read, and the spans of their queries, for one method and one state.

    seen: real tokens per row afterwards. due: the chunks that are pooled now. summaries: the queries that weigh these
    chunks, None if none is needed. spans: of the new queries. whole: the chunks that new tokens complete; None where
    their values are not summed up. counts: tokens before these chunks and up to each, at least 1, int64 ``[B|1, 1,
    1 + num, 1]``. merged: the coarse entries that are made now, each a chunk of the fine entries that there are; None
    for a method without coarse entries.
    """

    seen: PerRow
    due: ChunkRange
    summaries: SummarySpans | SummaryColumns | None
    spans: RuleSpans | ArraySpans
    whole: ChunkRange | None = None
    counts: Tensor | None = None
    merged: ChunkRange | None = None


class ForwardPlan(SharedByLayers):
    """L new tokens per row, the last ``counts`` of which are real; the rest is padding on the left.

    counts: int64 CPU ``[B]``, None: all are real. documents: lengths of the documents packed into one row without
    padding, None for one document; packed ones have no state before or after. Layers with the same method and the same
    numbers of tokens in their states share one `Reading`; layers with the same sampling settings share one `Sample`.
    """

    def __init__(self, num_tokens: int, counts: Tensor | None = None, documents: Sequence[int] | None = None) -> None:
        self.num_tokens = num_tokens
        self.counts = counts
        lengths = [n for n in documents or () if n]
        self.documents = torch.tensor(lengths, device="cpu") if len(lengths) > 1 else None
        self.padding: PerRow = 0 if counts is None else int_if_equal(num_tokens - counts)
        # readings, each with its key: the method, the device and the numbers of a layer's state
        self._readings: list[tuple[tuple[object, ...], Reading]] = []
        self._found = {}

    def tokens(self, num_rows: int) -> Tensor:
        """Real tokens per row, int64 CPU ``[B]``."""
        return as_rows(self.num_tokens - self.padding, num_rows)

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x ``[B, K, L, D]`` with zeros in the padding."""
        if not isinstance(self.padding, Tensor) and self.padding == 0:
            return x
        column = torch.arange(self.num_tokens, device="cpu")
        pad = (column < as_rows(self.padding, x.shape[0])[:, None]).to(x.device)
        return x.masked_fill(pad[:, None, :, None], 0)

    def sample(self, num_rows: int, num_recent: int, num_random: int, seed: int, device: torch.device) -> Sample:
        """Queries sampled from the new tokens, by `condense.ops.tensors.sampling.sample_queries`."""
        numbers = (self.num_tokens, num_recent, num_random, seed, device)
        return self.once((num_rows, *numbers), lambda: sample_queries(self.tokens(num_rows), *numbers))

    def reading(self, method: Method, state: LayerState | None, device: torch.device) -> Reading:
        """The `Reading` of the new tokens, its tensors on device. state: of a layer, None before its first tokens."""
        if torch.compiler.is_compiling():
            return self._read(method, state, device)
        wanted: tuple[object, ...] = (method, device)
        if state is not None:
            wanted += (comparable(state.seen), comparable(state.first.num), state.window_k.shape[2])
        for made_for, reading in self._readings:
            if made_for == wanted:
                return reading
        reading = self._read(method, state, device)
        self._readings.append((wanted, reading))
        return reading

    def _read(self, method: Method, state: LayerState | None, device: torch.device) -> Reading:
        layout = method.layout
        if self.documents is not None:
            assert state is None, "documents are read without a state"
            return _read_documents(layout, self.documents, device)
        rule, delay, S = layout.rule, layout.summary_delay, layout.num_summary
        before: PerRow = 0 if state is None else state.seen
        num_window = 0 if state is None else state.window_k.shape[2]
        seen = int_if_equal(before + (self.num_tokens - self.padding))
        window_start = seen - (num_window + self.num_tokens)
        due = _chunks(rule.pooled(before, delay), rule.pooled(seen, delay), rule.chunk, window_start, device)
        summaries = None
        if S > 0 and due.num > 0:
            # with summary="prompt" one mean of the prompt's last queries weighs all chunks; else each chunk has its own
            looks_ahead = layout.lookahead is not None and state is None
            start, count = (seen, 1) if looks_ahead else ((due.first + 1) * rule.chunk + delay, due.num)
            summaries = SummarySpans(start - S, before, seen, count, S, rule.chunk)
        first_entries = 0 if state is None else state.first.num
        spans = RuleSpans(rule, seen - self.num_tokens, window_start, self.padding, first_entries)
        whole = counts = None
        if layout.choice is not None and layout.choice.mean:
            whole = _chunks(before // rule.chunk, seen // rule.chunk, rule.chunk, window_start, device)
            tokens = (broadcast_rows(whole.first, 2) + torch.arange(whole.num + 1, device="cpu")[None]) * rule.chunk
            counts = tokens.clamp(min=1).to(device, non_blocking=True)[:, None, :, None]
        merged = None
        if (scales := layout.coarse_rule) is not None:
            fine_start = int_if_equal(due.last - due.num - (0 if state is None else state.fine[0].shape[2]))
            merged = _chunks(scales.made(before), scales.made(seen), scales.coarse.chunks, fine_start, device)
            spans = CoarseSpans(scales, spans.query_start, window_start, self.padding, fine_start=fine_start)
        return Reading(seen, due, summaries, spans, whole, counts, merged)


def _chunks(first: PerRow, last: PerRow, size: int, window_start: PerRow, device: torch.device) -> ChunkRange:
    """Chunks of ``size`` tokens, in a window that begins at position ``window_start``."""
    first, num = int_if_equal(first), max_row(last - first)
    columns = _each_chunk(first * size - window_start, size, num, device)
    return ChunkRange(first, last, num, columns, _each_chunk(first, 1, num, device))


def _each_chunk(first: PerRow, step: int, num: int, device: torch.device) -> int | Tensor:
    """The number ``first + step * i`` of chunk i of each row, a field of `condense.ops.Chunks`.

    It is ``first``, an int, if all rows agree; else int64 ``[B, num]`` on the device. A row with fewer than ``num``
    chunks gets numbers for missing chunks too, at least 0.
    """
    first = int_if_equal(first)
    if not isinstance(first, Tensor):
        return first
    return (first[:, None] + step * torch.arange(num, device="cpu")).clamp(min=0).to(device, non_blocking=True)


def _read_documents(layout: Layout, lengths: Tensor, device: torch.device) -> Reading:
    """The `Reading` of packed documents of ``lengths`` tokens, int64 CPU ``[n]``.

    Only chunks that close before their document ends are pooled, because no query sees the entries of other chunks.
    """
    rule, S = layout.rule, layout.num_summary
    num_tokens, starts = int(lengths.sum()), lengths.cumsum(0) - lengths
    per_document = rule.visible_entries(rule.closed(lengths)) // rule.entries
    num = int(per_document.sum())
    document = torch.arange(len(lengths), device="cpu").repeat_interleave(per_document)
    numbers = torch.arange(num, device="cpu") - (per_document.cumsum(0) - per_document)[document]
    columns = starts[document] + numbers * rule.chunk
    # with summary="prompt" a document's last queries weigh all of its chunks
    looks_ahead = layout.lookahead is not None
    ends = (starts + lengths)[document] if looks_ahead else columns + rule.chunk + layout.summary_delay
    begins = torch.maximum(ends - S, starts[document])
    columns, numbers, begins, ends = torch.stack([columns, numbers, begins, ends]).to(device, non_blocking=True)
    summaries = SummaryColumns(begins, ends, S) if S > 0 and num > 0 else None
    spans = document_spans(rule, lengths, device)
    return Reading(num_tokens, ChunkRange(0, num, num, columns[None], numbers[None]), summaries, spans)


def run_planned(
    method: Method,
    run: Callable[..., tuple[Tensor, Tensor | None]],
    tensors: tuple[Tensor, ...],
    cu_seqlens: Tensor | None,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Call ``run(*tensors, plan)`` for padded rows or packed documents.

    tensors: queries first, ``[B, heads, L, width]`` each. run returns out ``[B, H, L, Dv]`` and lse or None; it is
    called once per document if the method does not read them together.
    Raises ValueError for cu_seqlens or padding that do not fit the queries, and if both are given.
    """
    q, L = tensors[0], tensors[0].shape[2]
    if cu_seqlens is None:
        return run(*tensors, ForwardPlan(L, None if padding is None else L - check_padding(padding, q)))
    if padding is not None:
        raise ValueError("cu_seqlens and padding exclude each other, got both")
    lengths = check_cu_seqlens(cu_seqlens, q.shape[0], L)
    if method.reads_packed:
        return run(*tensors, ForwardPlan(L, documents=lengths))
    documents = zip(*(x.split(lengths, dim=2) for x in tensors), strict=True)
    results = [run(*document, ForwardPlan(document[0].shape[2])) for document in documents if document[0].shape[2]]
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([out for out, _ in results], dim=2), torch.cat(lses, dim=2) if lses else None
