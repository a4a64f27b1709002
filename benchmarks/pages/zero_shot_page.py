"""`docs/studies/zero-shot.md`: tables and a picture where ``zero-shot.md`` asks for them.

``{{table PART ARCHITECTURE LENGTH}}`` stands for a table of what a part of the study measured, of several parts as
``methods+calibrated``. Of such parts ``{{overall ...}}`` is a table of the study's goals over several runs, each as
``PARTS/ARCHITECTURE/LENGTH/FILE``, ``{{equal ...}}`` one of the best of each kind at equal bytes, and
``{{picture ...}}`` a picture. ``{{needed ARCHITECTURE ...}}`` stands for a table of the groups that must be open, and
``{{origin}}`` for text. Each is of the first document that has it all; after the length a document may be named by a
part of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import zero_shot_tables
from readings import KNOWN, Row, Runs, by_label
from stored import Documents

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


def write_page(documents: Documents, output: Path) -> None:
    """Write the page, and its picture beside it. Raises ValueError for runs that it asks for and the results lack."""

    def pick(parts: str, architecture: str, length: str = "", file: str = "") -> Runs:
        for name, document in documents.items():
            runs = [run for run in document["results"]["runs"] if run["architecture"] == architecture]
            runs = [run for run in runs if not length or run.get("length") == int(length)]
            found = [[run for run in runs if run["part"] == part] for part in parts.split("+")]
            if file in name and all(found):
                return [run for of in found for run in sorted(of, key=lambda run: run["seed"])]
        raise ValueError(f"results: no runs of {parts} {architecture} {length} {file}".rstrip())

    def picture(parts: str, architecture: str, length: str, *file: str) -> str:
        name = f"zero-shot-{architecture}-{length}.png"
        _draw(by_label(pick(parts, architecture, length, *file)), output.parent / name)
        return f"![Loss above dense attention by bytes on the device]({name})"

    makers: Mapping[str, Callable[..., str]] = {
        "table": lambda *of: zero_shot_tables.methods(by_label(pick(*of))),
        "equal": lambda *of: zero_shot_tables.equal(by_label(pick(*of))),
        "overall": lambda *of: zero_shot_tables.overall([pick(*one.split("/")) for one in of]),
        "needed": lambda *of: zero_shot_tables.needed({name: pick("opened", name) for name in of}),
        "picture": picture,
        "origin": lambda: _origin(documents),
    }
    page = Path(__file__).with_name("zero-shot.md").read_text(encoding="utf-8")
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


def _origin(documents: Documents) -> str:
    """The sources of the numbers: the documents, each with its commit, and the software."""
    measured = next(iter(documents.values()))["results"]["measured"]
    names = ", ".join(
        f"`{name}` (commit {document['results']['measured']['commit'][:11]})" for name, document in documents.items()
    )
    software = f"torch {measured['torch']}, transformers {measured['transformers']}"
    return f"{measured['device']}, {software}, bfloat16, {measured['date'][:10]}; {names}"
