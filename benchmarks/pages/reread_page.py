"""The tables of `docs/studies/reread.md`, between ``<!-- reread -->`` and ``<!-- /reread -->``, and with ``models``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transfer_page

_MODELS = re.compile(r"(<!-- models -->\n).*?(<!-- /models -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- reread -->\n).*?(<!-- /reread -->)", re.DOTALL)
_HEAD = "| | cache | following text ({:,}) | copies ({:,}) | numbers lost ({:,}) |\n|---|---|---|---|---|\n"


def fill(page: Path, document: Mapping[str, Any], runs: Mapping[str, Any]) -> None:
    """Write the tables anew: of the bundled model, and of that of the ``runs`` which has the most models."""
    sizes_of = {name: len(run["results"]["models"]) for name, run in runs.items() if name.startswith("reread-")}
    widest = transfer_page.by_model(runs[max(sizes_of, key=lambda name: (sizes_of[name], name))])
    dense, *others = document["results"]["rows"]
    sizes, values = ([cell[key] for cell in dense["cells"].values()] for key in ("n", "dense"))
    lines = [_HEAD.format(*sizes), "| dense: loss, found | 100% | {:.3f} | {:.3f} | {:.1%} |\n".format(*values)]
    for row in others:
        cells = " | ".join(_cell(kind == "found", cell) for kind, cell in row["cells"].items())
        lines.append(f"| {row['arm']} | {row['device']:.0%} | {cells} |\n")
    text = _BLOCK.sub(lambda block: block[1] + "".join(lines) + block[2], page.read_text(encoding="utf-8"))
    text = _MODELS.sub(lambda block: block[1] + widest + block[2], text)
    page.write_text(text, encoding="utf-8")


def _cell(is_task: bool, cell: Mapping[str, Any]) -> str:
    form = "{:.1%} ({:.1%} to {:.1%})" if is_task else "{:+.3f} ({:+.3f} to {:+.3f})"
    return form.format(cell["value"], cell["low"], cell["high"])
