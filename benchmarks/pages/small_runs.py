"""Figures of one model under one method, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Runs = Mapping[str, Mapping[str, Any]]

LEARNED = 0.9  # share of the training answers
SEEDS = (0, 1, 2)
WINDOW = 128  # of the methods that these models were trained with


@dataclass(frozen=True)
class Figures:
    """One model under one method, over seeds: means with the smallest and largest where there are several.

    learned: steps after which `LEARNED` of the training answers were right, seed by seed; "" if the method is not what
    the model was trained with.
    """

    runs: int
    learned: str
    retrieval: str
    loss: str
    accuracy: str
    entries: str


def figures_of(runs: Runs, prefix: str, method: str) -> Figures:
    """Figures of the runs whose names begin with ``prefix``, evaluated with the method of that label."""
    entries: list[int] = []
    learned: list[str] = []
    found: dict[str, list[float]] = {"retrieval": [], "loss": [], "accuracy": []}
    for run in of_seeds(runs, prefix):
        text = named(run["text"], method)
        if text is None:
            continue
        found["loss"].append(text["loss"])
        found["accuracy"].append(text["accuracy"])
        numbers = named(run.get("retrieval", []), method)
        if numbers is not None:
            found["retrieval"].append(numbers["exact"]["share"])
        entries.append(text["seen"])
        if method == "own":
            learned.append(learned_at(run["history"]))
    return Figures(
        len(entries), "; ".join(learned),
        spread(found["retrieval"], 3), spread(found["loss"], 3), spread(found["accuracy"], 4),
        f"{entries[0]:,}" if entries else "",
    )  # fmt: skip


def learned_at(history: Sequence[Mapping[str, Any]]) -> str:
    """The first logged step of a phase of one kind in which so many answers were right, or "never"."""
    shares = {
        entry["step"]: value for entry in history for name, value in entry.items() if name.endswith("_answer_accuracy")
    }
    return next((f"{step:,}" for step, share in shares.items() if share >= LEARNED), "never")


def of_seeds(runs: Runs, prefix: str) -> list[Mapping[str, Any]]:
    """The runs that differ in their seeds only, in order."""
    return [runs[name] for seed in SEEDS if (name := f"{prefix}-s{seed}") in runs]


def named(entries: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """The entry of a list of evaluations that has this label."""
    return next((entry for entry in entries if entry["name"] == name), None)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, with the smallest and largest of several; "" for none."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
