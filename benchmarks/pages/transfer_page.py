"""`docs/studies/transfer.md`, from its template, and the table of the same study in `docs/recall.md`.

In the template stand ``{{WORST run}}``, ``{{ARMS run make length}}``, ``{{LENGTHS run make}}`` and ``{{UNITED run}}``,
runs counted from the oldest, 0, and ``{{ADAPTED}}``; in the page of Recall the worst cells of a run between
``<!-- transfer RUN -->`` and ``<!-- /transfer -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TITLES = {
    "llama-77m": "77M Llama", "mla-28m": "25M with latents", "qwen3-83m": "83M Qwen3", "gemma3-44m": "44M Gemma 3",
}  # fmt: skip
TOKENS = {"key": "far text needed", "copy": "copies", "identifier": "far identifiers", "other": "other tokens"}
TASKS = {"number": "numbers", "shared": "names that share words", "several": "several at once"}
_BY_LENGTH = (
    "drop 1/16", "drop 1/8", "drop 1/4", "drop 1/2", "log 1/8", "log 1/4", "drop 1/4, store 4",
    "drop 1/4, groups of 32, store 4", "drop 1/4, turned 4", "drop 1/4, groups of 32, turned 4",
    "drop 1/4, turned 4, values 3", "drop 1/4, turned 3, values 4", "drop 1/4, turned 3", "log 1/4, store 4",
    "log 1/4, groups of 32, store 4", "drop 128", "drop 256", "drop 256, store 4", "drop 1/8, turned 4",
    "drop 1/8, turned 4, look 2", "drop 1/8, turned 4, look 4", "drop 1/4, every 2", "drop 1/4, every 4",
    "drop 1/4, every 8", "drop 1/4, every 16", "drop 1/4, every 1, before", "drop 1/4, every 8, before",
    "drop 1/4, groups of 32, turned 4, every 16", "cache of 4 bits", "cache of 4 bits, turned",
    "cache of 3 bits, turned, values too", "window 25%",
)  # fmt: skip
_CLAIMED = (
    "cache of 4 bits, turned", "cache of 4 bits", "log 1/4, store 4", "log 1/4, groups of 32, store 4",
    "drop 1/4, groups of 32, turned 4", "drop 1/4, groups of 32, store 4", "drop 1/4, turned 4", "drop 1/4, store 4",
    "drop 256, store 4", "drop 1/8, turned 4", "log 1/4", "drop 1/4", "window 25%",
)  # fmt: skip
# of the run whose prompts were read densely; all have a store of 4 bits, and groups of 32 where none are named
_EXACT = (
    "cache of 4 bits", "groups of 16, log 256, prompt exact", "log 1/4, prompt exact", "log 1/8, prompt exact",
    "groups of 16, drop 256, prompt exact", "drop 1/4, prompt exact", "drop 1/4", "drop 1/8, prompt exact",
    "drop, 5% left, prompt exact", "log, 5% left, prompt exact",
)  # fmt: skip
# of the named settings with stores of steps per channel, what else a store could be, and other numbers of groups
_NAMED = (
    "recall-device", "recall-host", "cache of 4 bits", "cache of 4 bits, turned", "turned 5", "turned 5, values 3",
    "turned 4", "16 bits", "1/2", "1/2, 16 bits", "1/8", "groups of 8", "window 1024", "window 25%",
)  # fmt: skip
# of the newest run: the same with centres in the index and turned keys in the store
_CENTRED = (
    "recall-device", "recall-host", "cache of 4 bits", "16 bits", "values 3", "keys 4, values 3", "1/2", "1/8", "1/16",
    "groups of 8", "window 1024",
)  # fmt: skip
_SHORT = ("1/8", "256", "1/4", "1/4, the first layer too", "cache of 4 bits")
_BLOCK = re.compile(r"(<!-- transfer (\d) -->\n).*?(<!-- /transfer -->)", re.DOTALL)
_PLACE = re.compile(r"\{\{(\w+)([^}]*)\}\}")


def run_of(documents: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Models of a run that learned, by make; the oldest run is 0, the newest -1."""
    name = sorted(name for name in documents if name.startswith("transfer-"))[number]
    return {model["make"]: model for model in documents[name]["results"]["models"] if "rows" in model}


def write_page(documents: Mapping[str, Any], page: Path) -> None:
    """Write the study's page."""
    tables = {"ARMS": _arms, "LENGTHS": _lengths, "UNITED": _united}

    def table(place: re.Match[str]) -> str:
        if place[1] == "ADAPTED":
            return _adapted([of for name, of in sorted(documents.items()) if name.startswith("adapted-")])
        run, *others = place[2].split()
        if place[1] == "WORST":
            return _worst_cells(documents, int(run))
        return tables[place[1]](run_of(documents, int(run)), *others)

    template = Path(__file__).with_name("transfer.md").read_text(encoding="utf-8")
    page.write_text(_PLACE.sub(table, template), encoding="utf-8")


def fill(page: Path, documents: Mapping[str, Any]) -> None:
    """Write the tables of another page anew."""

    def table(block: re.Match[str]) -> str:
        return block[1] + _worst_cells(documents, int(block[2])) + block[3]

    page.write_text(_BLOCK.sub(table, page.read_text(encoding="utf-8")), encoding="utf-8")


def worst(models: Mapping[str, Any], arm: str, names: Iterable[str]) -> tuple[float, int, str]:
    """The most that an arm loses of these classes of tokens or tasks in any model at any length, where and in which."""
    rows = [(row, make) for make, model in models.items() for row in model["rows"] if row["arm"] == arm]
    return max((row[name][0], row["length"], make) for row, make in rows for name in names if name in row)


def _worst_cells(documents: Mapping[str, Any], run: int) -> str:
    """The arms of a run with which something is claimed: bytes, and the most that they lose in any model and length."""
    models = run_of(documents, run)
    rows = [["", "device", "host store", "read", "far text needed", "copies", "worst task"], ["---"] * 7]
    for arm in {3: _CLAIMED, 4: _EXACT, 5: _NAMED, 6: _CENTRED, 8: _SHORT}[run]:
        measured = [row for model in models.values() for row in model["rows"] if row["arm"] == arm]
        sizes = [[f"{row[size]:.0%}" for row in measured if size in row] for size in ("device", "host_store", "read")]
        cells = []
        for names in (["key"], ["copy"], TASKS):
            lost, length, make = worst(models, arm, names)
            cells.append(f"{_percent(lost) if names is TASKS else f'{lost:+.3f}'} ({TITLES[make]}, {length:,})")
        rows.append([arm, *(_between(of) for of in sizes), *cells])
    return _table(rows)


def _between(shares: Sequence[str]) -> str:
    ends = sorted(set(shares), key=lambda share: float(share[:-1]))
    return f"{ends[0][:-1]} to {ends[-1]}" if len(ends) > 1 else "".join(ends)


def row_of(model: Mapping[str, Any], arm: str, length: int) -> Mapping[str, Any]:
    """The row of an arm; empty if it was not measured."""
    return next((row for row in model["rows"] if (row["arm"], row["length"]) == (arm, length)), {})


def _arms(models: Mapping[str, Any], make: str, length: str) -> str:
    """The arms at one length, but for entries without bias."""
    of_length = [row for row in models[make]["rows"] if row["length"] == int(length) and "none" not in row["arm"]]
    dense, *others = of_length
    names = [name for name in (TOKENS | TASKS) if name in dense]
    rows = [["", "device", "host store", "read", *(f"{(TOKENS | TASKS)[name]} ({dense[name][4]:,})" for name in names)]]
    rows += [["---"] * len(rows[0])]
    shown = (f"{dense[name][3]:.1%}" if name in TASKS else f"{dense[name][3]:.3f}" for name in names)
    rows.append(["dense: found, loss", "", "", "", *shown])
    for row in others:
        sizes = [f"{row[size]:.0%}" if size in row else "" for size in ("device", "host_store", "read")]
        rows.append([row["arm"], *sizes, *(_cell(row, name) for name in names)])
    return _table(rows)


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return ""
    value, low, high = row[name][:3]
    text = _percent(value) if name in TASKS else f"{value:+.3f}"
    interval = f"{_percent(low)} to {_percent(high)}" if name in TASKS else f"{low:+.3f} to {high:+.3f}"
    return f"{text} ({interval})" if name in row["failed"] else f"**{text}** ({interval})"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("-0.0%", "0.0%")


def _lengths(models: Mapping[str, Any], make: str) -> str:
    """Far text needed, copies and the worst task by length."""
    lengths = sorted({row["length"] for row in models[make]["rows"]})
    rows = [["", *(f"{length:,}" for length in lengths)], ["---"] * (1 + len(lengths))]
    for arm in _BY_LENGTH:
        found = [row_of(models[make], arm, length) for length in lengths]
        if any(found):
            rows.append([arm, *(f"{_nats(row)}; {_worst(row)}" if row else "" for row in found)])
    return _table(rows)


def _nats(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{row[name][0]:+.3f}" if name in row else "?" for name in ("key", "copy")) if row else ""


def _worst(row: Mapping[str, Any]) -> str:
    return _percent(max(row[name][0] for name in TASKS if name in row)) if row else ""


def _adapted(runs: Sequence[Mapping[str, Any]]) -> str:
    """Far text needed, copies and the worst task by length, before and after adapting, of models of one make."""
    models = [run["results"]["models"][0] for run in runs]
    lengths = sorted({row["length"] for model in models for row in model["rows"]})
    rows = [["", "steps", "device", "read", *(f"{length:,}" for length in lengths)], ["---"] * (4 + len(lengths))]
    for number, model in enumerate(models, 1):
        for arm in dict.fromkeys(row["arm"] for row in model["rows"] if row["arm"] != "dense"):
            form, found = arm.partition(", adapted")[0], [row_of(model, arm, length) for length in lengths]
            if "not adapted" in arm and form.removesuffix(", not adapted") not in model["adapted"]:
                continue  # a form that this run did not come to
            steps = f"{model['adapted'][form]['step']:,}" if form in model["adapted"] else ""
            sizes = [_between([f"{row[size]:.0%}" for row in found]) for size in ("device", "read")]
            cells = [f"{_nats(row)}; {_worst(row)}" for row in found]
            rows.append([f"{arm} [{number}]", steps, *sizes, *cells])
    return _table(rows)


def _united(models: Mapping[str, Any]) -> str:
    """Groups that any of several consecutive queries opens, mean over layers, and the layer with most."""
    found = [(make, entry) for make, model in models.items() for entry in model["united"]]
    counts = [name for name in found[0][1] if name.isdigit()]
    rows = [["queries", *counts], ["---"] * (1 + len(counts))]
    for make, entry in found:
        head = f"{TITLES[make]}, {entry['length']:,} tokens, groups of {entry['group']}"
        rows.append([head, *(f"{entry[n][0]:.0%} ({entry[n][1]:.0%})" for n in counts)])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
