"""What filling a size of the cache gains, by the losses of single layers in result files; not measured whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from rows import POOLED, SHARES, calibrations
from transformers import PreTrainedModel

import condense
from condense import Dense
from condense.calibration.allocate import best_within, greedy_path
from condense.models import described
from condense.models.inspect import inspect


class Sums(NamedTuple):
    """Of one allocation: the losses of its layers alone, added up, on text and on answers."""

    text: float
    answers: float


def sums(run: Mapping[str, Any], place: str) -> dict[float, tuple[Sums, ...]]:
    """By size that something fits into: the first allocation on the path that does, and the one that loses least.

    Of the candidates that the run measured. Sizes are those of the bundled model, whose heads are as wide: shares of
    the cache do not depend on how many heads there are.
    """
    lost = {(of["layer"], of["method"]): of for of in run["goals"][place]["layers"]}
    layers = sorted({layer for layer, _ in lost})
    known = {method for _, method in lost}
    candidates = [
        method
        for method in calibrations(run["length"], 2, 0, POOLED)[place][0].candidates
        if isinstance(method, Dense) or described(method) in known
    ]
    kept = [inspect(_bundled(), method, run["length"])[0] for method in candidates]
    sizes = {layer: [row.bytes for row in kept] for layer in layers}

    def by_layer(kind: str) -> dict[int, list[float]]:
        return {
            layer: [0.0 if isinstance(m, Dense) else lost[layer, described(m)][kind][0] for m in candidates]
            for layer in layers
        }

    text, answers = by_layer("kl"), by_layer("answers_kl")
    costs = {i: [a + b for a, b in zip(text[i], answers[i], strict=True)] for i in layers}

    def total(of: Mapping[int, list[Any]], allocation: Mapping[int, int]) -> Any:
        return sum(of[layer][number] for layer, number in allocation.items())

    path, found = greedy_path(costs, sizes), {}
    for share in SHARES:
        room = int(share * len(layers) * kept[0].dense_bytes)
        if total(sizes, path[-1]) <= room:
            first = next(each for each in path if total(sizes, each) <= room)
            both = (first, best_within(costs, sizes, room))
            found[share] = tuple(Sums(total(text, each), total(answers, each)) for each in both)
    return found


@cache
def _bundled() -> PreTrainedModel:
    return condense.demo_model()[0].bfloat16()
