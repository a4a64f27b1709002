"""Figures that result files hold of one seed under one method, by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KNOWN = "knowing the question"

Runs = Sequence[Mapping[str, Any]]


class Row(NamedTuple):
    """One seed. share, host: of the dense cache's bytes. found: of the numbers. Losses in nats above dense attention:
    of all tokens, of the second half and of the last tokens; None where the method was not measured so.
    """

    share: float
    host: float
    found: float
    above: float | None
    half: float | None
    last: float


def by_label(runs: Runs) -> dict[str, list[Row]]:
    """Rows by the methods' labels, in the order of the runs."""
    rows: dict[str, list[Row]] = {}
    for run in runs:
        dense, found = run["text"][0], {entry["name"]: entry["exact"]["share"] for entry in run["retrieval"]}
        for text in run["text"]:
            if text is dense and run["part"] != runs[0]["part"]:
                continue  # dense attention's row is there from the first part
            losses = [text["loss"] - dense["loss"], *_parts(text, dense)]
            rows.setdefault(text["name"], []).append(Row(*run["shares"][text["name"]], found[text["name"]], *losses))
        for entry in run.get("continued", [])[1:]:
            last = entry["loss"] - run["continued"][0]["loss"]
            shares = run["shares"][entry["name"]]
            rows.setdefault(entry["name"], []).append(Row(*shares, entry["found"], None, None, last))
            if entry["name"].startswith("snapkv"):
                known = Row(*shares, entry["found_asked_in_prompt"], None, None, last)
                rows.setdefault(f"{entry['name']}, {KNOWN}", []).append(known)
    return rows


def _parts(text: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[float, float]:
    """Loss above dense attention, in the second half of the text and in its last tokens."""
    above = [a["loss"] - b["loss"] for a, b in zip(text["by_position"], dense["by_position"], strict=True)]
    tokens = [part["stop"] - part["start"] for part in text["by_position"]]
    return (above[1] * tokens[1] + above[2] * tokens[2]) / (tokens[1] + tokens[2]), above[2]
