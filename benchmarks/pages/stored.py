"""Result files of `benchmarks/results`, by name.

A file holds one document, or several by name: what one page, or one part of it, is made of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Documents = Mapping[str, Any]


@cache
def stored(folder: Path = RESULTS) -> dict[str, Any]:
    """All documents of a folder, by name; the name of a file with one document is the file's."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found |= {path.stem: content} if "provenance" in content else content
    return found


def of(file: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """The documents of a file with several, in its order, or those that are named, in theirs."""
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return {name: content[name] for name in names or content}


def origin_of(document: Any) -> Mapping[str, Any]:
    """A document's provenance; of several runs in one list, the first one's."""
    return (document[0] if isinstance(document, list) else document)["provenance"]


def described(name: str, document: Any, *, transformers: bool = True) -> str:
    """A line of a page's list of results."""
    origin = origin_of(document)
    versions = f"torch {origin['torch']}" + (f", transformers {origin['transformers']}" if transformers else "")
    commit = (origin["commit"] or "unknown")[:12]
    return f"- `{name}`: {origin['device']}, {versions}, commit {commit}, {origin['date'][:10]}"
