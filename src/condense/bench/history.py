"""Result files of a folder: names that say what was measured where, and the last one to compare with."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from condense.bench.rows import Row
from condense.results import device_name, refuse_existing

_STAMP = "%Y%m%dT%H%M%SZ"


def result_path(folder: Path, kind: str, what: str, device: torch.device) -> Path:
    """``bench-<kind>-<what>-<device>-<UTC time>.json``, in a folder that is made. Raises ValueError if it cannot be."""
    stamp = datetime.datetime.now(datetime.UTC).strftime(_STAMP)
    path = folder / f"{_stem(kind, what, device)}-{stamp}.json"
    refuse_existing(path, "results")
    folder.mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
    return path


def last_result(folder: Path, kind: str, what: str, device: torch.device) -> tuple[Path, dict[str, Any]] | None:
    """The newest result file of the same kind, shape and device, with its content; None if there is none.

    Raises ValueError for a file of that name that holds something else.
    """
    pattern = re.compile(re.escape(_stem(kind, what, device)) + r"-\d{8}T\d{6}Z\.json")
    found = sorted(path for path in folder.glob("*.json") if pattern.fullmatch(path.name))
    return (found[-1], read_result(found[-1])) if found else None


def read_result(path: Path) -> dict[str, Any]:
    """The content of a benchmark's result file. Raises ValueError if it is none, or there is none."""
    if not path.is_file():
        raise ValueError(f"results: no such file: {path}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = document["results"]["kind"] in ("kernel", "model") and document["provenance"] is not None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"results: {path} is no result file of condense bench")
    return document


def with_changes(rows: Sequence[Row], last: Sequence[Row], times: Sequence[str]) -> list[dict[str, Any]]:
    """The rows, each with ``change``: this median over the last one's, for each of ``times`` that both have."""
    before = {_key(row): row for row in last}
    changed = []
    for row in rows:
        old = before.get(_key(row), {})
        both = [name for name in times if row.get(name) and old.get(name)]
        changed.append({**row, "change": {name: row[name]["median_ms"] / old[name]["median_ms"] for name in both}})
    return changed


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row.get("op"), row["runner"], row.get("method"), row["length"]], sort_keys=True)


def _stem(kind: str, what: str, device: torch.device) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().partition(",")[0]).strip("-")
    return f"bench-{kind}-{what}-{name}"
