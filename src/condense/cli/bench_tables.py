"""Tables of `condense bench` in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from condense.bench import milliseconds, op_title

NO_CLAIMS = "On a CPU this only tries the command out: its numbers are no claims about anything."

Row = Mapping[str, Any]
# lines of text per row and column, both by name
Cells = dict[str, dict[str, list[str]]]


def print_results(console: Console, content: Mapping[str, Any]) -> None:
    """The tables of a result file with all their details, and the errors of rows that failed."""
    console.print(_title(content), style="bold")
    if content["kind"] == "kernel":
        ceilings = content["ceilings"]
        console.print(
            f"ceilings of this run: {ceilings['matmul_tflops']:,.1f} TFLOP/s, {ceilings['copy_tbs']:.3f} TB/s; "
            f"backend {', '.join(content['backends'])}",
        )
        for op in dict.fromkeys(row["op"] for row in content["rows"]):
            _draw(console, op_title(op), _cells((row for row in content["rows"] if row["op"] == op), _kernel_lines))
            _print_crossover(console, content["crossover"].get(op, {}))
    else:
        _print_model(console, content)
    _print_errors(console, content["rows"])
    if "compared_with" in content:
        console.print(f"change: of the median since {content['compared_with']}", soft_wrap=True)
    if not content["claims"]:
        console.print(NO_CLAIMS, style="bold")


def _print_model(console: Console, content: Mapping[str, Any]) -> None:
    for time, heading in (("first", "time to first token"), ("step", "time per further token")):
        _draw(console, heading, _cells(content["rows"], lambda row, time=time: _time_lines(row, time)))  # type: ignore[misc]
        _print_crossover(console, content["crossover"][time])
    _draw(console, "cache and peak memory, GiB", _cells(content["rows"], _memory_lines))
    experts = f", experts by {content['experts']}" if content["experts"] else ""
    cells = _feed_forward(content)
    if cells:
        _draw(console, f"feed-forward modules: time to first token and per further token{experts}", cells)


def _title(results: Mapping[str, Any]) -> str:
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
    compiled = ", feed-forward compiled" if results["compile_feed_forward"] else ""
    return f"Model: {results['model']}, {results['layers']} layers, {results['dtype']}{chunked}{compiled}: {methods}"


def _draw(console: Console, heading: str, cells: Cells) -> None:
    drawn = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left")
    drawn.add_column(overflow="fold")
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    for column in columns:
        drawn.add_column(column, justify="right", overflow="fold")
    for name, row in cells.items():
        drawn.add_row(name, *("\n".join(row.get(column, "-")) for column in columns), end_section=True)
    console.print(drawn)


def _cells(rows: Iterable[Row], lines: Callable[[Row], list[str]]) -> Cells:
    """Runners down, lengths across; the beginning of the row's error where there are no lines."""
    cells: Cells = {}
    for row in rows:
        said = lines(row) or [(row.get("error") or "-")[:60]]
        cells.setdefault(row["runner"], {})[f"{row['length']:,}"] = said
    return cells


def _kernel_lines(row: Row) -> list[str]:
    """Time, rate, ratios to baselines, and what else a row of a kernel says."""
    times = row.get("times")
    if not times:
        return []
    rate = f"{row['tflops']:,.0f} TFLOP/s" if row.get("tflops") else f"{row['tbs']:.2f} TB/s"
    share = row.get("share_of_matmul") or row.get("share_of_copy")
    lines = [
        milliseconds(times["median_ms"]),
        f"{milliseconds(times['p20_ms'])} to {milliseconds(times['p80_ms'])}",
        f"{rate}, {share:.0%}",
        *_ratios(row.get("speedup", {})),
    ]
    if row["condensed"] and row.get("pairs"):
        lines.append(f"{row['pairs'] / row['length']:,.0f} keys per query")
    if row.get("of_attention") is not None:
        lines.append(f"{row['of_attention']:.1%} of its attention")
    lines += [f"{ratio:.2f} times {name}'s attention, per key" for name, ratio in row.get("per_key", {}).items()]
    if row["peak_bytes"] is not None:
        lines.append(f"peak {row['peak_bytes'] / 2**20:,.0f} MiB")
    return lines + _change(row, "times")


def _time_lines(row: Row, time: str) -> list[str]:
    if not row.get(time):
        return []
    return [milliseconds(row[time]["median_ms"]), *_ratios(row.get("speedup", {}).get(time, {})), *_change(row, time)]


def _memory_lines(row: Row) -> list[str]:
    figures = (("", "cache_bytes", ".3f"), ("host ", "host_bytes", ".3f"), ("peak ", "peak_bytes", ".1f"))
    said = [f"{name}{row[key] / 2**30:{form}}" for name, key, form in figures if row.get(key)]
    return [", ".join(said)] if said else []


def _ratios(speedup: Mapping[str, float]) -> list[str]:
    return [f"{ratio:.2f}x {name}" for name, ratio in speedup.items()]


def _change(row: Row, time: str) -> list[str]:
    """The change of the median since the run that this one was compared with, as a line."""
    if "change" not in row:
        return []
    ratio = row["change"].get(time)
    return ["change: new" if ratio is None else f"change {ratio - 1:+.1%}"]


def _feed_forward(results: Mapping[str, Any]) -> Cells:
    """The feed-forward modules alone, and the part of each runner's times that they take."""
    cells: Cells = {}
    for figures in results["feed_forward"]:
        column = f"{figures['length']:,}"
        alone = cells.setdefault("alone", {})
        if "error" in figures:
            alone[column] = [figures["error"][:60]]
            continue
        alone[column] = [f"{milliseconds(figures['first_ms'])}, {milliseconds(figures['step_ms'])}"]
        for row in results["rows"]:
            if row["length"] == figures["length"] and row.get("first"):
                parts = (figures[f"{time}_ms"] / row[time]["median_ms"] for time in ("first", "step"))
                cells.setdefault(row["runner"], {})[column] = [", ".join(f"{part:.0%}" for part in parts)]
    return cells


def _print_crossover(console: Console, lengths: Mapping[str, float | None]) -> None:
    """The length from which condensing is faster than the fastest dense baseline, per runner."""
    for name, length in lengths.items():
        said = (
            "not faster than the fastest dense baseline at the greatest length that both ran."
            if length is None
            else f"faster than the fastest dense baseline from {length:,.0f} tokens on."
        )
        console.print(f"{name}: {said}", soft_wrap=True)


def _print_errors(console: Console, rows: Sequence[Row]) -> None:
    """Each error once, with the lengths it came up at."""
    failed: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault((row["runner"], row["error"]), {})[f"{row['length']:,}"] = None
    for (runner, error), lengths in failed.items():
        console.print(f"{runner} at {', '.join(lengths)}: {error}", soft_wrap=True)
