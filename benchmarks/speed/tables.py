"""Tables of results in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from speed.rows import crossover, milliseconds, op_title

NO_CLAIMS = "On a CPU this only tries the command out: its numbers are no claims about anything."

Row = Mapping[str, Any]


def print_results(console: Console, content: Mapping[str, Any]) -> None:
    """Print the tables of a result file, and the errors of rows that failed."""
    rows, methods = content["rows"], ", ".join(content["methods"])
    if content["kind"] == "kernel":
        shape, ceilings = content["shape"], content["ceilings"]
        console.print(
            f"Kernels: {shape['num_q']} query heads, {shape['num_kv']} KV heads, widths {shape['width']} and "
            f"{shape['value_width']}, batch {content['batch']}, {content['dtype']}: {methods}",
            style="bold",
        )
        console.print(
            f"ceilings of this run: {ceilings['matmul_tflops']:,.1f} TFLOP/s, {ceilings['copy_tbs']:.3f} TB/s; "
            f"backend {', '.join(content['backends'])}"
        )
        for op in dict.fromkeys(row["op"] for row in rows):
            _print_times(console, op_title(op), [row for row in rows if row["op"] == op], "times")
    else:
        chunk = content["prefill_chunk"]
        chunked = "" if chunk is None else f", prompts in pieces of {chunk:,}"
        compiled = ", feed-forward compiled" if content["compile_feed_forward"] else ""
        experts = f", experts by {content['experts']}" if content["experts"] else ""
        console.print(
            f"Model: {content['model']}, {content['layers']} layers, {content['dtype']}{chunked}{compiled}{experts}: "
            f"{methods}",
            style="bold",
        )
        _print_times(console, "time to first token", rows, "first")
        _print_times(console, "time per further token", rows, "step")
        _draw(console, "cache and peak memory, GiB", rows, _memory_lines)
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault((row["runner"], row["error"]), []).append(f"{row['length']:,}")
    for (runner, error), lengths in failed.items():
        console.print(f"{runner} at {', '.join(dict.fromkeys(lengths))}: {error}", soft_wrap=True)
    if not content["claims"]:
        console.print(NO_CLAIMS, style="bold")


def _print_times(console: Console, heading: str, rows: Iterable[Row], figure: str) -> None:
    """The table of a figure, and the length from which each runner is faster than every dense baseline."""
    _draw(console, heading, rows, lambda row: _time_lines(row, figure))
    ratios: dict[str, dict[int, float]] = {}
    for row in rows:
        dense = [ratio for name, ratio in _speedup(row, figure).items() if name != "flex_mask"]
        if dense:
            ratios.setdefault(row["runner"], {})[row["length"]] = min(dense)
    for name, by_length in ratios.items():
        length = crossover(by_length)
        said = "not at the greatest length that both ran" if length is None else f"from {length:,} tokens on"
        console.print(f"{name}: faster than every dense baseline: {said}.", soft_wrap=True)


def _draw(console: Console, heading: str, rows: Iterable[Row], lines: Callable[[Row], list[str]]) -> None:
    """A table with runners down and lengths across; the beginning of a row's error where it has no lines."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        said = lines(row) or [(row.get("error") or "-")[:60]]
        cells.setdefault(row["runner"], {})[f"{row['length']:,}"] = "\n".join(said)
    drawn = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left")
    drawn.add_column(overflow="fold")
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    for column in columns:
        drawn.add_column(column, justify="right", overflow="fold")
    for name, by_length in cells.items():
        drawn.add_row(name, *(by_length.get(column, "-") for column in columns), end_section=True)
    console.print(drawn)


def _time_lines(row: Row, figure: str) -> list[str]:
    """Time, rate, ratios to baselines, and the keys that a condensed query sees."""
    times = row.get(figure)
    if not times:
        return []
    lines = [milliseconds(times["median_ms"]), f"{milliseconds(times['p20_ms'])} to {milliseconds(times['p80_ms'])}"]
    for rate, unit, share in (("tflops", "TFLOP/s", "share_of_matmul"), ("tbs", "TB/s", "share_of_copy")):
        if row.get(rate):
            lines.append(f"{row[rate]:#,.3g} {unit}, {row[share]:.0%}")
    lines += [f"{ratio:.2f}x {name}" for name, ratio in _speedup(row, figure).items()]
    if row["condensed"] and row.get("pairs"):
        lines.append(f"{row['pairs'] / row['length']:,.0f} keys per query")
    return lines


def _speedup(row: Row, figure: str) -> Mapping[str, float]:
    found = row.get("speedup", {})
    return found if figure == "times" else found.get(figure, {})


def _memory_lines(row: Row) -> list[str]:
    figures = (("", "cache_bytes", ".3f"), ("host ", "host_bytes", ".3f"), ("peak ", "peak_bytes", ".1f"))
    said = [f"{name}{row[key] / 2**30:{form}}" for name, key, form in figures if row.get(key)]
    return [", ".join(said)] if said else []
