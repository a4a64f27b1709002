"""Sentences of docs/studies/results.md about KDA, which was checked, timed and adapted once."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from speed.rows import milliseconds

if TYPE_CHECKING:
    from papers_page import Figures

_SHAPE = "bench-kernel-h32-kv8-d128-v128-b1-bfloat16-*"
_RUNNERS = {"cudnn": "dense, cuDNN", "cca": "CCA, g 16, w 1,024", "kda": "KDA"}
_STARTS = {"trained": "A model trained with dense attention", "bundled": "The bundled model, which has learned CCA"}


def share(figures: Figures) -> str:
    """The worst share of the error budget that an output or a gradient took."""
    rows = [*figures.newest("kda-check-h200-*")["check"], *figures.newest("kda-times-h200-*")["check"]]
    return f"{max(row['share_of_budget'] for row in rows):.2f}"


def times(figures: Figures) -> str:
    """A table of prompts and steps; CCA's and cuDNN's times are those of `python benchmarks/speed kernel`."""
    rows = {(x["op"], x["length"]): x for x in figures.newest("kda-times-h200-*")["rows"] if x["runner"] == "kda"}
    columns = sorted(rows, key=lambda column: (column[0] == "decode", column[1]))

    def time(runner: str, op: str, length: int) -> float:
        op = "forward" if (runner, op) == ("cudnn", "layer") else op
        row = rows[op, length] if runner == "kda" else figures.row(_SHAPE, runner, length, None, op)
        return float(row["times"]["median_ms"])

    titles = [f"{'step after' if op == 'decode' else 'prompt of'} {length:,} tokens" for op, length in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for runner, title in _RUNNERS.items():
        cells = []
        for column in columns:
            own, dense = time(runner, *column), time("cudnn", *column)
            cells.append(milliseconds(own) + ("" if runner == "cudnn" else f" ({dense / own:.1f}x)"))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def adapted(figures: Figures) -> str:
    """Facts that models find which read the same tokens, each with its own attention; or that no file has them."""
    if not figures.named("kda-adapted-h200-*"):
        return "What a model finds that was adapted to it was not measured."
    runs = dict(figures.newest("kda-adapted-h200-*"))
    start, phase = runs.pop("base"), runs["kda"]["phase"]
    tokens = phase["steps"] * phase["batch_size"] * phase["sequence_length"] / 1e6
    rows = {"before, dense": start["dense"], "before, with CCA": start["condensed"]}
    rows |= {run["title"]: run["after"] for run in runs.values()}
    about = (
        f"{_STARTS[start['model']]}, adapted on {tokens:.1f} million tokens in {phase['steps']:,} steps of texts of "
        f"{phase['sequence_length']:,}: all weights, the KL to itself before as loss, one learning rate, one seed. KDA "
        "takes over the projections; its decays, gates and convolutions are new. *Found*: of "
        f"{start['dense']['found']['total']} hidden numbers; text loss in nats per token, with its standard error."
    )
    lines = [textwrap.fill(about, 120), "", "| | found | text loss |", "|---|---|---|"]
    for title, row in rows.items():
        found = "{share:.3f} [{low:.3f}, {high:.3f}]".format(**row["found"])
        lines.append(f"| {title} | {found} | {row['text_loss']:.3f} ± {row['standard_error']:.3f} |")
    return "\n".join(lines)
