"""Result files as a page of tables, for `docs/performance.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from condense.bench.published import HARDWARE, PAPER, fastest, published
from condense.bench.rows import OP_TITLES, OPS, Row

_HEAD = """# Performance

Drawn from result files by `condense bench report`. Every figure is a median, with the 20th and 80th percentile in
the files; baselines ran on the same shapes in the same run. TFLOP/s count visible keys only, TB/s the bytes that
cannot be avoided. Condensed rows were held to float64 before they were timed. "1.2 times cca's attention, per key":
time over visible keys, against CCA's attention alone in the same run, as if both saw the same number of keys.
"""


def render(documents: Mapping[Path, Mapping[str, Any]], pictures: Mapping[Path, str] | None = None) -> str:
    """Markdown of one section per result file; pictures: file to the address of its picture.

    A ``note`` that somebody wrote into a file's results, on what disturbed a run say, is part of its section.
    """
    sections = [_HEAD]
    for path, document in documents.items():
        results = document["results"]
        body = _kernel(results) if results["kind"] == "kernel" else _model(results)
        picture = f"\n![times over length]({pictures[path]})\n" if pictures and path in pictures else ""
        sections.append(f"## {title(results)}\n\n{_origin(path, document)}\n{picture}\n{body}")
    return "\n".join(sections)


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
    origin, results = document["provenance"], document["results"]
    lines = [
        f"`{path.name}`: {origin['device']}, torch {origin['torch']}, transformers {origin['transformers']}, "
        f"condense {origin['condense']}, commit {(origin['commit'] or 'unknown')[:12]}, {origin['date']}."
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


def _kernel(results: Mapping[str, Any]) -> str:
    parts = []
    for op in OPS:
        rows = [row for row in results["rows"] if row["op"] == op]
        if rows:
            crossing = _crossings(results["crossover"].get(op, {}))
            parts.append(f"### {OP_TITLES[op]}\n\n{_table(rows, ('times',), _kernel_cell)}\n{crossing}")
    return "\n".join(parts)


def _model(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    first = _table(rows, ("first",), _time_cell("first"))
    step = _table(rows, ("step",), _time_cell("step"))
    return (
        f"### time to first token\n\n{first}\n{_crossings(results['crossover']['first'])}\n"
        f"### time per further token\n\n{step}\n{_crossings(results['crossover']['step'])}\n"
        f"### cache and peak memory, GiB\n\n{_table(rows, ('cache_bytes', 'peak_bytes'), _memory_cell)}"
        f"{_feed_forward(results)}{_published(results)}"
    )


def feed_forward_shares(results: Mapping[str, Any]) -> dict[int, dict[str, tuple[float, float]]]:
    """Per length and runner the part of the time to first token and of a step that feed-forward modules alone take."""
    return {
        figures["length"]: {
            row["runner"]: (
                figures["first_ms"] / row["first"]["median_ms"],
                figures["step_ms"] / row["step"]["median_ms"],
            )
            for row in results["rows"]
            if row["length"] == figures["length"] and row.get("first")
        }
        for figures in results.get("feed_forward", ())
        if "error" not in figures
    }


def _feed_forward(results: Mapping[str, Any]) -> str:
    figures = results.get("feed_forward")
    if not figures:
        return ""
    rows: list[dict[str, Any]] = [{"runner": "alone", "condensed": False, **figure} for figure in figures]
    shares = feed_forward_shares(results)
    rows += [
        {**row, "share": shares.get(row["length"], {}).get(row["runner"])}
        for row in results["rows"]
        if row.get("first")
    ]
    experts = f", experts by `{results['experts']}`" if results["experts"] else ""
    return (
        f"\n### feed-forward modules: time to first token and per further token{experts}\n\n"
        "Measured apart: of a prompt between events around each module, of a step as one graph of them all. Below, "
        "the part of each runner's time.\n\n" + _table(rows, ("first_ms", "share"), _feed_forward_cell)
    )


def _feed_forward_cell(row: Row) -> str:
    if "share" in row:
        return "{:.0%}, {:.0%}".format(*row["share"])
    return f"{milliseconds(row['first_ms'])}, {milliseconds(row['step_ms'])}"


def _published(results: Mapping[str, Any]) -> str:
    figures = published(results)
    if not figures:
        return ""
    lines = [
        f"\n### beside {PAPER}'s figures\n",
        f"The paper's hardware is {HARDWARE}, its dense baseline is not named, and its caches may hold more than ours: "
        "of DeepSeek-V2-Lite the rotated key once per head. Here: the fastest runner of each kind.\n",
        "| | dense here | paper's dense | condensed here | paper's condensed |\n|---|---|---|---|---|",
    ]
    for figure in figures:
        ours = [fastest(results["rows"], figure.length, method) for method in (None, figure.method)]
        if ours == [None, None]:
            continue
        where = f"{figure.length:,} tokens, {figure.method} ({figure.source})"
        first = [milliseconds(row["first"]["median_ms"]) + f" {_name(row)}" if row else "-" for row in ours]
        theirs = [f"{seconds:.2f} s" for seconds in figure.first_s]
        lines.append(f"| {where}: first token | {first[0]} | {theirs[0]} | {first[1]} | {theirs[1]} |")
        if figure.cache_gib is not None:
            cache = [f"{row['cache_bytes'] / 2**30:.3f} GiB" if row else "-" for row in ours]
            theirs = [f"{size:.2f} GiB" for size in figure.cache_gib]
            lines.append(f"| {where}: cache | {cache[0]} | {theirs[0]} | {cache[1]} | {theirs[1]} |")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], needed: Sequence[str], cell: Any) -> str:
    """Runners down, lengths across."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    runners = list(dict.fromkeys(_name(row) for row in rows))
    at = {(_name(row), row["length"]): row for row in rows}
    lines = ["| | " + " | ".join(f"{length:,}" for length in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name in runners:
        cells = (_failed(at.get((name, length)), needed) or cell(at[name, length]) for length in lengths)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _name(row: Row) -> str:
    return f"**{row['runner']}**" if row["condensed"] else row["runner"]


def _failed(row: Row | None, needed: Iterable[str]) -> str | None:
    if row is None:
        return "-"
    if all(row.get(name) is None for name in needed):
        return (row.get("error") or "-").replace("|", "/")[:60]
    return None


def _kernel_cell(row: Row) -> str:
    rate = f"{row['tflops']:,.0f} TFLOP/s" if row.get("tflops") else f"{row['tbs']:.2f} TB/s"
    share = row.get("share_of_matmul") or row.get("share_of_copy")
    ratios = row.get("speedup") or {}
    against = "".join(f"<br>{ratio:.2f}x {name}" for name, ratio in ratios.items())
    also = "".join(f"<br>{note}" for note in notes(row))
    return f"{milliseconds(row['times']['median_ms'])}<br>{rate}, {share:.0%}{against}{also}"


def notes(row: Row) -> list[str]:
    """What a row of a kernel says beside its time, rate and ratios to baselines."""
    said = [f"{row['pairs'] / row['length']:,.0f} keys per query"] if row["condensed"] and row.get("pairs") else []
    if row.get("of_attention") is not None:
        said.append(f"{row['of_attention']:.1%} of its attention")
    return said + [f"{ratio:.2f} times {name}'s attention, per key" for name, ratio in row.get("per_key", {}).items()]


def _time_cell(time: str) -> Any:
    def cell(row: Row) -> str:
        ratios = (row.get("speedup") or {}).get(time, {})
        against = "".join(f"<br>{ratio:.2f}x {name}" for name, ratio in ratios.items())
        return milliseconds(row[time]["median_ms"]) + against

    return cell


def _memory_cell(row: Row) -> str:
    cache, peak = row.get("cache_bytes"), row.get("peak_bytes")
    return f"{'-' if cache is None else f'{cache / 2**30:.3f}'}, peak {'-' if peak is None else f'{peak / 2**30:.1f}'}"


def _crossings(crossings: Mapping[str, float | None]) -> str:
    return "".join(f"\n{crossing(name, length)}\n" for name, length in crossings.items())


def crossing(name: str, length: float | None) -> str:
    """From where condensing pays, in words."""
    if length is None:
        return f"{name}: not faster than the fastest dense baseline at the greatest length that both ran."
    return f"{name}: faster than the fastest dense baseline from {length:,.0f} tokens on."


def milliseconds(ms: float) -> str:
    """A time in the unit that suits it."""
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{ms * 1000:.3g} us"
