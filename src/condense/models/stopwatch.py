"""The clock of comparisons and benchmarks: the time at which each token of a model is ready."""

import itertools
import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList


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


def timed_generate(model: PreTrainedModel, ids: Tensor, steps: int, **settings: Any) -> Stopwatch:
    """The times of plain greedy ``model.generate`` of ids ``[B, L]``, the first new token and ``steps`` more.

    settings: further ones of `generate`. Those of the model (beams, penalties, tokens that end a text) are not used.
    """
    watch, own = Stopwatch(ids.device), model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            max_new_tokens=steps + 1,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([watch]),
            **settings,
        )
    finally:
        model.generation_config = own
    return watch


def now(device: torch.device) -> float:
    """Seconds, once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
