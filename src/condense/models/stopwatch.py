"""The clock of comparisons and benchmarks: the time at which each token of a model is ready."""

import itertools
import time
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class Stopwatch(StoppingCriteria):
    """A stopping criterion that notes the time of each token and never stops."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [now(device)]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """As `note`."""
        self.note()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self) -> None:
        """Note the time of one more token."""
        self.times.append(now(self.device))

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[1] - self.times[0]

    @property
    def further_s(self) -> list[float]:
        """Seconds of each further token."""
        return [b - a for a, b in itertools.pairwise(self.times[1:])]


def now(device: torch.device) -> float:
    """Seconds, once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
