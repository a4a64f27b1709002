"""Shares of right answers with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True)
class Proportion:
    """A share of right answers with its 95 % Wilson interval ``[low, high]``, which is valid near 0 and 1 too."""

    right: int
    total: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> "Proportion":
        """From single outcomes. Without any, the share is NaN and the interval 0 to 1."""
        right, total = sum(outcomes), len(outcomes)
        if total == 0:
            return cls(0, 0, math.nan, 0.0, 1.0)
        share = right / total
        middle = (share + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
        half = _Z / (1 + _Z**2 / total) * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
        return cls(right, total, share, max(0.0, middle - half), min(1.0, middle + half))
