"""A run's scores as one HTML page, tables and pictures, without scripts, fonts or anything else from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condense.files import whole_file

if TYPE_CHECKING:
    from condense.evaluate.harness.run import Score

_COLOURS = ("#5f6368", "#1a73e8", "#e37400", "#188038", "#a142f4", "#d93025")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #202124; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2.2em; } h3 { font-size: 1em; margin-top: 1.6em; }
table { border-collapse: collapse; margin: .6em 0; } th, td { padding: .25em .9em .25em 0; text-align: right; }
th { border-bottom: 1px solid #9aa0a6; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; } td small { color: #5f6368; } code { background: #f1f3f4; padding: .1em .3em; }
svg text { font: 12px system-ui, sans-serif; }
p.note { color: #5f6368; }
"""


def write_report(path: Path, title: str, scores: Sequence[Score], facts: dict[str, Any]) -> Path:
    """Write the page. facts: lines of the table at its head. Raises FileExistsError if there is one already."""
    methods = list(dict.fromkeys(score.method for score in scores))
    colours = {method: _COLOURS[i % len(_COLOURS)] for i, method in enumerate(methods)}
    parts = [f"<h1>{html.escape(title)}</h1>", _facts(facts)]
    for task in dict.fromkeys(score.task for score in scores):
        of_task = [score for score in scores if score.task == task]
        parts.append(f"<h2>{html.escape(task)}</h2>")
        for metric in dict.fromkeys(score.metric for score in of_task):
            of_metric = [score for score in of_task if score.metric == metric]
            parts.append(f"<h3>{html.escape(metric.removesuffix(',none'))}</h3>")
            whole = [score for score in of_metric if not score.by]
            parts += [_table(whole), _dots(whole, colours)]
            for field in dict.fromkeys(name for score in of_metric for name in score.by):
                split = [score for score in of_metric if field in score.by]
                parts += [_split_table(split, field, methods), _lines(split, field, colours)]
    parts.append(
        '<p class="note">In brackets: 95 % intervals, percentiles of 1,000 bootstrap samples. n: documents scored.</p>'
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    with whole_file(path, overwrite=False) as file:
        file.write(page.encode())
    return path


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td><code>{html.escape(str(v))}</code></td></tr>" for k, v in facts.items()
    )
    return f'<table class="facts">{rows}</table>'


def _number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def _cell(score: Score) -> str:
    interval = score.interval
    brackets = (
        f" <small>[{_number(interval.low)}, {_number(interval.high)}]</small>" if math.isfinite(interval.low) else ""
    )
    return f"{_number(interval.value)}{brackets}"


def _table(scores: Sequence[Score]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(s.method)}</code></td><td>{_cell(s)}</td><td>{s.interval.n}</td></tr>"
        for s in scores
    )
    return f"<table><tr><th>method</th><th>score</th><th>n</th></tr>{rows}</table>"


def _split_table(scores: Sequence[Score], field: str, methods: Sequence[str]) -> str:
    values = list(dict.fromkeys(score.by[field] for score in scores))
    head = "".join(f"<th><code>{html.escape(method)}</code></th>" for method in methods)
    found = {(score.by[field], score.method): score for score in scores}
    rows = ""
    for value in values:
        cells = [found.get((value, method)) for method in methods]
        n = next(cell.interval.n for cell in cells if cell is not None)
        rows += f"<tr><td>{html.escape(str(value))}</td>"
        rows += "".join(f"<td>{'' if cell is None else _cell(cell)}</td>" for cell in cells) + f"<td>{n}</td></tr>"
    return f"<table><tr><th>{html.escape(field)}</th>{head}<th>n</th></tr>{rows}</table>"


def _range(scores: Sequence[Score]) -> tuple[float, float]:
    """0 to 1 for shares, else a little more than the values and their intervals take."""
    ends = [x for s in scores for x in (s.interval.value, s.interval.low, s.interval.high) if math.isfinite(x)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.1 * (high - low) or 1.0
    return low - margin, high + margin


def _dots(scores: Sequence[Score], colours: dict[str, str]) -> str:
    """A point with its interval per method."""
    low, high = _range(scores)

    def x(value: float) -> float:
        return 40 + 560 * (value - low) / (high - low)

    height = 26 * len(scores) + 34
    parts = [f'<line x1="40" x2="600" y1="{height - 22}" y2="{height - 22}" stroke="#9aa0a6"/>']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(f'<text x="{x(value):.1f}" y="{height - 6}" text-anchor="middle">{value:.3g}</text>')
    for i, score in enumerate(scores):
        y, colour, interval = 16 + 26 * i, colours[score.method], score.interval
        if math.isfinite(interval.low):
            ends = f'x1="{x(interval.low):.1f}" x2="{x(interval.high):.1f}" y1="{y}" y2="{y}"'
            parts.append(f'<line {ends} stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<circle cx="{x(interval.value):.1f}" cy="{y}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="612" y="{y + 4}" fill="{colour}">{html.escape(score.method[:40])}</text>')
    return f'<svg viewBox="0 0 900 {height}" width="900" height="{height}" role="img">{"".join(parts)}</svg>'


def _lines(scores: Sequence[Score], field: str, colours: dict[str, str]) -> str:
    """One line per method over the values of a field, evenly spaced, with intervals."""
    values = list(dict.fromkeys(score.by[field] for score in scores))
    if len(values) < 2:
        return ""
    low, high = _range(scores)

    def at(value: Any, figure: float) -> tuple[float, float]:
        return 60 + 520 * values.index(value) / (len(values) - 1), 190 - 170 * (figure - low) / (high - low)

    parts = ['<line x1="60" x2="580" y1="190" y2="190" stroke="#9aa0a6"/>']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        _, y = at(values[0], value)
        parts.append(f'<line x1="60" x2="580" y1="{y:.1f}" y2="{y:.1f}" stroke="#e8eaed"/>')
        parts.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    parts += [
        f'<text x="{at(v, low)[0]:.1f}" y="208" text-anchor="middle">{html.escape(str(v))}</text>' for v in values
    ]
    parts.append(f'<text x="320" y="226" text-anchor="middle">{html.escape(field)}</text>')
    for i, (method, colour) in enumerate(colours.items()):
        line = [score for score in scores if score.method == method]
        points = [at(score.by[field], score.interval.value) for score in line]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{corners}"/>')
        for score, (x, y) in zip(line, points, strict=True):
            if math.isfinite(score.interval.low):
                y1, y2 = at(score.by[field], score.interval.low)[1], at(score.by[field], score.interval.high)[1]
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="600" y="{30 + 20 * i}" fill="{colour}">{html.escape(method[:42])}</text>')
    return f'<svg viewBox="0 0 900 236" width="900" height="236" role="img">{"".join(parts)}</svg>'
