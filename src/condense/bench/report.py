"""A page's tables from result files: prose stays as it is, marked blocks are written anew.

A block says what its table holds, one line per row, and ends where its table ends:

    <!-- bench: one decode step | 4096, 131072 | images/decode.png
    cuDNN, dense = kernel-h32-kv8-d128-v128-b1-bfloat16-nvidia-h200 decode cudnn
    CCA = kernel-h32-kv8-d128-v128-b1-bfloat16-nvidia-h200 decode cca / cudnn
    -->
    <!-- /bench -->

Its head: title, lengths, and a picture if it has one. A row: its label, the name of the result files between ``bench-``
and the time, the figure (an operation of the kernel benchmark, or one of ``first``, ``step``, ``cache``, ``peak``), the
runner, and the baseline whose ratio stands beside the time. Each cell is from the newest file that holds it, whose time
and commit stand below the table; a ratio is always of one run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from condense.bench.history import read_result
from condense.bench.rows import Row

_BLOCK = re.compile(r"(<!-- bench: ([^\n]*)\n(.*?)\n-->\n).*?(<!-- /bench -->)", re.DOTALL)
_ROW = re.compile(r"(?P<label>.+?) = (?P<files>\S+) (?P<figure>\S+) (?P<runner>.+?)(?: / (?P<baseline>.+))?")
_FIGURES = {"first": "first", "step": "step", "cache": "cache_bytes", "peak": "peak_bytes"}


class Cell(NamedTuple):
    """What stands in a table, the number that a picture shows, and the file that it is from."""

    text: str
    number: float
    source: str


# label to lengths and numbers
Lines = dict[str, tuple[list[float], list[float]]]


def fill_page(page: str, folder: Path) -> tuple[str, dict[str, dict[str, Lines]]]:
    """The page with all tables from the result files of a folder; and what each picture shows, panel by panel.

    Raises ValueError for a page without blocks, and for a head or a row that no figure fits.
    """
    documents = {path.stem: read_result(path) for path in sorted(folder.glob("bench-*.json"))}
    pictures: dict[str, dict[str, Lines]] = {}

    def fill(block: re.Match[str]) -> str:
        opening, head, rows, closing = block.groups()
        title, lengths, picture = _head(head)
        table = {}
        for line in rows.splitlines():
            label, cells = _row(line, documents)
            table[label] = {length: cells[length] for length in lengths if length in cells}
        if picture:
            pictures.setdefault(picture, {})[title] = {
                label.replace("**", ""): ([*map(float, cells)], [cell.number for cell in cells.values()])
                for label, cells in table.items()
            }
        return opening + _markdown(title, lengths, table) + closing

    filled, count = _BLOCK.subn(fill, page)
    if count == 0:
        raise ValueError("page must have a block '<!-- bench: title | lengths', got none")
    return filled, pictures


def milliseconds(ms: float) -> str:
    """A time in the unit that suits it."""
    number, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms") if ms >= 1 else (ms * 1e3, "us")
    return f"{number:#.3g} {unit}".replace(". ", " ")


def _head(text: str) -> tuple[str, list[int], str]:
    """Title, lengths, and the picture's address or nothing."""
    title, lengths, picture = ([part.strip() for part in text.split("|")] + ["", ""])[:3]
    numbers = [part.strip() for part in lengths.split(",")]
    if not title or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"page: a block's head must be 'title | lengths | picture', got {text!r}")
    return title, [int(number) for number in numbers], picture


def _row(line: str, documents: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[int, Cell]]:
    """The label of a table's row, and per length the cell of the newest file that holds it."""
    match = _ROW.fullmatch(line)
    if match is None:
        raise ValueError(f"page: a block's row must be 'label = files figure runner / baseline', got {line!r}")
    name = re.compile(rf"bench-{re.escape(match['files'])}-\d{{8}}T\d{{6}}Z")
    figure, op = (_FIGURES[match["figure"]], None) if match["figure"] in _FIGURES else ("times", match["figure"])
    cells: dict[int, Cell] = {}
    for stem, document in sorted(documents.items(), key=lambda item: item[1]["provenance"]["date"]):
        origin = document["provenance"]
        source = f"{stem.rpartition('-')[2]} (commit {(origin['commit'] or 'unknown')[:12]})"
        for row in document["results"]["rows"] if name.fullmatch(stem) else ():
            if row["runner"] == match["runner"] and row.get("op") == op and row.get(figure):
                cells[row["length"]] = _cell(row, figure, match["baseline"], source)
    if not cells:
        raise ValueError(f"page: no result file holds {line!r}")
    return match["label"], cells


def _cell(row: Row, figure: str, baseline: str | None, source: str) -> Cell:
    """A size; or a time, the share of the ceiling that it reaches, and its ratio to a baseline of the same run."""
    if figure.endswith("_bytes"):
        return Cell(f"{row[figure] / 2**30:#.3g} GiB", row[figure], source)
    ratios = row.get("speedup") or {}
    ratio = (ratios if figure == "times" else ratios.get(figure, {})).get(baseline)
    share = row.get("share_of_matmul") or row.get("share_of_copy")
    said = [milliseconds(row[figure]["median_ms"])]
    said += [f"{share:.0%}"] if share else []
    said += [f"{ratio:.2f}x"] if ratio else []
    return Cell(", ".join(said), row[figure]["median_ms"], source)


def _markdown(title: str, lengths: list[int], table: Mapping[str, Mapping[int, Cell]]) -> str:
    """The table, and the files that it is from."""
    lines = [[title, *(f"{length:,}" for length in lengths)], ["---"] * (1 + len(lengths))]
    lines += [[label, *(cells[x].text if x in cells else "-" for x in lengths)] for label, cells in table.items()]
    sources = dict.fromkeys(cell.source for cells in table.values() for cell in cells.values())
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\nMeasured: {', '.join(sources)}.\n\n"
