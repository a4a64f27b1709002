"""The tables and pictures of both `performance.md`, each figure from the newest result file that holds it.

A block says what its table holds, one line per row, and ends where its table ends:

    <!-- bench: one decode step | 4096, 131072 | images/decode.png
    cuDNN, dense = kernel-h32-kv8-d128-v128-b1-bfloat16-nvidia-h200 decode cudnn
    CCA = kernel-h32-kv8-d128-v128-b1-bfloat16-nvidia-h200 decode cca / cudnn
    -->
    <!-- /bench -->

Its head: title, lengths, and a picture if it has one. A row: its label, the name of the result files up to the time,
where ``bench-`` may be left out, the figure (an operation of the kernel benchmark, or one of ``first``, ``step``,
``cache``, ``peak``), the runner, and the baseline whose ratio stands beside the time. Each cell is from the newest file
that holds it, whose time and commit stand below the table; a ratio is always of one run. The block ``named`` has the
times of `generate`. Its rows say one layer's step and prompt: as above, or in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import readme_page
from speed.rows import milliseconds
from stored import Documents

from condense.plots import plot_lines

Row = Mapping[str, Any]

_BLOCK = re.compile(r"(<!-- bench: ([^\n]*)\n(.*?)\n-->\n).*?(<!-- /bench -->)", re.DOTALL)
_HEAD = re.compile(r"(?P<title>[^|]+?) \| (?P<lengths>\d+(?:, *\d+)*)(?: \| (?P<picture>.+))?")
_ROW = re.compile(r"(?P<label>.+?) = (?P<files>\S+) (?P<figure>\S+) (?P<runner>.+?)(?: / (?P<baseline>.+))?")
_FIGURES = {"first": "first", "step": "step", "cache": "cache_bytes", "peak": "peak_bytes"}
_NAMED = re.compile(r"(<!-- named\n(.*?)\n-->\n).*?(<!-- /named -->)", re.DOTALL)


class Cell(NamedTuple):
    """One table cell: its text, its plotted number, its result file."""

    text: str
    number: float
    source: str


# label to lengths and numbers
Lines = dict[str, tuple[list[float], list[float]]]


def fill(page: Path, documents: Documents) -> None:
    """Fill the page and draw its pictures, whose addresses start at its folder."""
    text, pictures = filled(page.read_text(encoding="utf-8"), documents)
    for name, panels in pictures.items():
        plot_lines(panels, page.parent / name, x_label="tokens", y_label="ms", log=True)
    page.write_text(text, encoding="utf-8")


def filled(page: str, documents: Documents) -> tuple[str, dict[str, dict[str, Lines]]]:
    """The page with all tables from result files by name; and what each picture shows, panel by panel.

    Raises ValueError for a page without blocks, and for a head or a row that no figure fits.
    """
    pictures: dict[str, dict[str, Lines]] = {}

    def fill_block(block: re.Match[str]) -> str:
        opening, said, rows, closing = block.groups()
        head = _HEAD.fullmatch(said)
        if head is None:
            raise ValueError(f"page: a block's head must be 'title | lengths | picture', got {said!r}")
        lengths = [int(number) for number in head["lengths"].split(",")]
        table = {}
        for line in rows.splitlines():
            label, cells = _row(line, documents)
            table[label] = {length: cells[length] for length in lengths if length in cells}
        if head["picture"]:
            pictures.setdefault(head["picture"], {})[head["title"]] = {
                label.replace("**", ""): ([*map(float, cells)], [cell.number for cell in cells.values()])
                for label, cells in table.items()
            }
        return opening + _markdown(head["title"], lengths, table) + closing

    text, count = _BLOCK.subn(fill_block, page)
    if count == 0:
        raise ValueError("page must have a block '<!-- bench: title | lengths', got none")
    return _NAMED.sub(lambda block: block[1] + _named(block[2], documents) + block[3], text), pictures


def _named(rows: str, documents: Documents) -> str:
    """Dense attention and the named settings in plain `generate`, and one layer of theirs."""
    head = f"| {readme_page.LENGTH:,} tokens | cache on the GPU | first token | each further token | one layer's step"
    table = f"{head} | one layer's prompt |\n{'|---' * 6}|\n"
    for label, *layer in (re.split(" [=|] ", row) for row in rows.splitlines()):
        cache, _ = readme_page.cache(name := label.strip("`").lower())
        first, step = readme_page.generate(documents, name)
        times = readme_page.text(first, "s"), readme_page.text(step, "ms"), *(_layer(x, documents) for x in layer)
        table += f"| {label} | {cache:#.3g} GiB | {' | '.join(times)} |\n"
    return table


def _layer(said: str, documents: Documents) -> str:
    if not _ROW.fullmatch(f"layer = {said}"):
        return said
    return re.sub(r", \d+%", "", _row(f"layer = {said}", documents)[1][readme_page.LENGTH].text)


def _row(line: str, documents: Documents) -> tuple[str, dict[int, Cell]]:
    """The label of a table's row, and per length the cell of the newest file that holds it."""
    match = _ROW.fullmatch(line)
    if match is None:
        raise ValueError(f"page: a block's row must be 'label = files figure runner / baseline', got {line!r}")
    name = re.compile(rf"(?:bench-)?{re.escape(match['files'])}-\d{{8}}T\d{{6}}Z")
    figure, op = (_FIGURES[match["figure"]], None) if match["figure"] in _FIGURES else ("times", match["figure"])
    cells: dict[int, Cell] = {}
    found = [(stem, document) for stem, document in documents.items() if name.fullmatch(stem)]
    for stem, document in sorted(found, key=lambda item: item[1]["provenance"]["date"]):
        source = f"{stem.rpartition('-')[2]} (commit {(document['provenance']['commit'] or 'unknown')[:12]})"
        for row in document["results"]["rows"]:
            if row.get("runner") == match["runner"] and row.get("op") == op and row.get(figure):
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
