"""What all layers of one forward share, as numbers: made once, handed to every layer.

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
    """What reading new tokens comes to, for one method and one past.

    seen: real tokens per row afterwards. Chunks ``[first_chunk, last_chunk)`` of each row are pooled now, num_chunks in
    the row with most; chunk_column: the column of the window where they begin. summaries: the queries that weigh them,
    None if nothing needs any. spans: who sees what.
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

    counts: int64 CPU ``[B]``, None: all are real. Layers of the same method whose states have read the same share one
    `Reading`; layers whose rows were sampled share one `Sample`.
    """

    def __init__(self, num_tokens: int, counts: Tensor | None = None) -> None:
        self.num_tokens = num_tokens
        self.counts = counts
        self.padding: PerRow = 0 if counts is None else int_if_equal(num_tokens - counts)
        # a state's numbers are an int, or a tensor that the layers got from the same reading
        self._readings: dict[tuple[int, ...], tuple[Reading, object]] = {}
        self._samples: dict[tuple[object, ...], Sample] = {}

    @property
    def has_padding(self) -> bool:
        """True if some row has."""
        return isinstance(self.padding, Tensor) or self.padding > 0

    def tokens(self, num_rows: int) -> Tensor:
        """Real tokens per row, int64 CPU ``[B]``."""
        return as_rows(self.num_tokens - self.padding, num_rows)

    def without_padding(self, x: Tensor) -> Tensor:
        """x ``[B, K, L, D]`` with zeros in the padding, whatever stood there."""
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
        """What reading the new tokens comes to, after a state, None for nothing yet."""
        if torch.compiler.is_compiling():
            return self._read(method, state)
        key = (id(method), *(() if state is None else map(_identity, (state.seen, state.prompt_tokens))))
        if state is not None:
            key = (*key, state.window_k.shape[2])
        known = self._readings.get(key)
        if known is None:
            # the method and the numbers go along, so that nothing else takes on their identities
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
            # a summary of the whole prompt weighs all of its chunks; otherwise each chunk has its own
            whole = layout.lookahead is not None and state is None
            start, count = (seen, 1) if whole else ((first + 1) * rule.chunk + delay, num)
            summaries = SummarySpans(start - S, before, seen, count, S, rule.chunk)
        ahead = prompt_entries(method, 0 if state is None else state.prompt_tokens)
        spans = RuleSpans(rule, seen - self.num_tokens, window_start, self.padding, ahead)
        return Reading(seen, first, last, num, first * rule.chunk - window_start, summaries, spans)


def _identity(x: PerRow) -> int:
    """A number's own value; a tensor's identity, kept apart from all numbers of tokens."""
    return -id(x) if isinstance(x, Tensor) else x
