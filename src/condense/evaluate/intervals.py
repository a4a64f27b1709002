"""Figures with 95 % intervals: shares of right answers, and a setting beside dense attention, with the bars for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_Z = 1.959963984540054  # of a 95 % interval
# most that a setting may lose: nats on a kind of token; a net share of a task, and its paired 95 % bound
MOST_NATS, MOST_LOST, MOST_BOUND = 0.01, 0.01, 0.02
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
        """The share of True among outcomes; NaN, with the interval 0 to 1, if there are none."""
        right, total = sum(outcomes), len(outcomes)
        if total == 0:
            return cls(0, 0, math.nan, 0.0, 1.0)
        share = right / total
        middle = (share + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
        half = _Z / (1 + _Z**2 / total) * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
        return cls(right, total, share, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class Cell:
    """Nats above dense attention on a kind of token, or the lost share of what dense attention finds.

    low, high: paired 95 % interval, by resampling texts. dense: its loss, or share found. n: tokens or questions.
    """

    value: float
    low: float
    high: float
    dense: float
    n: int

    @classmethod
    def of(cls, arm: np.ndarray, dense: np.ndarray, weight: np.ndarray, *, relative: bool) -> Self:
        """Make a cell of numbers per text, each ``[texts]``: losses (relative: right answers) of the setting, ``arm``,
        and of dense attention, and the number of tokens (of questions).
        """
        draws = np.random.default_rng(0).integers(len(arm), size=(_RESAMPLES, len(arm)))
        draws = np.concatenate([np.arange(len(arm))[None], draws])
        a, d, w = (x[draws].sum(1) for x in (arm, dense, weight))
        values = 1 - a / np.maximum(d, 1) if relative else (a - d) / np.maximum(w, 1)
        low, high = np.percentile(values[1:], [2.5, 97.5])
        n = int(weight.sum())
        return cls(float(values[0]), float(low), float(high), float(dense.sum() / n), n)

    def passes(self, task: bool) -> bool:
        """True if a setting meets the bar in this cell."""
        if task:
            return self.value <= MOST_LOST and self.high <= MOST_BOUND
        return self.value <= MOST_NATS
