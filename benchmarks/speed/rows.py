"""Rows of a benchmark and their files: operations, ratios, and the length from which condensing pays.

Rows are plain mappings, as in result files, so that a fresh run and a file read back are treated alike.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from condense.results import device_name, refuse_existing

Row = Mapping[str, Any]

# operations by name, with their titles
OPS = {
    "forward": "attention, forward",
    "backward": "attention, forward and backward",
    "layer": "layer: pooling and attention, forward",
    "decode": "attention of one decode step",
}
# operations whose dense baseline has another name
_DENSE: dict[str | None, str] = {"layer": "forward"}


def op_kind(op: str) -> str:
    """The operation, one of `OPS`: ``decode_b8`` is a decode step with another batch size than a run's other rows."""
    return op.partition("_b")[0]


def op_title(op: str) -> str:
    """An operation in words."""
    kind, _, batch = op.partition("_b")
    return OPS[kind] + (f", {batch} rows at once" if batch else "")


def check_names(argument: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names, each once. Raises ValueError for one that is not ``known``."""
    names, known = tuple(dict.fromkeys(names)), tuple(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{argument} must be of {', '.join(known)}; got {name!r}")
    return names


def first_line(error: BaseException) -> str:
    """An error in one line, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def speedups(row: Row, rows: Iterable[Row], figure: str) -> dict[str, float]:
    """Medians of a figure of the row's baselines over its own, by their runners; of those that have both.

    Baselines are dense rows of the same operation and length. FlexAttention with a mask is the baseline of that mask's
    methods alone, and not of their layers, as it pools nothing.
    """
    op, found = row.get("op"), {}
    for other in rows:
        mask = other.get("mask")
        same = (other.get("op"), other["length"], other["condensed"]) == (_DENSE.get(op, op), row["length"], False)
        if same and (mask is None or (mask == row["mask"] and op != "layer")) and other.get(figure) and row.get(figure):
            found[other["runner"]] = other[figure]["median_ms"] / row[figure]["median_ms"]
    return found


def crossover(ratios: Mapping[int, float]) -> int | None:
    """The smallest measured length from which on no ratio is below 1; None if it is below at the largest one."""
    ahead = list(itertools.takewhile(lambda length: ratios[length] >= 1, sorted(ratios, reverse=True)))
    return ahead[-1] if ahead else None


def milliseconds(ms: float) -> str:
    """A time in the unit that suits it."""
    number, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms") if ms >= 1 else (ms * 1e3, "us")
    return f"{number:#.3g} {unit}".replace(". ", " ")


def result_path(folder: Path, kind: str, what: str, device: torch.device) -> Path:
    """``bench-<kind>-<what>-<device>-<UTC time>.json``, in a folder that is made. Raises ValueError if it cannot be."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().partition(",")[0]).strip("-")
    path = folder / f"bench-{kind}-{what}-{name}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}.json"
    refuse_existing(path, "results")
    folder.mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
    return path
