"""Rows of a benchmark: their names, ratios between them, and the length from which condensing pays.

Rows are plain mappings, as in result files, so that a fresh run and a file read back are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

OPS = ("forward", "backward", "pooling", "layer", "decode")
_TITLES = {
    "forward": "attention, forward",
    "backward": "attention, forward and backward",
    "pooling": "pooling, forward",
    "layer": "layer: pooling and attention, forward",
    "decode": "attention of one decode step",
}


def decode_op(batch: int) -> str:
    """The name of rows of a decode step with another batch size than a run's other rows have."""
    return f"decode_b{batch}"


def op_kind(op: str) -> str:
    """The operation, one of `OPS`, without its batch size."""
    return op.partition("_b")[0]


def op_title(op: str) -> str:
    """An operation in words."""
    batch = op.partition("_b")[2]
    return _TITLES[op_kind(op)] + (f", {batch} rows at once" if batch else "")


def reference_op(op: str) -> str | None:
    """The operation whose baselines a condensed one is held against; None for what dense attention does not have."""
    return {"layer": "forward", "pooling": None}.get(op, op)


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


def with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A kernel's rows, each condensed one with ``speedup``: baseline's median over its own, per baseline.

    Pooling also has ``of_attention``, its time over that of the attention that follows, and DGA's attention and layer
    have ``per_key``: their time per visible key over that of each CCA's attention.
    """
    return [
        {**row, "speedup": _speedups(row, rows), **_beside(row, rows)} if row["condensed"] else dict(row)
        for row in rows
    ]


def _speedups(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    reference = reference_op(row["op"])
    if reference is None:
        return {}
    baselines = [
        other
        for other in rows
        if (other["op"], other["length"], other["condensed"]) == (reference, row["length"], False)
        # FlexAttention with our mask does not pool, so it is no baseline of the layer
        and (other["mask"] is None or (other["mask"] == row["mask"] and row["op"] != "layer"))
    ]
    return speedups(row, baselines, "times")


def speedups(row: Row, baselines: Iterable[Row], time: str) -> dict[str, float]:
    """Baselines' medians over the row's, of the figure ``time``, by their runners; of those that have both."""
    if not row.get(time):
        return {}
    return {
        other["runner"]: other[time]["median_ms"] / row[time]["median_ms"] for other in baselines if other.get(time)
    }


def _beside(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    if not row.get("times"):
        return {}
    attention = [
        other
        for other in rows
        if (other["op"], other["length"], other["condensed"]) == ("forward", row["length"], True)
        and other.get("backend") == row.get("backend")
        and other.get("times")
    ]
    if row["op"] == "pooling":
        ratios = [_ms(row) / _ms(other) for other in attention if other["runner"] == row["runner"]]
        return {"of_attention": ratios[0]} if ratios else {}
    if row["op"] in ("forward", "layer") and row["method"]["method"] == "dga":
        plain = [other for other in attention if other["method"]["method"] == "cca"]
        return {
            "per_key": {other["runner"]: _ms(row) / row["pairs"] / (_ms(other) / other["pairs"]) for other in plain}
        }
    return {}


def _ms(row: Row) -> float:
    return float(row["times"]["median_ms"])


def crossover(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """The length from which ours stays faster, by straight lines between measured points on log scales.

    The smallest measured length if ours is faster everywhere; None if it is not at the largest, or nothing is shared.
    """
    lengths = sorted(set(ours) & set(theirs))
    gain = {length: math.log(theirs[length] / ours[length]) for length in lengths}
    if not lengths or gain[lengths[-1]] < 0:
        return None
    slower = [i for i, length in enumerate(lengths) if gain[length] < 0]
    if not slower:
        return float(lengths[0])
    low, high = lengths[slower[-1]], lengths[slower[-1] + 1]
    share = -gain[low] / (gain[high] - gain[low])
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def crossovers(
    rows: Sequence[Row], dense: Sequence[str], *, op: str | None = None, time: str = "times"
) -> dict[str, float | None]:
    """Per condensed runner the length from which it is faster than the fastest runner of ``dense``.

    op: the operation, of a kernel's rows. Runners that share no length with the dense ones are left out.
    """
    baseline = medians(rows, dense, op=op and reference_op(op), time=time)
    ours = {
        name: medians(rows, [name], op=op, time=time)
        for name in dict.fromkeys(row["runner"] for row in rows if row["condensed"])
    }
    return {name: crossover(mine, baseline) for name, mine in ours.items() if mine.keys() & baseline.keys()}


def medians(
    rows: Iterable[Row], runners: Sequence[str], *, op: str | None = None, time: str = "times"
) -> dict[int, float]:
    """Per length the fastest median of these runners, milliseconds; of one operation, and of the figure ``time``."""
    best: dict[int, float] = {}
    for row in rows:
        if row.get("op") == op and row["runner"] in runners and row.get(time):
            best[row["length"]] = min(best.get(row["length"], math.inf), row[time]["median_ms"])
    return best
