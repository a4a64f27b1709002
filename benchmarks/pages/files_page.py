"""`docs/studies/result-files.md`: what is in `benchmarks/results`, and where the rest of it is."""

from __future__ import annotations

import json
from pathlib import Path

from stored import RESULTS, origin_of


def page() -> str:
    """The page: its template, with a row per document."""
    lines = ["| file | name | device | commit | date |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, document in ({path.stem: content} if "provenance" in content else content).items():
            origin = origin_of(document)
            commit = (origin["commit"] or "unknown")[:12]
            file = "the same" if name == path.stem else f"`{path.name}`"
            lines.append(f"| {file} | `{name}` | {origin['device']} | {commit} | {origin['date'][:10]} |")
    text = Path(__file__).with_name("result-files.md").read_text(encoding="utf-8")
    return text.replace("{{FILES}}", "\n".join(lines))
