"""`docs/adaptation.md` from result files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from arms import ARMS, MEASURED

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # by arm, one per seed
LEARNED = 0.9  # of the answers right in training


def write_page(results: Sequence[Path], shape: Path | None, output: Path) -> None:
    """Fill ``page.md`` with the tables of ``results`` (lists of documents) and of the shape's measurement."""
    documents = [document for path in results for document in json.loads(path.read_text(encoding="utf-8"))]
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in ARMS}
    for document in sorted(documents, key=lambda document: document["results"]["seed"]):
        found[document["results"]["arm"]].append(document["results"])
    found = {name: runs for name, runs in found.items() if runs}
    first = next(iter(found.values()))[0]
    origin, phase = documents[0]["provenance"], first["phase"]
    parts = {
        "STEPS": f"{phase['steps']:,}",
        "BASE_STEPS": f"{first['base_steps']:,}",
        "TOKENS": f"{phase['steps'] * phase['batch_size'] * phase['sequence_length'] / 1e6:.1f}",
        "SEEDS": str(max(len(runs) for runs in found.values())),
        "ORIGIN": f"{origin['device']}, torch {origin['torch']}, transformers {origin['transformers']}, "
        f"{origin['date'][:10]}; files: {', '.join(f'`{path.name}`' for path in [*results, *filter(None, [shape])])}",
        "ARMS": _arms(found),
        "CURVES": _curves(found),
        "POSITIONS": _positions(found),
        "CHANGED": _changed(found),
        "SHAPE": "" if shape is None else _shape(json.loads(shape.read_text(encoding="utf-8"))["results"]),
    }
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    output.write_text(page, encoding="utf-8")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(head), "|" + "---|" * len(head), *map(_row, rows)])


def _each(values: Sequence[float | None], digits: int) -> str:
    return ", ".join("never" if value is None else f"{value:.{digits}f}" for value in values)


def _measured(run: Mapping[str, Any], what: str, name: str) -> Mapping[str, Any]:
    (entry,) = (entry for entry in run[what] if entry["name"] == name)
    return entry


def _found(run: Mapping[str, Any], name: str) -> float:
    return _measured(run, "retrieval", name)["exact"]["share"]


def _arms(found: Results) -> str:
    rows = []
    for arm, runs in found.items():
        own = "dense" if arm == "dense" else "condensed"
        cells = [ARMS[arm].title, _each([_learned(run) for run in runs], 0)]
        for name in dict.fromkeys((own, "dense")):
            cells += [
                _each([_found(run, name) for run in runs], 3),
                _each([_measured(run, "text", name)["loss"] for run in runs], 3),
            ]
        cells += ["", ""] if own == "dense" else []
        cells.append(f"{mean(run['trained'] for run in runs) / 1e6:.2f}M")
        rows.append(cells)
    head = ("", "learned at step", "found", "text loss", "found, dense side", "text loss, dense side", "trained")
    return _table(head, rows)


def _accuracy(entry: Mapping[str, Any]) -> float | None:
    return entry.get("condensed_answer_accuracy", entry.get("dense_answer_accuracy"))


def _learned(run: Mapping[str, Any]) -> int | None:
    return next((entry["step"] for entry in run["history"] if (_accuracy(entry) or 0) >= LEARNED), None)


def _curves(found: Results) -> str:
    steps = [entry["step"] for entry in next(iter(found.values()))[0]["history"]]
    chosen = [steps[round(share * len(steps)) - 1] for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    rows = []
    for arm, runs in found.items():
        at = [{entry["step"]: _accuracy(entry) for entry in run["history"]} for run in runs]
        rows.append([ARMS[arm].title, *(_each([curve.get(step) for curve in at], 2) for step in chosen)])
    return _table(["share of answers right in training at step", *map(str, chosen)], rows)


def _positions(found: Results) -> str:
    edges = _measured(next(iter(found.values()))[0], "text", "condensed")["by_position"]
    head = ["text loss, condensed", *(f"{part['start']} to {part['stop'] - 1}" for part in edges)]
    rows = []
    for arm, runs in found.items():
        own = "dense" if arm == "dense" else "condensed"
        by = [_measured(run, "text", own)["by_position"] for run in runs]
        rows.append([ARMS[arm].title, *(_each([parts[i]["loss"] for parts in by], 3) for i in range(len(edges)))])
    return _table(head, rows)


def _changed(found: Results) -> str:
    names = [name for name in MEASURED if name != "dense"]
    head = ["found; text loss", *("as trained" if name == "condensed" else name for name in names)]
    rows = []
    for arm, runs in found.items():
        cells = [
            f"{_each([_found(run, name) for run in runs], 3)}; "
            f"{_each([_measured(run, 'text', name)['loss'] for run in runs], 3)}"
            for name in names
        ]
        rows.append([ARMS[arm].title, *cells])
    return _table(head, rows)


def _shape(content: Mapping[str, Any]) -> str:
    rows = [
        [row["name"], f"{min(row['tokens_per_second'][1:]):,}", f"{row['peak_gib']:.1f} GiB"] for row in content["rows"]
    ]
    return _table([f"{content['length']:,} tokens, {content['layers']} layers", "tokens/s", "peak memory"], rows)
