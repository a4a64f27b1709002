"""The tables of the page: rows by label, or runs, to Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from needed import TARGET, predicted
from needed import needed as groups_needed
from readings import KNOWN, Row, Runs, by_label

# shares of the dense cache at which methods are compared
SHARES = (0.05, 0.09, 0.16, 0.25)
BUDGET = 0.02  # goal: nats above dense attention

# what is held against each other at equal bytes, and the beginnings of the labels that belong to each
_KINDS = {
    "**calibrated, host store**": "calibrated, host",
    "**calibrated, no host store**": "calibrated, device",
    "`Recall` in all layers, host store": "recall",
    "Quest, host store": "quest",
    "window (StreamingLLM)": "window",
    "SnapKV": "snapkv",
    f"SnapKV, {KNOWN}": "snapkv",
    "pooled: CCA": "cca",
    "pooled: LCA": "lca",
    "pooled: DGA": "dga",
    "dense cache in fewer bits": "dense cache",
}
_SLACK = 0.002  # share of the dense cache by which a row may exceed its size
_LEAST = 0.99  # goal: share of the numbers that dense attention finds
_NUMBERS = 512  # numbers hidden for each model
_FINER = "recall finer index, entries of 4 bits"
_GOALS = {
    _FINER: "host store, 9 %: `Recall` in all layers",
    f"{_FINER}, more open": "the same, more open",
    "1/2 open, bounds of 16": "host store, 9 %: `Recall` in all layers, half open",
    "calibrated, host, 9.0%": "host store, 9 %: calibrated",
    "calibrated, host, 5.0%": "host store, 5 %: calibrated",
    "calibrated, device, 16.0%": "no host store, 16 %: calibrated",
    "calibrated, device, 25.0%": "no host store, 25 %: calibrated",
}
_NAMES = {"llama": "one KV head per query head", "gqa4": "four query heads per KV head", "mla": "latents"}


def methods(rows: Mapping[str, Sequence[Row]]) -> str:
    head = ("", "device", "host", "numbers found", "text loss above dense", "second half", "last 512 tokens")
    cells = []
    for label, of in sorted(rows.items(), key=lambda item: -mean(row.share for row in item[1])):
        shares = [_range([row[i] for row in of], "{:.1%}") for i in (0, 1)]
        losses = [_range([getattr(row, name) for row in of], "{:+.3f}") for name in ("above", "half", "last")]
        seeds = "" if len(of) == max(map(len, rows.values())) else f" ({len(of)} seeds)"
        cells.append((label + seeds, *shares, _range([row.found for row in of], "{:.3f}"), *losses))
    return _table(head, cells)


def equal(rows: Mapping[str, Sequence[Row]]) -> str:
    """Best row of each kind within a share of the bytes on the device: the one that finds most numbers, and of those
    that find as many within one in a hundred the one that loses least at the end of the texts.
    """
    dense = mean(row.found for row in rows["dense"])
    cells = []
    for kind, begin in _KINDS.items():
        points = [
            (mean(row.share for row in of), mean(row.found for row in of) / dense, mean(row.last for row in of))
            for label, of in rows.items()
            if label.startswith(begin) and (KNOWN in label) == (KNOWN in kind) and not label.endswith("nats")
        ]
        row = [kind]
        for share in SHARES:
            fitting = [(found, last) for size, found, last in points if size <= share + _SLACK]
            most = max((found for found, _ in fitting), default=0.0)
            best = min(((last, found) for found, last in fitting if found >= most - 0.01), default=None)
            row.append("" if best is None else f"{best[1]:.3f}, {best[0]:+.3f}")
        cells.append(row)
    return _table(("", *(f"{share:.0%}" for share in SHARES)), [row for row in cells if any(row[1:])])


def overall(runs: Sequence[Runs]) -> str:
    """The goals over the models of several runs: their numbers together, losses from the least to the greatest."""
    head = ("at most", "models", "found, of dense's numbers", "share", "text loss", "models that meet it")
    models = [[run for run in of if run["seed"] == seed] for of in runs for seed in sorted({run["seed"] for run in of})]
    tables = [{label: of[0] for label, of in by_label(model).items()} for model in models]
    cells = []
    for label, name in _GOALS.items():
        rows = [(table[label], table["dense"]) for table in tables if label in table]
        if not rows:
            continue
        found, dense = (round(sum(pair[i].found for pair in rows) * _NUMBERS) for i in (0, 1))
        losses = [row.above for row, _ in rows if row.above is not None]
        met = sum(_meets(row, stock) for row, stock in rows)
        share = f"{found / dense:.1%}"
        between = f"{min(losses):+.3f} to {max(losses):+.3f}"
        cells.append((name, str(len(rows)), f"{found:,} of {dense:,}", share, between, f"{met} of {len(rows)}"))
    return _table(head, cells)


def _meets(row: Row, dense: Row) -> bool:
    """True if a row loses little enough text and finds enough of the numbers that dense attention finds."""
    return row.above is not None and row.above <= BUDGET and row.found / dense.found >= _LEAST


def needed(runs: Mapping[str, Runs]) -> str:
    """By architecture and length, seed by seed: the groups that must be open, and those predicted for longer texts."""
    lengths = sorted({run["length"] for of in runs.values() for run in of})
    cells = []
    for name, of in runs.items():
        by_length = []
        for length in lengths:
            rows = [by_label([run]) for run in of if run["length"] == length]
            points = [[(int(r[2:]), seed[0].half) for r, seed in row.items() if r != "dense"] for row in rows]
            by_length.append([groups_needed([(r, y) for r, y in seed if y is not None]) for seed in points])
        far = [predicted([*zip(lengths, seed, strict=True)]) for seed in zip(*by_length, strict=True)]
        cells.append(
            (_NAMES[name], *(", ".join("?" if r is None else f"{r:.0f}" for r in row) for row in (*by_length, far)))
        )
    return _table(("", *(f"{length:,}" for length in lengths), f"{TARGET:,}, predicted"), cells)


def _range(values: Sequence[float | None], form: str) -> str:
    """Mean, and the least and the greatest where they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, middle, high = (form.format(x) for x in (min(known), mean(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
