"""`docs/studies/experiments.md`: what settings are worth on small models; tables in Markdown, pictures beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from experiments_costs import costs_table, dga_costs_table, plot_costs, setting_costs
from experiments_tables import TABLES
from small_runs import SEEDS, Runs, figures_of, learned_at, named, spread
from stored import Documents, described

from condense.ops import POOLINGS
from condense.plots import plot_lines, require_matplotlib


def write_page(documents: Documents, costs: Documents, layers: Documents, output: Path) -> None:
    """Markdown to ``output`` and pictures beside it.

    documents: of runs and of the bundled model; later ones win. costs: what `benchmarks/speed model` wrote about LCA
    with other group sizes and windows. layers: what `benchmarks/speed kernel` wrote about DGA with other settings.
    """
    picture, cost_picture = (output.with_name(f"{output.stem}-{name}.png") for name in ("from-scratch", "cost"))
    require_matplotlib(picture)
    runs: dict[str, Mapping[str, Any]] = {}
    bundled: Mapping[str, Any] = {"retrieval": [], "text": [], "length": 0}
    for document in documents.values():
        content = document["results"]
        runs |= {entry["run"]["name"]: entry for entry in content.get("runs", [])}
        bundled = content.get("bundled", bundled)
    template = Path(__file__).with_name("experiments.md").read_text(encoding="utf-8")
    times = setting_costs(runs, _rows(costs))
    _plot_curves(runs, picture)
    plot_costs(times, cost_picture)
    origin = "\n".join(starmap(described, {**documents, **costs, **layers}.items()))
    parts = {
        "ORIGIN": origin,
        "NUM_RUNS": str(len(runs)),
        "PICTURE": picture.name,
        "BUNDLED": _bundled(bundled),
        **{name: _table(runs, rows) for name, rows in TABLES.items()},
        "GRID": _grid(runs),
        "CURVES": _curves(runs),
        "NOISE": _noise(runs),
        "COSTS": costs_table(times),
        "DGA_COSTS": dga_costs_table(runs, _rows(layers)),
        "COST_PICTURE": cost_picture.name,
    }
    for name, text in parts.items():
        template = template.replace("{{" + name + "}}", text)
    output.write_text(template, encoding="utf-8")


def _rows(documents: Documents) -> list[Mapping[str, Any]]:
    return [row for document in documents.values() for row in document["results"]["rows"]]


def _table(runs: Runs, rows: Sequence[tuple[str, str, str]]) -> str:
    lines = ["| | learned at step | numbers found | text loss | next token right | entries | seeds |", "|---" * 7 + "|"]
    missing = []
    for label, prefix, method in rows:
        found = figures_of(runs, prefix, method)
        if found.runs == 0:
            missing.append(label)
            continue
        lines.append(
            f"| {label} | {found.learned} | {found.retrieval} | {found.loss} | {found.accuracy} | {found.entries} "
            f"| {found.runs} |"
        )
    table = "\n".join(lines) if len(missing) < len(rows) else ""
    return "\n\n".join(filter(None, (table, f"Not run yet: {'; '.join(missing)}." if missing else "")))


def _grid(runs: Runs) -> str:
    lines = ["| rope keys \\ latents | " + " | ".join(POOLINGS) + " |", "|---|" + "---|" * len(POOLINGS)]
    for key in POOLINGS:
        cells = []
        for value in POOLINGS:
            prefix = "mla-lca" if (key, value) == ("select", "weighted") else f"mla-pooling={key}-{value}"
            run = runs.get(f"{prefix}-s0")
            if run is None:
                cells.append("")
                continue
            text, numbers = named(run["text"], "own"), named(run["retrieval"], "own")
            assert text is not None
            assert numbers is not None
            cells.append(f"{numbers['exact']['share']:.3f}, {text['loss']:.3f}, {learned_at(run['history'])}")
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if any(name.startswith("mla-pooling=") for name in runs) else "Not run yet."


def _bundled(content: Mapping[str, Any]) -> str:
    lines = ["| | numbers found | text loss | next token right | entries |", "|---|---|---|---|---|"]
    for text in content["text"]:
        exact = named(content["retrieval"], text["name"])
        assert exact is not None
        share = exact["exact"]
        lines.append(
            f"| {text['name']} | {share['share']:.3f} [{share['low']:.3f}, {share['high']:.3f}] | {text['loss']:.3f} | "
            f"{text['accuracy']:.4f} | {text['seen']:,} |"
        )
    return "\n".join(lines)


_SCRATCH = {
    "GPT-2 small, 1,024 tokens": ("gpt2", ("dense", "dga", "dga-prompt")),
    "OPT-125M, 2,048 tokens": ("opt", ("dense", "dga", "dga-prompt")),
    "bundled Llama, 2,048 tokens": ("llama", ("dense", "lca")),
    "tiny MLA, 2,048 tokens": ("mla", ("dense", "lca")),
}


def _curves(runs: Runs) -> str:
    lines = ["| validation loss | attention | after 200 steps | 500 | 1,000 | seeds |", "|---|---|---|---|---|---|"]
    for title, (architecture, labels) in _SCRATCH.items():
        for label in labels:
            curves = [_curve(runs, architecture, label, seed) for seed in SEEDS]
            present = [curve for curve in curves if curve]
            cells = [spread([curve[step] for curve in present if step in curve], 3) for step in (200, 500, 1000)]
            lines.append(f"| {title} | {label} | " + " | ".join(cells) + f" | {len(present)} |")
    return "\n".join(lines)


def _curve(runs: Runs, architecture: str, label: str, seed: int) -> dict[int, float]:
    run = runs.get(f"{architecture}-scratch-{label}-s{seed}")
    return {} if run is None else {point["step"]: point["loss"] for point in run["curve"]}


def _plot_curves(runs: Runs, path: Path) -> None:
    panels = {}
    for title, (architecture, labels) in _SCRATCH.items():
        curves = {label: _curve(runs, architecture, label, 0) for label in labels}
        panels[title] = {label: (list(c), list(c.values())) for label, c in curves.items() if c}
    plot_lines(panels, path, x_label="steps", y_label="validation loss")


def _noise(runs: Runs) -> str:
    rows = {"dense": "llama-dense", "LCA": "llama-lca", "DGA": "llama-dga"}
    found = {
        label: [run["noise"] for seed in SEEDS if (run := runs.get(f"{prefix}-s{seed}")) is not None]
        for label, prefix in rows.items()
    }
    variances = [point["variance"] for entries in found.values() for point in (entries[0] if entries else [])]
    columns = list(dict.fromkeys(variances))
    lines = ["| KL at noise of | " + " | ".join(f"{v:g}" for v in columns) + " |", "|---|" + "---|" * len(columns)]
    for label, entries in found.items():
        cells = [
            spread([point["kl"] for points in entries for point in points if math.isclose(point["variance"], v)], 4)
            for v in columns
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
