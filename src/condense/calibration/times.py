"""Times of a model under an allocation: to its first token after a prompt, and for each further one."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from condense.methods import Method
from condense.models import use
from condense.models.stopwatch import timed_generate

STEPS = 16  # tokens after the first; their median time counts
_LONG_S = 3.0  # a prompt that takes longer is timed once, others three times; one reading before warms up


@dataclass(frozen=True)
class Times:
    """first_s: seconds to the first token. step_s: seconds of each further one. measured: not reckoned from others."""

    first_s: float
    step_s: float
    measured: bool


class TimeTable:
    """Times of plain greedy `generate`, batch 1: measured of the allocations that it is given, reckoned of all others.

    An allocation that was not measured takes the mean over its layers of what the model takes with that layer's method
    in all of them: exact where layers are alike and a step takes as long as its layers together.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, length: int) -> None:
        """ids ``[n]``: a text, repeated up to ``length`` tokens, of which the last `STEPS` + 1 are made."""
        self._model = model
        size = max(1, length - STEPS - 1)
        self._ids = ids.repeat(-(-size // len(ids)))[None, :size].to(model.device)
        self._known: dict[frozenset[tuple[int, Method]], Times | None] = {}

    def measure(self, allocation: Mapping[int, Method]) -> None:
        """Take the times of an allocation, None where there is too little memory for it."""
        key = frozenset(allocation.items())
        if key in self._known:
            return
        times: Times | None = None
        with use(self._model, allocation):
            try:
                times = self._read()
            except RuntimeError as error:
                # of PyTorch's allocators: of a device, of the host, and of pinned memory
                said = str(error).lower()
                is_known = isinstance(error, torch.OutOfMemoryError)
                if not (is_known or "out of memory" in said or "can't allocate memory" in said):
                    raise
        self._known[key] = times
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
        first_s, step_s = (statistics.mean(getattr(times, name) for times in known) for name in ("first_s", "step_s"))
        return Times(first_s, step_s, measured=False)

    def _read(self) -> Times:
        cold = timed_generate(self._model, self._ids, STEPS)
        runs = 1 if cold.first_s > _LONG_S else 3
        watches = [timed_generate(self._model, self._ids, STEPS) for _ in range(runs)]
        first_s = statistics.median(watch.first_s for watch in watches)
        step_s = statistics.median(step for watch in watches for step in watch.further_s)
        return Times(first_s, step_s, measured=True)
