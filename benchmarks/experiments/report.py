"""Results of the studies as a page: tables in Markdown, pictures beside it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from studies import SEEDS
from tables import TABLES

from condense import Method
from condense.ops import POOLINGS, UniformBounds
from condense.plots import plot_lines, require_matplotlib

Runs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figures:
    """One model under one method, over seeds: means with the smallest and largest where there are several."""

    runs: int
    retrieval: str
    loss: str
    accuracy: str
    entries: str


def write_report(results: Sequence[Path], output: Path) -> None:
    """Markdown to ``output`` and pictures beside it, from files that `collect` wrote; later files win."""
    picture = output.with_name(f"{output.stem}-from-scratch.png")
    require_matplotlib(picture)
    runs: dict[str, Mapping[str, Any]] = {}
    unfinished: dict[str, Any] = {}
    bundled: Mapping[str, Any] = {"retrieval": [], "text": [], "length": 0}
    origins = []
    for path in results:
        document = json.loads(path.read_text(encoding="utf-8"))
        content = document["results"]
        origins.append((path.name, document["provenance"]))
        runs |= {entry["run"]["name"]: entry for entry in content.get("runs", [])}
        unfinished |= content.get("unfinished", {})
        bundled = content.get("bundled", bundled)
    template = (Path(__file__).parent / "page.md").read_text(encoding="utf-8")
    _plot_curves(runs, picture)
    origin = "\n".join(
        f"- `{name}`: {o['device']}, torch {o['torch']}, transformers {o['transformers']}, commit {o['commit'][:12]}, "
        f"{o['date'][:10]}"
        for name, o in origins
    )
    parts = {
        "ORIGIN": origin,
        "NUM_RUNS": str(len(runs)),
        "PICTURE": picture.name,
        "UNFINISHED": _unfinished(unfinished),
        "BUNDLED": _bundled(bundled),
        **{name: _table(runs, rows) for name, rows in TABLES.items()},
        "GRID": _grid(runs),
        "CURVES": _curves(runs),
        "NOISE": _noise(runs),
    }
    for name, text in parts.items():
        template = template.replace("{{" + name + "}}", text)
    output.write_text(template, encoding="utf-8")


def _table(runs: Runs, rows: Sequence[tuple[str, str, str]]) -> str:
    lines = ["| | numbers found | text loss | next token right | entries | seeds |", "|---|---|---|---|---|---|"]
    missing = []
    for label, prefix, method in rows:
        found = _figures(runs, prefix, method)
        if found.runs == 0:
            missing.append(label)
            continue
        lines.append(
            f"| {label} | {found.retrieval} | {found.loss} | {found.accuracy} | {found.entries} | {found.runs} |"
        )
    table = "\n".join(lines) if len(missing) < len(rows) else ""
    return "\n\n".join(filter(None, (table, f"Not run yet: {'; '.join(missing)}." if missing else "")))


def _figures(runs: Runs, prefix: str, method: str) -> Figures:
    entries: list[int] = []
    found: dict[str, list[float]] = {"retrieval": [], "loss": [], "accuracy": []}
    for seed in SEEDS:
        run = runs.get(f"{prefix}-s{seed}")
        if run is None:
            continue
        text = _named(run["text"], method)
        if text is None:
            continue
        found["loss"].append(text["loss"])
        found["accuracy"].append(text["accuracy"])
        numbers = _named(run.get("retrieval", []), method)
        if numbers is not None:
            found["retrieval"].append(numbers["exact"]["share"])
        entries.append(num_seen(Method.parse(text["method"]), run["run"]["phase"]["sequence_length"]))
    return Figures(
        len(entries), _spread(found["retrieval"], 3), _spread(found["loss"], 3), _spread(found["accuracy"], 4),
        f"{entries[0]:,}" if entries else "",
    )  # fmt: skip


def num_seen(method: Method, length: int) -> int:
    """Keys that the last of ``length`` tokens sees, itself included: what a cache holds per KV head."""
    if method.reads_prompt:
        return int(method.prompt_entries(length))
    bounds = UniformBounds(method.rule, 0, 0)
    rep_end, raw_start, raw_end = bounds.arrays(length - 1, length, torch.device("cpu"))
    return int(rep_end + raw_end - raw_start)


def _named(entries: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


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
            text, numbers = _named(run["text"], "own"), _named(run["retrieval"], "own")
            assert text is not None
            assert numbers is not None
            cells.append(f"{numbers['exact']['share']:.3f}, {text['loss']:.3f}")
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if any(name.startswith("mla-pooling=") for name in runs) else "Not run yet."


def _unfinished(unfinished: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    steps = (600, 800, 1000, 1400, 1800)
    lines = [
        "| answers right in training, at step | " + " | ".join(f"{step:,}" for step in steps) + " | last |",
        "|---|" + "---|" * (len(steps) + 1),
    ]
    for name, points in unfinished.items():
        at = {point["step"]: point for point in points}
        cells = [f"{at[step]['answers']:.3f}" if step in at else "" for step in steps]
        last = points[-1]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {last['answers']:.3f} at {last['step']:,} |")
    return "\n".join(lines)


def _bundled(content: Mapping[str, Any]) -> str:
    lines = ["| | numbers found | text loss | next token right | entries |", "|---|---|---|---|---|"]
    for text in content["text"]:
        exact = _named(content["retrieval"], text["name"])
        assert exact is not None
        share = exact["exact"]
        seen = num_seen(Method.parse(text["method"]), content["length"])
        lines.append(
            f"| {text['name']} | {share['share']:.3f} [{share['low']:.3f}, {share['high']:.3f}] | {text['loss']:.3f} | "
            f"{text['accuracy']:.4f} | {seen:,} |"
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
            cells = [_spread([curve[step] for curve in present if step in curve], 3) for step in (200, 500, 1000)]
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
            _spread([point["kl"] for points in entries for point in points if math.isclose(point["variance"], v)], 4)
            for v in columns
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
