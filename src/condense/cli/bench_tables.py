"""Tables of `condense bench` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from condense.bench.report import tables, title

NO_CLAIMS = "On a CPU this only tries the command out: its numbers are no claims about anything."


def print_results(console: Console, content: Mapping[str, Any]) -> None:
    """The tables of a result file with all their details, and the errors of rows that failed."""
    console.print(title(content), style="bold", highlight=False, markup=False)
    if content["kind"] == "kernel":
        ceilings = content["ceilings"]
        console.print(
            f"ceilings of this run: {ceilings['matmul_tflops']:,.1f} TFLOP/s, {ceilings['copy_tbs']:.3f} TB/s; "
            f"backend {', '.join(content['backends'])}",
            highlight=False,
        )
    for table in tables(content, details=True):
        drawn = Table(title=table.heading, box=box.SIMPLE_HEAD, title_justify="left")
        drawn.add_column(overflow="fold")
        for column in table.columns:
            drawn.add_column(column, justify="right", overflow="fold")
        for name, cells in table.cells.items():
            lines = ("\n".join(cells.get(column, "-")) for column in table.columns)
            drawn.add_row(name.strip("*"), *lines, style="bold" if name.startswith("**") else None, end_section=True)
        console.print(drawn, markup=False)
        for remark in table.remarks:
            console.print(remark, highlight=False, markup=False, soft_wrap=True)
    _print_errors(console, content["rows"])
    if "compared_with" in content:
        console.print(f"change: of the median since {content['compared_with']}", highlight=False, soft_wrap=True)
    if not content["claims"]:
        console.print(NO_CLAIMS, style="bold")


def _print_errors(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each error once, with the lengths it came up at."""
    failed: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault((row["runner"], row["error"]), {})[f"{row['length']:,}"] = None
    for (runner, error), lengths in failed.items():
        console.print(f"{runner} at {', '.join(lengths)}: {error}", highlight=False, markup=False, soft_wrap=True)
