"""Pictures of measured data. matplotlib is an extra, imported only when a picture is drawn."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from condense.evaluate.compare import Outcome
from condense.files import whole_file
from condense.methods import Method
from condense.models import MethodChoice, methods_of
from condense.named import NAMED_SETTINGS

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#9aa0a6", "#1a73e8", "#e37400", "#188038", "#a142f4", "#d93025")


def require_matplotlib(path: Path) -> None:
    """Raise ValueError if no picture can be drawn: path ends in none of .png, .svg, .pdf, or matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"plot must end in one of {', '.join(FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot needs matplotlib: pip install matplotlib")


def method_labels(choices: Sequence[MethodChoice]) -> list[str]:
    """Short labels of methods: the name of their setting or method, numbered where two would be the same."""
    named = {Method.parse(name): name for name in NAMED_SETTINGS}
    kinds = [
        "+".join(dict.fromkeys(named.get(method) or type(method).__name__ for method in methods_of(choice)))
        for choice in choices
    ]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]


def plot_comparison(outcomes: Sequence[Outcome], path: Path) -> None:
    """Bars of `condense compare`: KV cache on the device, times to the first token and per token; right answers."""
    names = method_labels([outcome.method for outcome in outcomes])
    labels = [n + ("" if o.correct is None else f"\n{o.correct} right") for n, o in zip(names, outcomes, strict=True)]
    panels = {
        "KV cache, MiB": [o.device_bytes / 2**20 for o in outcomes],
        "time to first token, s": [o.first_token_s for o in outcomes],
        "time per token, ms": [(o.token_s or 0.0) * 1e3 for o in outcomes],
    }
    figure, axes = new_figure(len(panels), width=3.4)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        bars = axis.bar(labels, values, color=COLOURS[: len(values)])
        axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
    figure.suptitle(f"{outcomes[0].text_tokens} tokens of text", fontsize=10)
    save_figure(figure, path)


Line = tuple[Sequence[float], Sequence[float]]


def plot_lines(
    panels: Mapping[str, Mapping[str, Line]], path: Path, *, x_label: str, y_label: str, log: bool = False
) -> None:
    """Lines in panels: title -> label -> x and y; log: both on log scales."""
    figure, axes = new_figure(len(panels), width=3.6)
    for axis, (title, lines) in zip(axes if len(panels) > 1 else [axes], panels.items(), strict=True):
        for i, (label, (x, y)) in enumerate(lines.items()):
            axis.plot(x, y, "o-", markersize=3, color=COLOURS[i % len(COLOURS)], label=label)
        if log:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x_label, fontsize=8)
        axis.set_ylabel(y_label, fontsize=8)
        axis.tick_params(labelsize=8)
        if axis.has_data():
            axis.legend(fontsize=7)
    save_figure(figure, path)


def new_figure(panels: int, width: float) -> tuple[Any, Any]:
    """A figure of so many panels side by side, each ``width`` inches wide, and their axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, panels, figsize=(width * panels, 3.2), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the path's ending, whole or not at all, and close it."""
    from matplotlib import pyplot

    try:
        with whole_file(path, overwrite=True) as file:
            figure.savefig(file, dpi=160, format=path.suffix.lower().removeprefix("."))
    finally:
        pyplot.close(figure)
