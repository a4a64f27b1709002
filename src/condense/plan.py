"""The numbers that all layers of one forward share: computed by the first layer, handed to the others.

Shapes: B rows, L new tokens, c tokens per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from condense.methods import Method
from condense.ops import RuleSpans, SummarySpans
from condense.ops.tensors.per_row import PerRow, as_rows, int_if_equal, max_row
from condense.ops.tensors.sampling import Sample, sampled_queries
from condense.state import LayerState, prompt_entries


class Reading(NamedTuple):
    """Which chunks are pooled when new tokens are read, and what each query sees, for one method and one state.

    seen: real tokens per row afterwards. Chunks ``[first_chunk, last_chunk)`` of each row are pooled now, num_chunks in
    the row with most; chunk_column: the column of the window where they begin. summaries: the queries that weigh them,
    None if no chunk needs any. spans: what each new query sees.
    """

    seen: PerRow
    first_chunk: PerRow
    last_chunk: PerRow
    num_chunks: int
    chunk_column: PerRow
    summaries: SummarySpans | None
    spans: RuleSpans


class ForwardPlan:
    """L new tokens per row, the last ``counts`` of which are real; the rest is padding on the left.

    counts: int64 CPU ``[B]``, None: all are real. Layers with the same method and the same numbers of tokens in their
    states share one `Reading`; layers with the same sampling settings share one `Sample`.
    """

    def __init__(self, num_tokens: int, counts: Tensor | None = None) -> None:
        self.num_tokens = num_tokens
        self.counts = counts
        self.padding: PerRow = 0 if counts is None else int_if_equal(num_tokens - counts)
        # Keyed by the numbers of a state (see `_identity`): rows that differ have a tensor, which all layers got from
        # the `Reading` of the forward before.
        self._readings: dict[tuple[int, ...], tuple[Reading, object]] = {}
        self._samples: dict[tuple[object, ...], Sample] = {}

    @property
    def has_padding(self) -> bool:
        """True if any row has padding."""
        return isinstance(self.padding, Tensor) or self.padding > 0

    def tokens(self, num_rows: int) -> Tensor:
        """Real tokens per row, int64 CPU ``[B]``."""
        return as_rows(self.num_tokens - self.padding, num_rows)

    def without_padding(self, x: Tensor) -> Tensor:
        """x ``[B, K, L, D]`` with zeros in the padding."""
        if not self.has_padding:
            return x
        column = torch.arange(self.num_tokens)
        pad = (column < as_rows(self.padding, x.shape[0])[:, None]).to(x.device)
        return x.masked_fill(pad[:, None, :, None], 0)

    def sample(self, num_rows: int, num_recent: int, num_random: int, seed: int, device: torch.device) -> Sample:
        """See `condense.ops.tensors.sampling.sampled_queries`."""
        key = (num_rows, num_recent, num_random, seed, device)
        if key not in self._samples:
            tokens = self.tokens(num_rows)
            self._samples[key] = sampled_queries(tokens, self.num_tokens, num_recent, num_random, seed, device)
        return self._samples[key]

    def reading(self, method: Method, state: LayerState | None) -> Reading:
        """The `Reading` of the new tokens after a state, None before the first ones."""
        if torch.compiler.is_compiling():
            return self._read(method, state)
        key = (id(method), *(() if state is None else map(_identity, (state.seen, state.prompt_tokens))))
        if state is not None:
            key = (*key, state.window_k.shape[2])
        known = self._readings.get(key)
        if known is None:
            # kept alive beside the reading, so that no other object gets the ids in the key
            numbers = None if state is None else (state.seen, state.prompt_tokens)
            known = self._readings[key] = (self._read(method, state), (method, numbers))
        return known[0]

    def _read(self, method: Method, state: LayerState | None) -> Reading:
        layout = method.layout
        rule, delay, S = layout.rule, layout.summary_delay, layout.num_summary
        before: PerRow = 0 if state is None else state.seen
        num_window = 0 if state is None else state.window_k.shape[2]
        seen = int_if_equal(before + (self.num_tokens - self.padding))
        window_start = seen - (num_window + self.num_tokens)
        first, last = rule.pooled(before, delay), rule.pooled(seen, delay)
        num = max_row(last - first)
        summaries = None
        if S > 0 and num > 0:
            # with summary="prompt" one summary, of the prompt's last queries, weighs all chunks; else each has its own
            whole = layout.lookahead is not None and state is None
            start, count = (seen, 1) if whole else ((first + 1) * rule.chunk + delay, num)
            summaries = SummarySpans(start - S, before, seen, count, S, rule.chunk)
        num_prompt = prompt_entries(method, 0 if state is None else state.prompt_tokens)
        spans = RuleSpans(rule, seen - self.num_tokens, window_start, self.padding, num_prompt)
        return Reading(seen, first, last, num, first * rule.chunk - window_start, summaries, spans)


def _identity(x: PerRow) -> int:
    """An int itself, or the negated id of a tensor, which no number of tokens equals."""
    return -id(x) if isinstance(x, Tensor) else x
