"""`docs/zero-shot.md` from result files: tables and pictures where ``page.md`` asks for them.

``{{methods ARCHITECTURE LENGTH}}`` stands for a table of methods and calibrated allocations, ``{{calibrated ...}}`` for
one of the latter alone, ``{{chosen ...}}``, ``{{adapted ...}}``, ``{{heads ...}}`` and ``{{opened ARCHITECTURE}}`` for
tables too, ``{{picture ...}}`` for a picture of the first, ``{{fit ARCHITECTURE}}``, ``{{training ARCHITECTURE}}`` and
``{{origin}}`` for text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from needed import Opened, fits
from rows import GROUP, WINDOW

from condense.plots import plot_lines

_PLACE = re.compile(r"\{\{(\w+) ?([^}]*)\}\}")
# lines of the picture, and the beginnings of the labels that belong to each
_LINES = {
    "calibrated, host store": "calibrated, host",
    "calibrated, no host store": "calibrated, device",
    "window": "window",
    "CCA": "cca g=",
    "SnapKV": "snapkv",
    "dense cache in fewer bits": "dense cache",
}


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


Runs = Sequence[Mapping[str, Any]]


def write_page(results: Sequence[Path], output: Path) -> None:
    """Write the page, and its pictures into ``images`` beside it."""
    documents = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in results]
    runs = [run for document in documents for run in document["runs"]]

    def pick(part: str, architecture: str, length: str = "") -> Runs:
        found = [run for run in runs if run["part"] == part and run["architecture"] == architecture]
        found = [run for run in found if not length or run["length"] == int(length)]
        if not found:
            raise ValueError(f"results: no runs of {part} {architecture} {length}")
        return sorted(found, key=lambda run: run["seed"])

    def rows(architecture: str, length: str) -> dict[str, list[Row]]:
        return _by_label([*pick("methods", architecture, length), *pick("calibrated", architecture, length)])

    def picture(architecture: str, length: str) -> str:
        name = f"zero-shot-{architecture}-{length}.png"
        _draw(rows(architecture, length), output.parent / "images" / name)
        return f"![Loss above dense attention by bytes on the device](images/{name})"

    makers: Mapping[str, Callable[..., str]] = {
        "methods": lambda *of: _methods(rows(*of)),
        "calibrated": lambda *of: _methods(_by_label(pick("calibrated", *of))),
        "adapted": lambda *of: _methods(_by_label(pick("adapted", *of))),
        "chosen": lambda *of: _chosen(pick("calibrated", *of)),
        "heads": lambda *of: _heads(pick("heads", *of)),
        "opened": lambda *of: _opened(pick("opened", *of)),
        "fit": lambda *of: _fit(pick("opened", *of)),
        "training": lambda *of: _training(pick("training", *of)),
        "picture": picture,
        "origin": lambda: _origin(results, documents),
    }
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    output.write_text(_PLACE.sub(lambda place: makers[place[1]](*place[2].split()), page), encoding="utf-8")


def _by_label(runs: Runs) -> dict[str, list[Row]]:
    """Rows by the methods' labels, in the order of the runs."""
    rows: dict[str, list[Row]] = {}
    among_methods = any(run["part"] == "methods" for run in runs)
    for run in runs:
        dense, found = run["text"][0], {entry["name"]: entry["exact"]["share"] for entry in run["retrieval"]}
        for text in run["text"]:
            if text is dense and run["part"] == "calibrated" and among_methods:
                continue  # the same numbers stand there
            losses = [text["loss"] - dense["loss"], *_parts(text, dense)]
            rows.setdefault(text["name"], []).append(Row(*run["shares"][text["name"]], found[text["name"]], *losses))
        for entry in run.get("continued", [])[1:]:
            last = entry["loss"] - run["continued"][0]["loss"]
            shares = run["shares"][entry["name"]]
            rows.setdefault(entry["name"], []).append(Row(*shares, entry["found"], None, None, last))
            if entry["name"].startswith("snapkv"):
                known = Row(*shares, entry["found_asked_in_prompt"], None, None, last)
                rows.setdefault(entry["name"] + ", knowing the question", []).append(known)
    return rows


def _parts(text: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[float, float]:
    """Of the second half, and of its last tokens: loss above dense attention."""
    above = [a["loss"] - b["loss"] for a, b in zip(text["by_position"], dense["by_position"], strict=True)]
    tokens = [part["stop"] - part["start"] for part in text["by_position"]]
    return (above[1] * tokens[1] + above[2] * tokens[2]) / (tokens[1] + tokens[2]), above[2]


def _methods(rows: Mapping[str, Sequence[Row]]) -> str:
    head = ("", "device", "host", "numbers found", "text loss above dense", "second half", "last 512 tokens")
    cells = []
    for label, of in sorted(rows.items(), key=lambda item: -mean(row.share for row in item[1])):
        shares = [_range([row[i] for row in of], "{:.1%}") for i in (0, 1)]
        losses = [_range([getattr(row, name) for row in of], "{:+.3f}") for name in ("above", "half", "last")]
        seeds = "" if len(of) == max(map(len, rows.values())) else f" ({len(of)} seeds)"
        cells.append((label + seeds, *shares, _range([row.found for row in of], "{:.3f}"), *losses))
    return _table(head, cells)


def _chosen(runs: Runs) -> str:
    """What the calibration gave each layer, by goal and seed, and what that seed's model lost."""
    head = ("", "seed", "device", "host", "found, of dense's", "text loss", "second half", "layers")
    cells = []
    for run in runs:
        rows = {label: of[0] for label, of in _by_label([run]).items()}
        for label, text in run["choices"].items():
            if label.startswith("calibrated"):
                row = rows[label]
                shares = (f"{row.share:.1%}", f"{row.host:.1%}", f"{row.found / rows['dense'].found:.3f}")
                cells.append((label, str(run["seed"]), *shares, f"{row.above:+.3f}", f"{row.half:+.3f}", _short(text)))
        for place, record in run["goals"].items():
            missed = {goal: text for goal, text in record.items() if isinstance(text, str)}
            cells += [(f"calibrated, {place}, {goal}", str(run["seed"]), *[""] * 5, missed[goal]) for goal in missed]
    return _table(head, sorted(cells))


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


def _heads(runs: Runs) -> str:
    head = ("KV heads that recall", "one by one: divergence", "found", "whole layers: divergence", "found")
    cells = []
    for points in zip(*(run["points"] for run in runs), strict=True):
        row = [str(points[0]["heads"])]
        for order in ("by_head", "by_layer"):
            of = [point[order] for point in points if order in point]
            row += [_range([x[key] for x in of], form) for key, form in (("kl", "{:.4f}"), ("found", "{:.3f}"))]
        cells.append(row)
    return _table(head, cells)


def _opened(runs: Runs) -> str:
    """Per length and number of open groups."""
    head = ("tokens", "groups", "open", "numbers found, of dense's", "text loss above dense", "second half")
    cells = []
    for length in sorted({run["length"] for run in runs}):
        rows = _by_label([run for run in runs if run["length"] == length])
        dense = rows.pop("dense")
        for label, of in rows.items():
            found = [row.found / stock.found for row, stock in zip(of, dense, strict=True)]
            losses = [_range([getattr(row, name) for row in of], "{:+.3f}") for name in ("above", "half")]
            groups = (length - WINDOW) // GROUP
            cells.append((f"{length:,}", f"{groups:,}", label.removeprefix("r="), _range(found, "{:.3f}"), *losses))
    return _table(head, cells)


def _fit(runs: Runs) -> str:
    """Groups that must be open by length, and what follows for 128K tokens."""
    measured = []
    for run in runs:
        rows = _by_label([run])
        points = [(int(label.removeprefix("r=")), of[0].half) for label, of in rows.items() if label != "dense"]
        measured.append(Opened(run["seed"], run["length"], points))
    cells = []
    for length in sorted({one.length for one in measured}):
        needed = [one.needed() for one in measured if one.length == length]
        share = [r * GROUP / (length - WINDOW) for r in needed if r is not None]
        cells.append(
            (f"{length:,}", _range(needed, "{:.1f}"), _range(share, "{:.1%}"), f"{len(share)} of {len(needed)}")
        )
    exponents, predicted = zip(*fits(measured), strict=True)
    table = _table(("tokens", "open groups for 0.01 nats", "of all", "seeds that come to it"), cells)
    line = f"A power of the length through each seed's: exponent {_range(exponents, '{:.2f}')}"
    return f"{table}\n\n{line}; at 131,072 tokens it says {_range(predicted, '{:.0f}')} open groups."


def _training(runs: Runs) -> str:
    cells = []
    for run in runs:
        for phase in run["phases"]:
            last = phase["history"][-1]
            cells.append((str(run["seed"]), f"{phase['length']:,}", f"{phase['steps']:,}", f"{last['dense_loss']:.3f}",
                          f"{last.get('dense_answer_accuracy', 0):.3f}"))  # fmt: skip
    return _table(("seed", "tokens", "steps", "loss in training", "answers right in training"), cells)


def _draw(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Numbers found, and the loss of the last tokens above dense attention, by bytes on the device."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for title, value in (
        ("numbers found", lambda row: row.found),
        ("loss of the last 512 tokens above dense", lambda row: row.last),
    ):
        panels[title] = {}
        for name, begin in _LINES.items():
            of = [found for label, found in rows.items() if label.startswith(begin) and "knowing" not in label]
            points = sorted((100 * mean(r.share for r in found), mean(map(value, found))) for found in of)
            if points:
                panels[title][name] = ([x for x, _ in points], [y for _, y in points])
    plot_lines(panels, path, x_label="bytes on the device, % of a dense cache", y_label="")


def _origin(results: Sequence[Path], documents: Sequence[Mapping[str, Any]]) -> str:
    """Where the numbers come from; which commit each file is of."""
    measured = documents[0]["measured"]
    files = ", ".join(
        f"`benchmarks/results/{path.name}` (commit {document['measured']['commit'][:11]})"
        for path, document in zip(results, documents, strict=True)
    )
    software = f"torch {measured['torch']}, transformers {measured['transformers']}"
    return f"{measured['device']}, {software}, bfloat16, {measured['date'][:10]}; {files}"


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
