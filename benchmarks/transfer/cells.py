"""Pages from result files: every cell beside dense attention, and the worst model and the worst task of each arm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from condense.evaluate.intervals import Cell
from condense.tasks import LEAST_FOUND

TOKENS = ("key", "other", "copy", "identifier")
TASKS = ("number", "shared", "several", "chain")
Record = Mapping[str, Any]


def cells(arm: Record, dense: Record) -> dict[str, Cell]:
    """By class of tokens and by task."""
    result = {}
    for name in TOKENS:
        parts = ("code",) if name == "identifier" else ("prose",) if name == "copy" else ("prose", "code")
        pairs = [(a[name], d[name]) for part in parts for a, d in zip(arm[part], dense[part], strict=True) if name in a]
        table = np.array([(a[0], d[0], d[2]) for a, d in pairs if d[2]], float).reshape(-1, 3)
        if len(table):
            result[name] = Cell.of(*table.T, relative=False)
    for name in TASKS:
        pairs = [(a[name], d[name]) for a, d in zip(arm["asked"], dense["asked"], strict=True) if name in d]
        table = np.array([(a.count("1"), d.count("1"), len(d)) for a, d in pairs], float).reshape(-1, 3)
        if table[:, 2].sum() and (cell := Cell.of(*table.T, relative=True)).dense >= LEAST_FOUND:
            result[name] = cell
    return result


def read(paths: Sequence[Path]) -> dict[tuple[str, int], dict[str, Record]]:
    """Records by make and length, then by arm."""
    result: dict[tuple[str, int], dict[str, Record]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "arm" in record and "error" not in record:
                result.setdefault((record["make"], record["length"]), {})[record["arm"]] = record
    return result


def worst(results: Mapping[tuple[str, int], Mapping[str, Record]], lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Per arm: the cell that is furthest above the bar over models, lengths and tasks, of tokens and of tasks."""
    found: dict[str, dict[str, Any]] = {}
    for (make, length), by_arm in results.items():
        if length not in lengths or "dense" not in by_arm:
            continue
        for name, record in by_arm.items():
            entry = found.setdefault(name, {"models": set(), "tokens": None, "tasks": None, "failed": []})
            entry["models"].add(make)
            for what, cell in cells(record, by_arm["dense"]).items():
                kind = "tasks" if what in TASKS else "tokens"
                if entry[kind] is None or cell.value > entry[kind][0].value:
                    entry[kind] = (cell, what, make, length)
                if not cell.passes(what in TASKS):
                    entry["failed"].append((what, make, length))
    return found


def page(paths: Sequence[Path]) -> str:
    """Markdown: the worst cells per arm, then every cell."""
    results = read(paths)
    lines = ["| arm | models | worst tokens (nats) | worst task (lost) | cells that fail |", "|---|---|---|---|---|"]
    for name, entry in worst(results, (16384, 32768, *[n for _, n in results if n < 4096])).items():
        places = [
            f"{best[0].value:+.3f} {best[1]} {best[2]} {best[3]}" if (best := entry[kind]) else ""
            for kind in ("tokens", "tasks")
        ]
        lines.append(f"| {name} | {len(entry['models'])} | {' | '.join(places)} | {len(entry['failed'])} |")
    for (make, length), by_arm in sorted(results.items()):
        if "dense" not in by_arm:
            continue
        base = cells(by_arm["dense"], by_arm["dense"])
        names = list(base)
        lines += [
            "",
            f"## {make}, {length:,} tokens",
            "",
            "| arm | device | host store | read | " + " | ".join(names) + " | KL |",
        ]
        lines.append("|---" * (len(names) + 5) + "|")
        shown = " | ".join(f"{base[name].dense:.3f} ({base[name].n})" for name in names)
        lines.append(f"| dense | 1 | | 1 | {shown} | |")
        for name, record in by_arm.items():
            if name == "dense":
                continue
            row = cells(record, by_arm["dense"])
            shown = " | ".join(
                f"{row[what].value:+.4f} [{row[what].low:+.3f}, {row[what].high:+.3f}]"
                + ("" if row[what].passes(what in TASKS) else " ✗")
                if what in row else "" for what in names
            )  # fmt: skip
            sizes = " | ".join(
                "" if (size := record.get(key)) is None else f"{size:.1%}" for key in ("device", "host_store", "read")
            )
            kl = np.mean([text.get("kl", np.nan) for text in record["prose"]])
            lines.append(f"| {name} | {sizes} | {shown} | {kl:.4f} |")
        lines += ["", *_frontier(by_arm)]
    return "\n".join(lines) + "\n"


def _frontier(by_arm: Mapping[str, Record]) -> list[str]:
    """Arms that no other beats at as many bytes or fewer, by bytes read and by bytes on the device."""
    lines, losses = [], dict[str, tuple[float, ...]]()
    for name, record in by_arm.items():
        row = cells(record, by_arm["dense"])
        if {"key", "copy"} <= set(row):
            losses[name] = (
                row["key"].value,
                row["copy"].value,
                max([row[x].value for x in TASKS if x in row] or [0.0]),
            )
    for size in ("read", "device"):
        sized = {name: loss for name, loss in losses.items() if by_arm[name].get(size) is not None}
        best: list[str] = []
        for name in sorted(sized, key=lambda name: (by_arm[name][size], sized[name])):
            if name != "dense" and not any(
                all(a <= b for a, b in zip(sized[other], sized[name], strict=True)) for other in best
            ):
                best.append(name)
        shown = (f"{by_arm[n][size]:.1%} {n} ({sized[n][0]:+.3f}, {sized[n][1]:+.3f}, {sized[n][2]:.1%})" for n in best)
        lines += [f"By bytes {size} (far text needed, copies, worst task): {'; '.join(shown)}.", ""]
    return lines
