"""Figures with 95 % intervals: shares of right answers, and a setting beside dense attention, with the bars for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_Z = 1.959963984540054  # of a 95 % interval
# nats on a kind of token; net share of a task that may be lost, and its paired 95 % bound
MOST_NATS, MOST_LOST, MOST_BOUND = 0.01, 0.01, 0.02
LEAST_FOUND = 0.6  # of dense attention, for a task to count
_RESAMPLES = 2000


@dataclass(frozen=True)
class Proportion:
    """A share of right answers with its 95 % Wilson interval ``[low, high]``, which is valid near 0 and 1 too."""

    right: int
    total: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Self:
        """From single outcomes. Without any, the share is NaN and the interval 0 to 1."""
        right, total = sum(outcomes), len(outcomes)
        if total == 0:
            return cls(0, 0, math.nan, 0.0, 1.0)
        share = right / total
        middle = (share + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
        half = _Z / (1 + _Z**2 / total) * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
        return cls(right, total, share, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class Cell:
    """Nats above dense attention on a kind of token, or the share lost of what it finds.

    low, high: paired 95 % interval, by resampling texts. dense: its loss, or the share that it finds. n: tokens or
    questions.
    """

    value: float
    low: float
    high: float
    dense: float
    n: int

    @classmethod
    def of_losses(cls, arm: np.ndarray, dense: np.ndarray, tokens: np.ndarray) -> Self:
        """From sums of losses and numbers of tokens per text, each ``[texts]``, with tokens in every text."""
        n = int(tokens.sum())
        return cls(*_paired(arm, dense, tokens, relative=False), float(dense.sum() / n), n)

    @classmethod
    def of_answers(cls, arm: np.ndarray, dense: np.ndarray, questions: np.ndarray) -> Self:
        """From right answers and questions per text, each ``[texts]``."""
        n = int(questions.sum())
        return cls(*_paired(arm, dense, questions, relative=True), float(dense.sum() / n), n)

    def passes(self, task: bool) -> bool:
        """True if a setting meets the bar in this cell."""
        if task:
            return self.value <= MOST_LOST and self.high <= MOST_BOUND
        return self.value <= MOST_NATS


def _paired(arm: np.ndarray, dense: np.ndarray, weight: np.ndarray, relative: bool) -> tuple[float, float, float]:
    """Difference of two means, or the share lost, of sums ``[texts]``, with its interval over resampled texts."""
    draws = np.random.default_rng(0).integers(len(arm), size=(_RESAMPLES, len(arm)))
    draws = np.concatenate([np.arange(len(arm))[None], draws])
    a, d, w = (x[draws].sum(1) for x in (arm, dense, weight))
    values = 1 - a / np.maximum(d, 1) if relative else (a - d) / np.maximum(w, 1)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return float(values[0]), float(low), float(high)
