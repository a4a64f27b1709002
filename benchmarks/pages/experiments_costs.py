"""The costs of settings: loss of a small model beside time and cache of a large one, and of a layer of its size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_runs import WINDOW, Runs, named, of_seeds

from condense import DGA, LCA, Method
from condense.plots import plot_lines


@dataclass(frozen=True)
class Cost:
    """LCA with one setting changed: what the small model lost by it, and what a large one takes.

    sweep: the setting, "g" or "w". value: of the setting. loss: nats per token, mean over seeds; None where the small
    model was not evaluated with it. first_s, step_ms, cache_bytes: the large model's first token, time per further
    token, and cache.
    """

    sweep: str
    value: int
    loss: float | None
    first_s: float
    step_ms: float
    cache_bytes: int


def setting_costs(runs: Runs, rows: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Rows of `python benchmarks/speed model` beside the losses of the models that were trained with g 16 and w 128."""
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


# label, beginning of the runs' names, changed settings
_DGA: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    *((f"m {m}", f"llama-dga-m={m}" if m != 16 else "llama-dga", {"group_size": m}) for m in (4, 8, 16, 32, 64)),
    *((f"gamma {gamma}", f"llama-dga-gamma={gamma}", {"gamma": gamma}) for gamma in (0.3, 0.5, 0.7, 0.9)),
    ("focal tokens at random", "llama-dga-random", {"focal": "random"}),
    ("whole prompts", "llama-prompt", {"selection": "prompt", "min_focal": 0}),
    (
        "whole prompts, without complementary tokens", "llama-prompt-not-complementary",
        {"selection": "prompt", "min_focal": 0, "complementary": False, "allow_future": True},
    ),
)  # fmt: skip
_DGA_COLUMNS = (("layer", 4096), ("layer", 32768), ("layer", 131072), ("decode", 32768), ("decode", 131072))


def dga_costs_table(runs: Runs, rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown: DGA's settings by text loss, and by what `python benchmarks/speed kernel` measured of each."""
    heads = " | ".join(f"{'step' if op == 'decode' else op}, {length // 1024}K" for op, length in _DGA_COLUMNS)
    lines = [f"| | text loss, small model | {heads} |", "|---" * (2 + len(_DGA_COLUMNS)) + "|"]
    for label, prefix, changes in _DGA:
        method = DGA(**changes).to_dict()
        cells = []
        for op, length in _DGA_COLUMNS:
            row = next((r for r in rows if (r["op"], r["length"]) == (op, length) and _has(r["method"], method)), None)
            cells.append("" if row is None else _short(row["times"]["median_ms"]))
        losses = [text["loss"] for run in of_seeds(runs, prefix) if (text := named(run["text"], "own"))]
        lines.append(f"| {label} | {statistics.fmean(losses):.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _has(recorded: Mapping[str, Any] | None, method: Mapping[str, Any]) -> bool:
    """True if these settings were recorded; the record may hold others that are gone since."""
    return recorded is not None and all(recorded.get(name) == value for name, value in method.items())


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds >= 0.2 else f"{1000 * milliseconds:.3g} us"
