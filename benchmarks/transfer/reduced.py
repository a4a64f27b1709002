"""One compact result document from the records of a study: every cell, not every text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from cells import TASKS, Cell, cells, read

import condense

_LEARNED = 4.0  # nats of the last record of training, above which a model's rows say nothing and are left out
_SIZES = ("device", "host_store", "read")


def reduced(folder: Path, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The document: per model its size, training and rows.

    A row has the bytes of an arm as shares of dense attention's, and per class of tokens and per task ``[value, low,
    high, dense, n]`` of `cells.Cell`; kl: divergence from dense attention, nats per token of the second half, mean over
    texts of prose; failed: those above the bar.
    adapted: steps and tokens by form, if the study is that of adapting. calibrated: allocations by arm.
    """
    models = [
        _model(path) for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith(("-training", "-adapting"))
    ]
    return {"provenance": dict(provenance), "results": {"models": models}}


def _model(path: Path) -> dict[str, Any]:
    records, training = _lines(path), path.with_name(f"{path.stem}-training.jsonl")
    about = next(record for record in records if "parameters" in record)
    model: dict[str, Any] = {name: about[name] for name in ("make", "seed", "parameters")}
    if training.exists():  # not where the weights of an earlier run were read
        steps = [step for step in _lines(training) if "loss" in step]
        model["trained"] = {
            "seconds": round(next(x["trained_seconds"] for x in records if "trained_seconds" in x), 1),
            "steps": steps[-1]["step"], "tokens": steps[-1]["tokens"],
            "loss": [round(steps[i]["loss"], 3) for i in (0, -1)],
        }  # fmt: skip
        if steps[-1]["loss"] > _LEARNED:
            return model
    model |= next(({"calibrated": record["calibrated"]} for record in records if "calibrated" in record), {})
    adapting = path.with_name(f"{path.stem}-adapting.jsonl")
    if adapting.exists():
        # the last record of each form
        forms = {step["form"]: step for step in _lines(adapting)}
        model["adapted"] = {form: {name: step[name] for name in ("step", "tokens")} for form, step in forms.items()}
    model["rows"] = [
        {"arm": arm, "length": length}
        | {size: round(record[size], 4) for size in _SIZES if record.get(size) is not None}
        | _row(cells(record, by_arm["dense"]))
        | {"kl": round(float(np.mean([text["kl"] for text in record["prose"]])), 5)}
        for (_, length), by_arm in sorted(read([path]).items())
        for arm, record in by_arm.items()
    ]
    return model


def _row(found: Mapping[str, Cell]) -> dict[str, Any]:
    values = {
        name: [*(round(x, 4) for x in (cell.value, cell.low, cell.high, cell.dense)), cell.n]
        for name, cell in found.items()
    }
    return values | {"failed": [name for name, cell in found.items() if not cell.passes(name in TASKS)]}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(file: Path, folder: Path, *, study: str, device: str, commit: str) -> None:
    """Add a run to a file of documents by name, ``STUDY-DATE``: when its first model began to train."""
    records = [record for path in folder.glob("*.jsonl") for record in _lines(path)]
    began = datetime.fromtimestamp(min(record["time"] for record in records), UTC)
    provenance = {
        "condense": condense.__version__, "torch": next(x["torch"] for x in records if "torch" in x),
        "transformers": next(x["config"]["transformers_version"] for x in records if "config" in x),
        "device": device, "commit": commit, "seed": 0, "date": began.isoformat(timespec="seconds"),
    }  # fmt: skip
    documents = json.loads(file.read_text()) if file.exists() else {}
    documents[f"{study}-{began:%Y%m%dT%H%M%SZ}"] = reduced(folder, provenance)
    file.write_text(json.dumps(documents, separators=(",", ":")) + "\n")
