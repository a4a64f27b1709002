"""What LCA's settings cost: loss of a small model beside time and cache of a large one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Runs, named, of_seeds
from studies import WINDOW

from condense import LCA, Method
from condense.plots import plot_lines


@dataclass(frozen=True)
class Cost:
    """LCA with one setting changed: what the small model lost by it, and what a large one takes.

    Attributes:
        sweep: the setting, "g" or "w".
        value: of the setting.
        loss: nats per token, mean over seeds; None where the small model was not evaluated with it.
        first_s, step_ms, cache_bytes: the large model's first token, time per further token, and cache.
    """

    sweep: str
    value: int
    loss: float | None
    first_s: float
    step_ms: float
    cache_bytes: int


def setting_costs(runs: Runs, rows: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Rows of `condense bench model` beside the losses of the models that were trained with g 16 and w 128."""
    default, costs = LCA(), []
    trained = {"g": default.group_size, "w": WINDOW}
    for row in rows:
        method = Method.parse(row["method"])
        assert isinstance(method, LCA)
        if method.group_size != default.group_size:
            settings = [("g", method.group_size)]
        elif method.window != default.window:
            settings = [("w", method.window)]
        else:
            settings = [("g", default.group_size), ("w", default.window)]
        for sweep, value in settings:
            name = "own" if value == trained[sweep] else f"{sweep}={value}"
            losses = [text["loss"] for run in of_seeds(runs, "mla-lca") if (text := named(run["text"], name))]
            costs.append(
                Cost(
                    sweep, value, statistics.fmean(losses) if losses else None, row["first"]["median_ms"] / 1e3,
                    row["step"]["median_ms"], row["cache_bytes"],
                )
            )  # fmt: skip
    return sorted(costs, key=lambda cost: (cost.sweep, cost.value))


def costs_table(costs: Sequence[Cost]) -> str:
    """In Markdown."""
    lines = ["| | text loss, small model | first token | per token | cache |", "|---" * 5 + "|"]
    for cost in costs:
        loss = "" if cost.loss is None else f"{cost.loss:.3f}"
        lines.append(
            f"| {cost.sweep} {cost.value:,} | {loss} | {cost.first_s:.2f} s | {cost.step_ms:.2f} ms "
            f"| {cost.cache_bytes / 2**20:,.0f} MiB |"
        )
    return "\n".join(lines)


def plot_costs(costs: Sequence[Cost], path: Path) -> None:
    """Loss against first token and against cache."""
    known = [cost for cost in costs if cost.loss is not None]
    by_sweep = {sweep: [cost for cost in known if cost.sweep == sweep] for sweep in ("g", "w")}
    of: dict[str, Callable[[Cost], float]] = {
        "first token, s": lambda cost: cost.first_s,
        "cache, MiB": lambda cost: cost.cache_bytes / 2**20,
    }
    panels = {
        title: {
            f"{sweep} " + ", ".join(str(cost.value) for cost in found): ([*map(x, found)], [c.loss for c in found])
            for sweep, found in by_sweep.items()
        }
        for title, x in of.items()
    }
    plot_lines(panels, path, x_label="DeepSeek-V2-Lite shape, 128K tokens", y_label="text loss, small model")
