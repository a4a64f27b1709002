"""Tables of `condense bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from condense.bench import OP_TITLES, OPS
from condense.bench.report import crossing, feed_forward_shares, milliseconds, notes, title

NO_CLAIMS = "On a CPU this only tries the command out: its numbers are no claims about anything."


def print_kernel(console: Console, content: Mapping[str, Any]) -> None:
    """One table per operation, then from where condensing pays."""
    ceilings = content["ceilings"]
    console.print(title(content), style="bold", highlight=False)
    console.print(
        f"ceilings of this run: {ceilings['matmul_tflops']:,.1f} TFLOP/s, {ceilings['copy_tbs']:.3f} TB/s; "
        f"backend {', '.join(content['backends'])}",
        highlight=False,
    )
    for op in OPS:
        rows = [row for row in content["rows"] if row["op"] == op]
        if rows:
            _kernel_table(console, OP_TITLES[op], rows, compared="compared_with" in content)
            for name, length in content["crossover"].get(op, {}).items():
                console.print(crossing(name, length), highlight=False, markup=False)
    _end(console, content)


def _kernel_table(console: Console, heading: str, rows: Sequence[Mapping[str, Any]], *, compared: bool) -> None:
    table = _table(
        heading, ("tokens", "runner", "median", "p20 to p80", "rate", "of ceiling", "peak", "faster than", "also")
    )
    if compared:
        table.add_column("change", justify="right")
    for row in rows:
        times = row.get("times")
        if times is None:
            continue
        rate = f"{row['tflops']:,.0f} TFLOP/s" if "tflops" in row else f"{row['tbs']:.2f} TB/s"
        share = row.get("share_of_matmul", row.get("share_of_copy"))
        ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup", {}).items())
        peak = row["peak_bytes"]
        cells = (
            f"{row['length']:,}",
            row["runner"],
            milliseconds(times["median_ms"]),
            f"{milliseconds(times['p20_ms'])} to {milliseconds(times['p80_ms'])}",
            rate,
            f"{share:.1%}",
            "-" if peak is None else f"{peak / 2**20:,.0f} MiB",
            ratios,
            ", ".join(notes(row)),
        )
        table.add_row(*cells, *([_change(row, "times")] if compared else []))
    if table.rows:
        console.print(table)
    _errors(console, rows)


def print_model(console: Console, content: Mapping[str, Any]) -> None:
    """One table, then from where condensing pays."""
    compared = "compared_with" in content
    headings = (
        "tokens",
        "runner",
        "first token",
        "per token",
        "cache",
        "peak",
        "first token faster",
        "per token faster",
    )
    table = _table(title(content), headings)
    if compared:
        table.add_column("change", justify="right")
    for row in content["rows"]:
        peak = row.get("peak_bytes")
        peak_text = "-" if peak is None else f"{peak / 2**30:.1f} GiB"
        if row.get("first") is None:
            continue
        speedup = row.get("speedup", {"first": {}, "step": {}})
        ratios = (", ".join(f"{r:.2f}x {name}" for name, r in speedup[time].items()) for time in ("first", "step"))
        cells = (
            f"{row['length']:,}",
            row["runner"],
            milliseconds(row["first"]["median_ms"]),
            milliseconds(row["step"]["median_ms"]),
            f"{row['cache_bytes'] / 2**20:,.1f} MiB",
            peak_text,
            *ratios,
        )
        changes = [f"{_change(row, 'first')}, {_change(row, 'step')}"] if compared else []
        table.add_row(*cells, *changes)
    console.print(table)
    _errors(console, content["rows"])
    experts = f", experts by {content['experts']}" if content["experts"] else ""
    shares = feed_forward_shares(content)
    for figures in content["feed_forward"]:
        said = figures.get("error")
        if said is None:
            parts = (f"{name} {a:.0%} and {b:.0%}" for name, (a, b) in shares[figures["length"]].items())
            said = (
                f"{milliseconds(figures['first_ms'])} of the first token, {milliseconds(figures['step_ms'])} per "
                f"token: of {', '.join(parts)}"
            )
        console.print(
            f"feed-forward{experts} at {figures['length']:,}: {said}", highlight=False, markup=False, soft_wrap=True
        )
    for figure, heading in (("first", "first token"), ("step", "per token")):
        for name, length in content["crossover"][figure].items():
            console.print(f"{heading}, {crossing(name, length)}", highlight=False, markup=False)
    _end(console, content)


def _table(heading: str, columns: Sequence[str]) -> Table:
    table = Table(title=heading, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("runner", "faster than", "also") else "right", overflow="fold"
        )
    return table


def _errors(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each error once, with the lengths it came up at."""
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault((row["runner"], row["error"]), []).append(f"{row['length']:,}")
    for (runner, error), lengths in failed.items():
        console.print(f"{runner} at {', '.join(lengths)}: {error}", highlight=False, markup=False, soft_wrap=True)


def _change(row: Mapping[str, Any], time: str) -> str:
    ratio = row.get("change", {}).get(time)
    return "new" if ratio is None else f"{ratio - 1:+.1%}"


def _end(console: Console, content: Mapping[str, Any]) -> None:
    if "compared_with" in content:
        console.print(f"change: of the median since {content['compared_with']}", highlight=False, soft_wrap=True)
    if not content["claims"]:
        console.print(NO_CLAIMS, style="bold")
