"""The tables of `docs/studies/recall-settings.md`: settings of Recall in models that were not trained for it.

A table stands between ``<!-- zero-shot ARCHITECTURE LENGTH -->`` and ``<!-- /zero-shot -->``. Its rows are those that
stand there, by their labels; what follows the labels is written anew. How many groups must be open stands between
``<!-- needed groups -->`` and ``<!-- /needed groups -->``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from needed import TARGET, needed, predicted

_BLOCK = re.compile(r"(<!-- zero-shot (\S+) (\d+) -->\n)(.*?)(<!-- /zero-shot -->)", re.DOTALL)
_NEEDED = re.compile(r"(<!-- needed groups -->\n).*?(<!-- /needed groups -->)", re.DOTALL)
_PLAIN = re.compile(r"recall r=\d+")
_LENGTHS = ("4096", "16384")
_ARCHITECTURES = {"llama": "one KV head per query head", "gqa4": "four query heads per KV head"}
_HEAD = "| | numbers found | text loss above dense | second half of the text |\n|---|---|---|---|\n"


def fill(page: Path, document: Mapping[str, Any]) -> None:
    """Write the tables of the page anew. Raises ValueError for a row or a table that was not measured."""
    found = _by_row(document["results"]["runs"])

    def table(block: re.Match[str]) -> str:
        before, architecture, length, old, after = block.groups()
        labels = [line.split("|")[1].strip() for line in old.splitlines() if line.startswith("| ")][1:]
        rows = [f"| {label} | {' | '.join(_cells(found, (architecture, length, _key(label))))} |\n" for label in labels]
        return before + _HEAD + "".join(rows) + after

    text = _BLOCK.sub(table, page.read_text(encoding="utf-8"))
    text = _NEEDED.sub(lambda block: block[1] + _needed_groups(found) + block[2], text)
    page.write_text(text, encoding="utf-8")


def _key(label: str) -> str:
    return label.replace("`", "")


def _by_row(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[tuple[float, float, float, float]]]:
    """Per architecture, length and method one tuple per seed: found, loss, loss above dense, the second half's."""
    rows = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["run"]["name"]):
        if "retrieval" not in run:
            continue
        _, architecture, length, _ = run["run"]["name"].split("-")
        dense = run["text"][0]
        for found, text in zip(run["retrieval"], run["text"], strict=True):
            above = _second_half(text, int(length)) - _second_half(dense, int(length))
            row = (found["exact"]["share"], text["loss"], text["loss"] - dense["loss"], above)
            rows[architecture, length, found["name"]].append(row)
    return rows


def _second_half(text: Mapping[str, Any], length: int) -> float:
    parts = [part for part in text["by_position"] if part["start"] >= length // 2]
    tokens = [part["stop"] - part["start"] for part in parts]
    return sum(part["loss"] * n for part, n in zip(parts, tokens, strict=True)) / sum(tokens)


def _needed_groups(found: Mapping[tuple[str, str, str], Sequence[Sequence[float]]]) -> str:
    """By architecture and length, one number per seed."""
    heads = ["", *(f"{int(length):,} tokens" for length in _LENGTHS), f"{TARGET:,}, predicted"]
    rows = [heads, ["---"] * len(heads)]
    for architecture, name in _ARCHITECTURES.items():
        by_length = []
        for length in _LENGTHS:
            labels = {label for *place, label in found if place == [architecture, length] and _PLAIN.fullmatch(label)}
            losses = {int(label[len("recall r=") :]): found[architecture, length, label] for label in labels}
            seeds = range(len(found[architecture, length, "dense"]))
            by_length.append([needed([(r, of[seed][3]) for r, of in sorted(losses.items())]) for seed in seeds])
        far = [predicted([*zip(map(int, _LENGTHS), of, strict=True)]) for of in zip(*by_length, strict=True)]
        rows.append([name, *(", ".join("?" if r is None else f"{r:.0f}" for r in of) for of in (*by_length, far))])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(found: Mapping[tuple[str, str, str], Sequence[Sequence[float]]], key: tuple[str, str, str]) -> list[str]:
    if key not in found:
        raise ValueError(f"results: no run of {' '.join(key)}")
    shares, losses, above, half = zip(*found[key], strict=True)
    first = _range(shares, "{:.3f}")
    if key[2] == "dense":
        return [first, f"0 (loss {mean(losses):.3f})", "0"]
    return [first, _range(above, "{:+.3f}"), _range(half, "{:+.3f}")]


def _range(values: Sequence[float], form: str) -> str:
    """Mean, and the least and the greatest where they differ."""
    low, middle, high = (form.format(x) for x in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
