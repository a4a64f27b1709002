"""The tables of the page: rows by label, or runs, to Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from readings import KNOWN, Row, Runs, by_label
from rows import SHARES

# what is held against each other at equal bytes, and the beginnings of the labels that belong to each
_KINDS = {
    "**calibrated, host store**": "calibrated, host",
    "**calibrated, no host store**": "calibrated, device",
    "`Recall` in all layers, host store": "recall",
    "Quest, host store": "quest",
    "window (StreamingLLM)": "window",
    "SnapKV": "snapkv",
    f"SnapKV, {KNOWN}": "snapkv",
    "pooled: CCA": "cca",
    "pooled: LCA": "lca",
    "pooled: DGA": "dga",
    "dense cache in fewer bits": "dense cache",
}
_SLACK = 0.002  # of the dense cache, by which a size may be exceeded


def methods(rows: Mapping[str, Sequence[Row]]) -> str:
    head = ("", "device", "host", "numbers found", "text loss above dense", "second half", "last 512 tokens")
    cells = []
    for label, of in sorted(rows.items(), key=lambda item: -mean(row.share for row in item[1])):
        shares = [_range([row[i] for row in of], "{:.1%}") for i in (0, 1)]
        losses = [_range([getattr(row, name) for row in of], "{:+.3f}") for name in ("above", "half", "last")]
        seeds = "" if len(of) == max(map(len, rows.values())) else f" ({len(of)} seeds)"
        cells.append((label + seeds, *shares, _range([row.found for row in of], "{:.3f}"), *losses))
    return _table(head, cells)


def equal(rows: Mapping[str, Sequence[Row]]) -> str:
    """Of each kind, at most so many bytes on the device: the row that finds most numbers, and of those that find as
    many within one in a hundred the one that loses least at the end of the texts.
    """
    dense = mean(row.found for row in rows["dense"])
    cells = []
    for kind, begin in _KINDS.items():
        points = [
            (mean(row.share for row in of), mean(row.found for row in of) / dense, mean(row.last for row in of))
            for label, of in rows.items()
            if label.startswith(begin) and (KNOWN in label) == (KNOWN in kind) and not label.endswith("nats")
        ]
        row = [kind]
        for share in SHARES:
            fitting = [(found, last) for size, found, last in points if size <= share + _SLACK]
            most = max((found for found, _ in fitting), default=0.0)
            best = min(((last, found) for found, last in fitting if found >= most - 0.01), default=None)
            row.append("" if best is None else f"{best[1]:.3f}, {best[0]:+.3f}")
        cells.append(row)
    return _table(("", *(f"{share:.0%}" for share in SHARES)), [row for row in cells if any(row[1:])])


def chosen(runs: Runs) -> str:
    """What the calibration gave each layer, by goal and seed, and what that seed's model lost: on the texts of the
    study, and as divergence and numbers on those that the calibration held out.
    """
    head = ("", "seed", "device", "host", "found, of dense's", "text loss", "second half", "held out", "layers")
    cells = []
    for run in runs:
        rows = {label: of[0] for label, of in by_label([run]).items()}
        for label, text in run["choices"].items():
            if label.startswith("calibrated"):
                row = rows[label]
                shares = (f"{row.share:.1%}", f"{row.host:.1%}", f"{row.found / rows['dense'].found:.3f}")
                losses = (f"{row.above:+.3f}", f"{row.half:+.3f}", _held_out(run["goals"], label))
                cells.append((label, str(run["seed"]), *shares, *losses, _short(text)))
        for place, record in run["goals"].items():
            missed = {goal: text for goal, text in record.items() if isinstance(text, str)}
            cells += [(f"calibrated, {place}, {goal}", str(run["seed"]), *[""] * 6, missed[goal]) for goal in missed]
    return _table(head, sorted(cells, key=lambda row: (*_goal(row[0]), row[1])))


def _held_out(goals: Mapping[str, Any], label: str) -> str:
    """Divergence from dense attention, and numbers found of those that it finds."""
    _, place, goal = label.split(", ")
    said = re.fullmatch(r"loses (\S+) nats, finds (\d+) of \d+ \(dense (\d+)\)", goals[place][goal]["held_out"])
    assert said is not None
    return "{}, {} of {}".format(*said.groups())


def _goal(label: str) -> tuple[str, float]:
    """Where tokens lie, and the number that was asked for."""
    place, _, goal = label.rpartition(", ")
    return place, float(goal.rstrip("% nats"))


def _short(text: str) -> str:
    """A described choice: each method by its name and what differs between candidates."""

    def name(part: str) -> str:
        method, _, layers = part.rpartition(" in layers ")
        kind = method.split("(")[0]
        size = re.search(r"group_size=(\d+)", method)
        window = re.search(r"window=(\d+)", method)
        detail = size[1] if size else window[1] if window and kind == "StreamingLLM" else ""
        kind += " without entries" if "unchosen='drop'" in part else ""
        return f"{kind}{' ' + detail if detail else ''}: {layers}"

    return "; ".join(map(name, text.split("; ")))


def heads(runs: Runs) -> str:
    head = ("KV heads that recall", "one by one: divergence", "found", "whole layers: divergence", "found")
    cells = []
    for points in zip(*(run["points"] for run in runs), strict=True):
        row = [str(points[0]["heads"])]
        for order in ("by_head", "by_layer"):
            of = [point[order] for point in points if order in point]
            row += [_range([x[key] for x in of], form) for key, form in (("kl", "{:.4f}"), ("found", "{:.3f}"))]
        cells.append(row)
    return _table(head, cells)


def training(runs: Runs) -> str:
    cells = []
    for run in runs:
        for phase in run["phases"]:
            last = phase["history"][-1]
            cells.append((str(run["seed"]), f"{phase['length']:,}", f"{phase['steps']:,}", f"{last['dense_loss']:.3f}",
                          f"{last.get('dense_answer_accuracy', 0):.3f}"))  # fmt: skip
    return _table(("seed", "tokens", "steps", "loss in training", "answers right in training"), cells)


def _range(values: Sequence[float | None], form: str) -> str:
    """Mean, and the least and the greatest where they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, middle, high = (form.format(x) for x in (min(known), mean(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
