"""How long a model takes under an allocation: to its first token after a prompt, and for each further one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.methods import Method
from condense.models import use
from condense.models.stopwatch import timed_generate

STEPS = 16  # tokens after the first, of which the median is taken
# after a first reading to warm up a short prompt is read three times, one that takes longer than the first number of
# seconds once, and longer than the second not again
_LONG_S, _VERY_LONG_S = 3.0, 20.0


class Times(NamedTuple):
    """first_s: seconds to the first token. step_s: seconds of each further one."""

    first_s: float
    step_s: float


class TimeTable:
    """Times of plain `generate`, batch 1: measured of the allocations that it is given, reckoned of all others.

    An allocation that was not measured takes the mean over its layers of what the model takes with that layer's method
    in all of them: exact where layers are alike and a step takes as long as its layers together.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, length: int) -> None:
        """ids ``[n]``: a text, repeated up to ``length`` tokens, of which the last are made."""
        self._model = model
        size = max(1, length - STEPS)
        self._ids = ids.repeat(-(-size // len(ids)))[None, :size].to(model.device)
        self._known: dict[frozenset[tuple[int, Method]], Times | None] = {}

    def measure(self, allocation: Mapping[int, Method]) -> None:
        """Take the times of an allocation, None where the device has too little memory for it."""
        with use(self._model, allocation):
            try:
                times: Times | None = self._read()
            except torch.OutOfMemoryError:
                times = None
        self._known[frozenset(allocation.items())] = times
        if self._ids.device.type == "cuda":
            torch.cuda.empty_cache()

    def of(self, allocation: Mapping[int, Method]) -> Times | None:
        """An allocation's times, None where they cannot be known."""
        key = frozenset(allocation.items())
        if key in self._known:
            return self._known[key]
        each = [self._known.get(frozenset(dict.fromkeys(allocation, m).items())) for m in allocation.values()]
        known = [times for times in each if times is not None]
        if len(known) < len(each):
            return None
        return Times(*(statistics.mean(values) for values in zip(*known, strict=True)))

    def _read(self) -> Times:
        watches = [timed_generate(self._model, self._ids, STEPS)]
        if watches[0].first_s <= _VERY_LONG_S:
            runs = 1 if watches[0].first_s > _LONG_S else 3
            watches = [timed_generate(self._model, self._ids, STEPS) for _ in range(runs)]
        first = statistics.median(watch.first_s for watch in watches)
        return Times(first, statistics.median(step for watch in watches for step in watch.further_s))
