"""Bootstrap intervals of figures that are computed from a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
_AT_ONCE = 2**22  # numbers drawn at a time


@dataclass(frozen=True)
class Interval:
    """A figure of n samples with its 95 % interval: percentiles of the same figure over resamples with replacement."""

    value: float
    low: float
    high: float
    n: int


def bootstrap(values: Sequence[Any], figure: Callable[[Sequence[Any]], float] | None = None, seed: int = 0) -> Interval:
    """A figure of the values, by default their mean, with its interval; the same arguments give the same interval.

    values: one per sample. figure: computes the figure from values; None: their mean, so that values are numbers.
    Raises ValueError if there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("values: wanted at least one, got none")
    rng = np.random.default_rng(seed)
    if figure is None:
        array = np.asarray(values, np.float64)
        at_once = max(1, min(RESAMPLES, _AT_ONCE // n))
        parts = [at_once] * (RESAMPLES // at_once) + ([RESAMPLES % at_once] if RESAMPLES % at_once else [])
        means = np.concatenate([array[rng.integers(n, size=(part, n))].mean(1) for part in parts])
        value = float(array.mean())
    else:
        draws = rng.integers(n, size=(RESAMPLES, n))
        means = np.array([figure([values[index] for index in draw]) for draw in draws])
        value = float(figure(values))
    if n == 1 or not np.isfinite(means).all():
        return Interval(value, math.nan, math.nan, n)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(value, float(low), float(high), n)
