"""How many groups must be open: what `Recall` loses by length and open groups, and what follows for longer texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

BOUND = 0.01  # nats above dense attention, in the second half of the texts
_TARGET = 131_072


class Opened(NamedTuple):
    """One seed at one length. points: by open groups, ascending: loss of the second half above dense attention."""

    seed: int
    length: int
    points: Sequence[tuple[int, float]]

    def needed(self) -> float | None:
        """Open groups at which the loss comes down to `BOUND`, by a line between two that were measured, over the
        logarithm; None if it does so at none of them.
        """
        for (r0, y0), (r1, y1) in pairwise(self.points):
            if y0 > BOUND >= y1:
                return math.exp(math.log(r0) + math.log(r1 / r0) * (y0 - BOUND) / (y0 - y1))
        return None


def fits(measured: Sequence[Opened]) -> list[tuple[float, float]]:
    """Per seed whose needed groups are known at two lengths or more: the exponent of the power of the length that fits
    them best (least squares of logarithms), and the groups that it predicts for 128K tokens.
    """
    found = []
    for _, of in groupby(sorted(measured, key=lambda one: (one.seed, one.length)), key=lambda one: one.seed):
        known = [(math.log(one.length), math.log(r)) for one in of if (r := one.needed()) is not None]
        if len(known) > 1:
            slope, level = np.polyfit(*zip(*known, strict=True), 1)
            found.append((float(slope), math.exp(level + slope * math.log(_TARGET))))
    return found
