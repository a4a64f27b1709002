"""Entries on two scales: chunks become fine entries, and old fine entries are merged into few coarse ones.

A fine entry stands for a chunk of c tokens. Behind a window of its own, n fine entries in a row become one coarse
entry, their mean. So a query sees coarse entries of the oldest tokens, fine ones of nearer tokens, and the newest
tokens one by one; every token once. Of fine entries only the newest are kept, in a ring.

Shapes: B rows, K KV heads, L queries, G coarse entries of n fine ones each, D and Dv widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.spans import ArraySpans, Hull, RuleSpans, Span, UniformRule
from condense.ops.tensors.per_row import IntT, PerRow, broadcast_rows
from condense.ops.types import Chunks


class Coarse(NamedTuple):
    """The coarse entries of a method.

    chunks: n, the chunks that one coarse entry stands for. window: number of newest tokens that no coarse entry stands
    for, at least the window of exact tokens and two chunks more. bias: added to the scaled scores of coarse entries.
    """

    chunks: int
    window: int
    bias: float = 0.0


@dataclass(frozen=True)
class CoarseRule:
    """The rule of three sources: coarse entries, fine ones, the window (a `condense.ops.spans.SpanRule`)."""

    fine: UniformRule
    coarse: Coarse

    @property
    def _of_coarse(self) -> UniformRule:
        return UniformRule(self.fine.chunk * self.coarse.chunks, self.coarse.window)

    def spans(self, seen: IntT) -> list[tuple[IntT, IntT]]:
        """Spans of coarse entries, of the fine entries of later closed chunks, and of the window; see `SpanRule`."""
        merged, [(_, closed), window] = self._of_coarse.closed(seen), self.fine.spans(seen)
        return [(seen * 0, merged), (merged * self.coarse.chunks, closed), window]

    @property
    def made_by(self) -> tuple[UniformRule, int]:
        """The rule and the delay by which coarse entries are made, one chunk of tokens before queries see them."""
        return self._of_coarse, self.coarse.window - self.fine.chunk

    def made(self, seen: IntT) -> IntT:
        """Coarse entries that exist once ``seen`` tokens are read."""
        rule, delay = self.made_by
        return rule.pooled(seen, delay)

    def fine_slots(self, summary_delay: int, spare: int) -> int:
        """Fine entries to keep, so that ``spare`` tokens can be taken back: a multiple of n, as kernels expect."""
        n = self.coarse.chunks
        kept = -(-(self.coarse.window - summary_delay + spare) // self.fine.chunk) + n + 1
        return -(-kept // n) * n


@dataclass(frozen=True)
class CoarseSpans(RuleSpans):
    """Spans of a `CoarseRule`. fine_start: number of the entry in column 0 of the fine source; an int or ``[B]``."""

    fine_start: PerRow = field(default=0, kw_only=True)

    def at(self, start: int, stop: int, device: torch.device) -> list[Span]:
        """Spans of queries ``[start, stop)``, one per source, as `RuleSpans.at`."""
        coarse, (lo, hi), window = super().at(start, stop, device)
        first = broadcast_rows(self.fine_start, 3, device)
        return [coarse, Span((lo - first).clamp(min=0), (hi - first).clamp(min=0)), window]

    def _hulls(self, blocks: Sequence[tuple[int, int]]) -> list[list[Hull]]:
        if self.same_in_all_rows() is None or isinstance(self.fine_start, Tensor):
            on_host = torch.device("cpu")
            spans = (ArraySpans(tuple(self.at(start, stop, on_host))) for start, stop in blocks)
            return [each.hulls([(0, stop - start)])[0] for each, (start, stop) in zip(spans, blocks, strict=True)]
        first = self.fine_start
        return [
            [coarse, Hull(max(0, fine.lo - first), max(0, fine.hi - first)), window]
            for coarse, fine, window in super()._hulls(blocks)
        ]


def merged(chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Coarse entries of G runs of fine ones, keys ``[B, K, G, D]`` and values ``[B, K, G, Dv]``: their means."""
    k, v = (x.mean(3, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype) for x in chunks.tokens())
    return k, v
