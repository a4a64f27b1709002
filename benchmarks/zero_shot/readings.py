"""What result files say of one seed under one method, by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Runs = Sequence[Mapping[str, Any]]


class Row(NamedTuple):
    """One seed. share, host: of the dense cache's bytes. found: of the numbers. Losses in nats above dense attention:
    of all tokens, of the second half and of the last tokens.
    """

    share: float
    host: float
    found: float
    above: float
    half: float
    last: float


def by_label(runs: Runs) -> dict[str, list[Row]]:
    """Rows by the methods' labels, in the order of the runs."""
    rows: dict[str, list[Row]] = {}
    for run in runs:
        dense, found = run["text"][0], {entry["name"]: entry["exact"]["share"] for entry in run["retrieval"]}
        for text in run["text"]:
            losses = [text["loss"] - dense["loss"], *_parts(text, dense)]
            rows.setdefault(text["name"], []).append(Row(*run["shares"][text["name"]], found[text["name"]], *losses))
    return rows


def _parts(text: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[float, float]:
    """Of the second half, and of its last tokens: loss above dense attention."""
    above = [a["loss"] - b["loss"] for a, b in zip(text["by_position"], dense["by_position"], strict=True)]
    tokens = [part["stop"] - part["start"] for part in text["by_position"]]
    return (above[1] * tokens[1] + above[2] * tokens[2]) / (tokens[1] + tokens[2]), above[2]
