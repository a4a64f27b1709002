"""`docs/studies/zero-shot.md` from result files: tables and a picture where ``page.md`` asks for them.

``{{table PART ARCHITECTURE LENGTH}}`` stands for a table of what a part of the study measured, of several parts as
``methods+calibrated``. Of such parts ``{{goals ...}}`` is a table of the study's goals, ``{{overall ...}}`` one of them
over several runs, each as ``PARTS/ARCHITECTURE/LENGTH/FILE``, ``{{equal ...}}`` one of the best of each kind at equal
bytes, and ``{{picture ...}}`` a picture. ``{{chosen ARCHITECTURE LENGTH}}`` stands for a table of what calibrated
allocations gave each layer, ``{{heads ...}}`` for one of `Recall` in single KV heads, ``{{opened ARCHITECTURE}}`` for
one of `Recall` by open groups, ``{{needed ARCHITECTURE ...}}`` for one of the groups that must be open, ``{{training
ARCHITECTURE}}`` for one of the training, and ``{{origin}}`` for text. Each is of the first result file that has it all;
after the length a file may be named by a part of its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import shares_tables
from readings import KNOWN, Row, Runs, by_label

from condense.plots import plot_lines

_PLACE = re.compile(r"\{\{(\w+) ?([^}]*)\}\}")
# lines of the picture, and the beginnings of the labels that belong to each
_LINES = {
    "calibrated, host store": "calibrated, host",
    "calibrated, no host store": "calibrated, device",
    "Recall in all layers": "recall drop, more open",
    "window": "window",
    "SnapKV": "snapkv",
    "dense cache in fewer bits": "dense cache",
}


def write_page(results: Sequence[Path], output: Path) -> None:
    """Write the page, and its picture beside it. Raises ValueError for runs that it asks for and the
    results lack.
    """
    documents = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in results]

    def pick(parts: str, architecture: str, length: str = "", file: str = "") -> Runs:
        for path, document in zip(results, documents, strict=True):
            runs = [run for run in document["runs"] if run["architecture"] == architecture]
            runs = [run for run in runs if not length or run.get("length") == int(length)]
            found = [[run for run in runs if run["part"] == part] for part in parts.split("+")]
            if file in path.name and all(found):
                return [run for of in found for run in sorted(of, key=lambda run: run["seed"])]
        raise ValueError(f"results: no runs of {parts} {architecture} {length} {file}".rstrip())

    def picture(parts: str, architecture: str, length: str, *file: str) -> str:
        name = f"zero-shot-{architecture}-{length}.png"
        _draw(by_label(pick(parts, architecture, length, *file)), output.parent / name)
        return f"![Loss above dense attention by bytes on the device]({name})"

    makers: Mapping[str, Callable[..., str]] = {
        "table": lambda *of: shares_tables.methods(by_label(pick(*of))),
        "equal": lambda *of: shares_tables.equal(by_label(pick(*of))),
        "goals": lambda *of: shares_tables.goals(pick(*of)),
        "overall": lambda *of: shares_tables.overall([pick(*one.split("/")) for one in of]),
        "chosen": lambda *of: shares_tables.chosen(pick("calibrated", *of)),
        "heads": lambda *of: shares_tables.heads(pick("heads", *of)),
        "opened": lambda *of: shares_tables.opened(pick("opened", *of)),
        "needed": lambda *of: shares_tables.needed({name: pick("opened", name) for name in of}),
        "training": lambda *of: shares_tables.training(pick("training", *of)),
        "picture": picture,
        "origin": lambda: _origin(results, documents),
    }
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    output.write_text(_PLACE.sub(lambda place: makers[place[1]](*place[2].split()), page), encoding="utf-8")


def _draw(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Numbers found, and the loss of the last tokens above dense attention, by bytes on the device."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for title, value in (
        ("numbers found", lambda row: row.found),
        ("loss of the last 512 tokens above dense", lambda row: row.last),
    ):
        panels[title] = {}
        for name, begin in _LINES.items():
            labels = [label for label in rows if label.startswith(begin) and not label.endswith((KNOWN, "nats"))]
            of = [rows[label] for label in labels]
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
