"""The tables of the page: rows by label, or runs, to Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean

from readings import Row, Runs, by_label


def methods(rows: Mapping[str, Sequence[Row]]) -> str:
    head = ("", "device", "host", "numbers found", "text loss above dense", "second half", "last 512 tokens")
    cells = []
    for label, of in sorted(rows.items(), key=lambda item: -mean(row.share for row in item[1])):
        shares = [_range([row[i] for row in of], "{:.1%}") for i in (0, 1)]
        losses = [_range([getattr(row, name) for row in of], "{:+.3f}") for name in ("above", "half", "last")]
        seeds = "" if len(of) == max(map(len, rows.values())) else f" ({len(of)} seeds)"
        cells.append((label + seeds, *shares, _range([row.found for row in of], "{:.3f}"), *losses))
    return _table(head, cells)


def chosen(runs: Runs) -> str:
    """What the calibration gave each layer, by goal and seed, and what that seed's model lost."""
    head = ("", "seed", "device", "host", "found, of dense's", "text loss", "second half", "layers")
    cells = []
    for run in runs:
        rows = {label: of[0] for label, of in by_label([run]).items()}
        for label, text in run["choices"].items():
            if label.startswith("calibrated"):
                row = rows[label]
                shares = (f"{row.share:.1%}", f"{row.host:.1%}", f"{row.found / rows['dense'].found:.3f}")
                cells.append((label, str(run["seed"]), *shares, f"{row.above:+.3f}", f"{row.half:+.3f}", _short(text)))
        for place, record in run["goals"].items():
            missed = {goal: text for goal, text in record.items() if isinstance(text, str)}
            cells += [(f"calibrated, {place}, {goal}", str(run["seed"]), *[""] * 5, missed[goal]) for goal in missed]
    return _table(head, sorted(cells, key=lambda row: (*_goal(row[0]), row[1])))


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


def training(runs: Runs) -> str:
    cells = []
    for run in runs:
        for phase in run["phases"]:
            last = phase["history"][-1]
            cells.append((str(run["seed"]), f"{phase['length']:,}", f"{phase['steps']:,}", f"{last['dense_loss']:.3f}",
                          f"{last.get('dense_answer_accuracy', 0):.3f}"))  # fmt: skip
    return _table(("seed", "tokens", "steps", "loss in training", "answers right in training"), cells)


def _range(values: Sequence[float], form: str) -> str:
    """Mean, and the least and the greatest where they differ."""
    low, middle, high = (form.format(x) for x in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
