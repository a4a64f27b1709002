"""The open groups that a small loss needs, by seed and length, and what follows for longer texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

BOUND = 0.01  # nats above dense attention, in the second half of the texts
TARGET = 131_072  # tokens

# (open groups, loss of the second half above dense attention), by open groups, ascending
Points = Sequence[tuple[int, float]]


def needed(points: Points) -> float | None:
    """Open groups at which the loss comes down to `BOUND`, by a line between two that were measured, over the logarithm
    of the groups; None if it does so at none of them.
    """
    for (r0, y0), (r1, y1) in pairwise(points):
        if y0 > BOUND >= y1:
            return math.exp(math.log(r0) + math.log(r1 / r0) * (y0 - BOUND) / (y0 - y1))
    return None


def predicted(groups: Sequence[tuple[int, float | None]]) -> float | None:
    """Open groups for `TARGET` tokens, by the power of the length that fits what is needed at these lengths best (least
    squares of logarithms); None if it is known at fewer than two.
    """
    known = [(math.log(length), math.log(r)) for length, r in groups if r is not None]
    if len(known) < 2:
        return None
    slope, level = np.polyfit(*zip(*known, strict=True), 1)
    return math.exp(level + slope * math.log(TARGET))
