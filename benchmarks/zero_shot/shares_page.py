"""`docs/zero-shot.md` from result files: tables where ``page.md`` asks for them.

``{{calibrated ARCHITECTURE LENGTH}}`` stands for a table of what calibrated allocations keep, ``{{chosen ...}}`` for
one of what they gave each layer, ``{{training ARCHITECTURE}}`` for one of the training, and ``{{origin}}`` for text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tables
from readings import Runs, by_label

_PLACE = re.compile(r"\{\{(\w+) ?([^}]*)\}\}")


def write_page(results: Sequence[Path], output: Path) -> None:
    """Write the page. Raises ValueError for runs that it asks for and the results lack."""
    documents = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in results]
    runs = [run for document in documents for run in document["runs"]]

    def pick(part: str, architecture: str, length: str = "") -> Runs:
        found = [run for run in runs if run["part"] == part and run["architecture"] == architecture]
        found = [run for run in found if not length or run["length"] == int(length)]
        if not found:
            raise ValueError(f"results: no runs of {part} {architecture} {length}")
        return sorted(found, key=lambda run: run["seed"])

    makers: Mapping[str, Callable[..., str]] = {
        "calibrated": lambda *of: tables.methods(by_label(pick("calibrated", *of))),
        "chosen": lambda *of: tables.chosen(pick("calibrated", *of)),
        "training": lambda *of: tables.training(pick("training", *of)),
        "origin": lambda: _origin(results, documents),
    }
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    output.write_text(_PLACE.sub(lambda place: makers[place[1]](*place[2].split()), page), encoding="utf-8")


def _origin(results: Sequence[Path], documents: Sequence[Mapping[str, Any]]) -> str:
    """Where the numbers come from; which commit each file is of."""
    measured = documents[0]["measured"]
    files = ", ".join(
        f"`benchmarks/results/{path.name}` (commit {document['measured']['commit'][:11]})"
        for path, document in zip(results, documents, strict=True)
    )
    software = f"torch {measured['torch']}, transformers {measured['transformers']}"
    return f"{measured['device']}, {software}, bfloat16, {measured['date'][:10]}; {files}"
