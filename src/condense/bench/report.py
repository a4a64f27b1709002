"""Result files as tables: the same ones for the terminal and for a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from condense.bench.published import HARDWARE, PAPER, fastest, published
from condense.bench.rows import Row, op_title

_HEAD = """# Performance

Drawn from result files by `condense bench report`. Every figure is a median, with the 20th and 80th percentile in
the files; baselines ran on the same shapes in the same run. TFLOP/s count visible keys only, TB/s the bytes that
cannot be avoided. Condensed rows were held to float64 before they were timed. "1.2 times cca's attention, per key":
time over visible keys, against CCA's attention alone in the same run, as if both saw the same number of keys.
"""
_FEED_FORWARD = (
    "Measured apart: of a prompt between events around each module, of a step as one graph of them all. Below, the "
    "part of each runner's time."
)


class Table(NamedTuple):
    """Lines of text per row and column, both by name; ``remarks`` stand below. Condensed rows are between asterisks."""

    heading: str
    cells: Mapping[str, Mapping[str, Sequence[str]]]
    remarks: Sequence[str] = ()
    introduction: str = ""

    @property
    def columns(self) -> list[str]:
        """Of all rows, in the order in which they come up."""
        return list(dict.fromkeys(column for row in self.cells.values() for column in row))

    def markdown(self) -> str:
        """A section of a page."""
        columns = self.columns
        lines = [["", *columns]]
        lines += [[name, *("<br>".join(row.get(x, "-")) for x in columns)] for name, row in self.cells.items()]
        head, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
        table = "\n".join([head, "|---" * len(lines[0]) + "|", *body])
        paragraphs = [f"### {self.heading}", self.introduction, table, *self.remarks]
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def tables(results: Mapping[str, Any], *, details: bool = False) -> list[Table]:
    """One per operation of a kernel, or per figure of a model: runners down, lengths across.

    details: with percentiles, memory and changes since an earlier run too.
    """
    rows, crossover = results["rows"], results["crossover"]
    if results["kind"] == "kernel":
        by_op: dict[str, list[Row]] = {}
        for row in rows:
            by_op.setdefault(row["op"], []).append(row)
        return [
            Table(
                op_title(op),
                _cells(of_op, ("times",), lambda row: _kernel_lines(row, details)),
                [_crossing(*x) for x in crossover.get(op, {}).items()],
            )
            for op, of_op in by_op.items()
        ]
    found = [
        Table(
            heading,
            _cells(rows, (time,), lambda row, time=time: _time_lines(row, time, details)),  # type: ignore[misc]
            [_crossing(*x) for x in crossover[time].items()],
        )
        for time, heading in (("first", "time to first token"), ("step", "time per further token"))
    ]
    found.append(Table("cache and peak memory, GiB", _cells(rows, ("cache_bytes", "peak_bytes"), _memory_lines)))
    return found + _feed_forward(results)


def render(documents: Mapping[Path, Mapping[str, Any]], pictures: Mapping[Path, str] | None = None) -> str:
    """Markdown of one section per result file; pictures: file to the address of its picture.

    A ``note`` that was added to a file's results by hand, such as on a disturbed run, is part of its section.
    """
    sections = [_HEAD]
    for path, document in documents.items():
        results = document["results"]
        shown = tables(results) + (_published(results) if results["kind"] == "model" else [])
        picture = f"\n![times over length]({pictures[path]})\n" if pictures and path in pictures else ""
        body = "\n".join(table.markdown() for table in shown)
        sections.append(f"## {title(results)}\n\n{_origin(path, document)}\n{picture}\n{body}")
    return "\n".join(sections)


def newest(documents: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Mapping[str, Any]]:
    """Of result files with the same title the one that was measured last, in the order given."""
    last: dict[str, Path] = {}
    for path, document in documents.items():
        subject = title(document["results"])
        if subject not in last or document["provenance"]["date"] >= documents[last[subject]]["provenance"]["date"]:
            last[subject] = path
    return {path: document for path, document in documents.items() if path in last.values()}


def picture_name(path: Path, results: Mapping[str, Any]) -> str:
    """A picture's name made of the result's kind, shape or model, dtype, device and methods."""
    what = re.sub(r"^bench-|-\d{8}T\d{6}Z$", "", path.stem)
    kinds = list(dict.fromkeys(label.partition(":")[0] for label in results["methods"]))
    several = [] if len(kinds) == len(results["methods"]) else [f"{len(results['methods'])} settings"]
    return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", part).strip("-") for part in (what, *kinds, *several)) + ".png"


def title(results: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    methods = ", ".join(results["methods"])
    if results["kind"] == "kernel":
        shape = results["shape"]
        return (
            f"Kernels: {shape['num_q']} query heads, {shape['num_kv']} KV heads, widths {shape['width']} and "
            f"{shape['value_width']}, batch {results['batch']}, {results['dtype']}: {methods}"
        )
    chunk = results["prefill_chunk"]
    chunked = "" if chunk is None else f", prompts in pieces of {chunk:,}"
    compiled = ", feed-forward compiled" if results.get("compile_feed_forward") else ""
    return f"Model: {results['model']}, {results['layers']} layers, {results['dtype']}{chunked}{compiled}: {methods}"


def _origin(path: Path, document: Mapping[str, Any]) -> str:
    source, results = document["provenance"], document["results"]
    lines = [
        f"`{path.name}`: {source['device']}, torch {source['torch']}, transformers {source['transformers']}, "
        f"condense {source['condense']}, commit {(source['commit'] or 'unknown')[:12]}, {source['date']}."
    ]
    if results["kind"] == "kernel":
        ceilings = results["ceilings"]
        lines.append(
            f"Ceilings of this run: {ceilings['matmul_tflops']:,.0f} TFLOP/s (matrix product), "
            f"{ceilings['copy_tbs']:.2f} TB/s (copy)."
        )
    else:
        lines.append(
            f"{results['parameters'] / 1e9:.2f} billion parameters, {results['weight_bytes'] / 2**30:.1f} GiB. "
            + "; ".join(f"`{name}`: {about}" for name, about in results["runners"].items())
            + "."
        )
    if "note" in results:
        lines.append(results["note"])
    if not results["claims"]:
        lines.append("**Measured on a CPU to try the command out: no claims.**")
    return "\n".join(lines)


def _cells(
    rows: Iterable[Row], needed: Sequence[str], lines: Callable[[Row], list[str]]
) -> dict[str, dict[str, list[str]]]:
    """Runners down, lengths across; without any figure of ``needed`` the beginning of the row's error."""
    cells: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        has_any = any(row.get(name) is not None for name in needed)
        said = lines(row) if has_any else [(row.get("error") or "-").replace("|", "/")[:60]]
        cells.setdefault(_name(row), {})[f"{row['length']:,}"] = said
    return cells


def _name(row: Row) -> str:
    return f"**{row['runner']}**" if row["condensed"] else row["runner"]


def _kernel_lines(row: Row, details: bool) -> list[str]:
    """Time, rate, ratios to baselines, and what else a row of a kernel says."""
    rate = f"{row['tflops']:,.0f} TFLOP/s" if row.get("tflops") else f"{row['tbs']:.2f} TB/s"
    share = row.get("share_of_matmul") or row.get("share_of_copy")
    lines = [milliseconds(row["times"]["median_ms"]), f"{rate}, {share:.0%}", *_ratios(row.get("speedup") or {})]
    if row["condensed"] and row.get("pairs"):
        lines.append(f"{row['pairs'] / row['length']:,.0f} keys per query")
    if row.get("of_attention") is not None:
        lines.append(f"{row['of_attention']:.1%} of its attention")
    lines += [f"{ratio:.2f} times {name}'s attention, per key" for name, ratio in row.get("per_key", {}).items()]
    if details:
        lines[1:1] = [f"{milliseconds(row['times']['p20_ms'])} to {milliseconds(row['times']['p80_ms'])}"]
        lines += [] if row["peak_bytes"] is None else [f"peak {row['peak_bytes'] / 2**20:,.0f} MiB"]
        lines += _change(row, "times")
    return lines


def _time_lines(row: Row, time: str, details: bool) -> list[str]:
    ratios = _ratios((row.get("speedup") or {}).get(time, {}))
    return [milliseconds(row[time]["median_ms"]), *ratios, *(_change(row, time) if details else [])]


def _memory_lines(row: Row) -> list[str]:
    cache, peak = row.get("cache_bytes"), row.get("peak_bytes")
    held = "-" if cache is None else f"{cache / 2**30:.3f}"
    return [held + (", peak -" if peak is None else f", peak {peak / 2**30:.1f}")]


def _ratios(speedup: Mapping[str, float]) -> list[str]:
    return [f"{ratio:.2f}x {name}" for name, ratio in speedup.items()]


def _change(row: Row, time: str) -> list[str]:
    """The change of the median since the run that this one was compared with, as a line."""
    if "change" not in row:
        return []
    ratio = row["change"].get(time)
    return ["change: new" if ratio is None else f"change {ratio - 1:+.1%}"]


def _feed_forward(results: Mapping[str, Any]) -> list[Table]:
    """The feed-forward modules alone, and the part of each runner's times that they take."""
    cells: dict[str, dict[str, list[str]]] = {}
    for figures in results.get("feed_forward", ()):
        column = f"{figures['length']:,}"
        if "error" in figures:
            cells.setdefault("alone", {})[column] = [figures["error"].replace("|", "/")[:60]]
            continue
        cells.setdefault("alone", {})[column] = [
            f"{milliseconds(figures['first_ms'])}, {milliseconds(figures['step_ms'])}"
        ]
        for row in results["rows"]:
            if row["length"] == figures["length"] and row.get("first"):
                parts = (figures[f"{time}_ms"] / row[time]["median_ms"] for time in ("first", "step"))
                cells.setdefault(_name(row), {})[column] = [", ".join(f"{part:.0%}" for part in parts)]
    experts = f", experts by `{results['experts']}`" if results["experts"] else ""
    heading = f"feed-forward modules: time to first token and per further token{experts}"
    return [Table(heading, cells, introduction=_FEED_FORWARD)] if cells else []


def _published(results: Mapping[str, Any]) -> list[Table]:
    """The paper's figures beside ours."""
    columns = ("dense here", "paper's dense", "condensed here", "paper's condensed")
    cells: dict[str, dict[str, list[str]]] = {}
    for figure in published(results):
        ours = [fastest(results["rows"], figure.length, method) for method in (None, figure.method)]
        if ours == [None, None]:
            continue
        where = f"{figure.length:,} tokens, {figure.method} ({figure.source})"
        first = [milliseconds(row["first"]["median_ms"]) + f" {_name(row)}" if row else "-" for row in ours]
        pairs = {"first token": (first, [f"{seconds:.2f} s" for seconds in figure.first_s])}
        if figure.cache_gib is not None:
            cache = [f"{row['cache_bytes'] / 2**30:.3f} GiB" if row else "-" for row in ours]
            pairs["cache"] = (cache, [f"{size:.2f} GiB" for size in figure.cache_gib])
        for name, (here, theirs) in pairs.items():
            said = (here[0], theirs[0], here[1], theirs[1])
            cells[f"{where}: {name}"] = {column: [text] for column, text in zip(columns, said, strict=True)}
    introduction = (
        f"The paper's hardware is {HARDWARE}, its dense baseline is not named, and its caches may hold more than ours: "
        "of DeepSeek-V2-Lite the rotated key once per head. Here: the fastest runner of each kind."
    )
    return [Table(f"beside {PAPER}'s figures", cells, introduction=introduction)] if cells else []


def _crossing(name: str, length: float | None) -> str:
    """A sentence on the length from which condensing is faster than the fastest dense baseline."""
    if length is None:
        return f"{name}: not faster than the fastest dense baseline at the greatest length that both ran."
    return f"{name}: faster than the fastest dense baseline from {length:,.0f} tokens on."


def milliseconds(ms: float) -> str:
    """A time in the unit that suits it."""
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{ms * 1000:.3g} us"
