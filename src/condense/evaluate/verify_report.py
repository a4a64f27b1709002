"""A verdict in plain words, and one page of results of one model or of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from condense.evaluate.intervals import MOST_BOUND, MOST_LOST, MOST_NATS
from condense.evaluate.verify import ALL_OPEN, DENSE, WINDOW, Verified
from condense.evaluate.verify_texts import TASKS
from condense.tasks import LEAST_FOUND

Content = Mapping[str, Any]
_FEW = 100  # a verdict on fewer tokens than this says that they are few
WORDS = {"far": "tokens that need far text", "other": "other tokens", "copy": "copies"} | {task: task for task in TASKS}
BARS = (
    f"Bars: at most {MOST_NATS} nats above dense attention on each kind of token; net at most {MOST_LOST:.0%} of each "
    f"task lost, with the paired 95 % bound at most {MOST_BOUND:.0%}."
)
MORE = (
    "No setting passes. More open groups lose less: --method recall-device:min_recall=2048, or "
    "recall-host:num_recall=1024,slots=1024. Up to some 8,448 tokens both open all groups already, and more bits lose "
    "less: recall-device:store_bits=8. With keep, a larger share of the prompt loses less."
)


@dataclass(frozen=True)
class Verdict:
    """cheapest: name of the passing setting with the smallest cache on the device, None if none passes or nothing was
    shown. passing: names, cheapest first. text: all of it in words, one sentence per line.
    """

    cheapest: str | None
    passing: list[str]
    text: str


def verdict(results: Sequence[Verified]) -> Verdict:
    """Judge all cells; a cell shows that far text is kept only if the window, which drops far text, fails in it."""
    by_name = {result.name: result for result in results}
    lost = [name for name in WORDS if name in {cell for _, cell in by_name[WINDOW].failed}]
    if not set(lost) - {"far"}:  # a window fails on "far" by construction: those are the tokens that it loses
        text = (
            "Your text and these tasks do not need far text, or the model does not use it: a window of 25 % copies and "
            "finds as much, so nothing was shown. Give longer or other text."
        )
        return Verdict(None, [], text)
    if by_name[ALL_OPEN].failed:
        text = (
            "All groups open is dense attention and fails all the same, so these measurements are too coarse and "
            f"nothing was shown: {_failures(by_name[ALL_OPEN])}. Give --dtype float32 or more --texts."
        )
        return Verdict(None, [], text)
    candidates = [result for result in results if result.name not in (DENSE, WINDOW, ALL_OPEN)]
    good = sorted((result for result in candidates if not result.failed), key=lambda each: (each.device, each.host))
    lines = [f"{result.name} fails: {_failures(result)}." for result in candidates if result.failed]
    lengths = ", ".join(f"{each.length:,}" for each in results[0].lengths)
    for result in good:
        on_host = f", and {result.host:.1%} of it in host memory" if result.host else ""
        size = f"{result.device:.1%} of dense attention's cache on the device{on_host}"
        lines.append(f"{result.name} passes at {lengths} tokens: {size}.")
        if result.opens_all:
            lines.append("There it opens all groups: nothing was shown about its choice; give a longer --length.")
    lines.append(f"Cheapest that passes: {good[0].name}." if good else MORE)
    if missing := [WORDS[name] for name in WORDS if name not in lost]:
        reason = f"the window passes there, or dense attention finds less than {LEAST_FOUND:.0%}, or there are none"
        lines.append(f"Nothing was shown about {', '.join(missing)}: {reason}.")
    return Verdict(good[0].name if good else None, [result.name for result in good], "\n".join(lines))


def _failures(result: Verified) -> str:
    """Every cell that misses its bar, worst length last."""
    said = []
    for each in result.lengths:
        for name in each.failed:
            cell = each.cells[name]
            is_task = name in TASKS
            unsure = cell.value <= MOST_LOST if is_task else cell.n < _FEW
            near = f" (too few {'questions' if is_task else 'tokens'} to be sure)" if unsure else ""
            said.append(f"{WORDS[name]} at {each.length:,}: {_figure(vars(cell), name)}{near}")
    return "; ".join(said)


def page(files: Sequence[Content]) -> str:
    """Markdown from the contents of result files: one table over all models, then each model's verdict and figures."""
    heads = ["model", "setting", "device", "host", "tokens", *WORDS.values(), "greedy steps alike", "passes"]
    rows = [[content["model"], *cells_of(*both)] for content in files for both in at_lengths(content)]
    lines = ["# What settings lose", "", BARS, "", *_table(heads, rows)]
    for content in files:
        config = content["config"]
        about = (
            f"{content['dtype']}, text: {content['text']}; {config['texts']} texts of each kind and length, "
            f"seed {config['seed']}. Figures are nats above dense attention, or the share lost of what it finds, "
            "with a paired 95 % interval and the number of tokens or questions; dense attention's row has its own loss "
            f"and what it finds. *{WINDOW}* must fail, *{ALL_OPEN}* is the noise."
        )
        lines += ["", f"## {content['model']}", "", *content["verdict"]["text"].splitlines(), "", about, ""]
        lines += [f"- `{result['name']}`: {result['settings']}" for result in content["settings"]]
        lines += _places(content)
    return "\n".join(lines) + "\n"


def at_lengths(content: Content) -> list[tuple[Content, Content]]:
    """Each setting of a result file with each of its lengths."""
    return [(result, each) for result in content["settings"] for each in result["lengths"]]


def cells_of(result: Content, each: Content, *, short: bool = False) -> list[str]:
    """A row of the table: name, sizes, length, figures, agreement, and whether the bars are met.

    short: without bytes in host memory, intervals, and numbers of tokens, questions and steps.
    """
    is_dense = result["name"] == DENSE
    figures = []
    for name in WORDS:
        cell = each["cells"].get(name)
        if cell is None:
            figures.append("")
        elif is_dense:
            figures.append(_percent(cell["dense"]) if name in TASKS else f"{cell['dense']:.3f}")
        else:
            figures.append(_value(cell["value"], name) if short else _figure(cell, name))
    greedy = each["greedy"]
    of_all = "" if short else f" of {greedy['total']}"
    alike = _percent(greedy["share"]) + of_all if greedy["total"] else ""
    passes = "" if is_dense else "no" if each["failed"] else "yes"
    sizes = [_percent(result["device"]), *([] if short else [_percent(result["host"]) if result["host"] else ""])]
    return [result["name"], *sizes, f"{each['length']:,}", *figures, alike, passes]


def _places(content: Content) -> list[str]:
    """Tables by place in the text: losses and divergence by stretch of the second half, answers by fifth."""
    lines = []
    for name, title in (("losses", "loss"), ("divergence", "divergence from dense")):
        lines += ["", f"{title.capitalize()} by stretch of the second half, nats per token:", ""]
        rows = [
            [result["name"], f"{each['length']:,}", *(f"{value:.4f}" for value in each[name])]
            for result, each in at_lengths(content)
        ]
        lines += _table(["setting", "tokens", *map(str, range(1, len(rows[0]) - 1))], rows)
    for task in TASKS:
        title = f"{task.capitalize()} found, by fifth of the text in which they stand (95 % Wilson interval):"
        lines += ["", title, ""]
        rows = []
        for result, each in at_lengths(content):
            parts = [each["found"][task], *each["by_depth"][task]]
            shown = [f"{p['right']}/{p['total']} [{p['low']:.0%}, {p['high']:.0%}]" for p in parts]
            rows.append([result["name"], f"{each['length']:,}", *shown])
        lines += _table(["setting", "tokens", "all", *map(str, range(1, len(rows[0]) - 2))], rows)
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return [head, "|---" * len(heads) + "|", *others]


def _percent(share: float) -> str:
    """Text of a share as a short percentage: 0.5%, 99.5%, 113%."""
    return f"{share:.1%}" if abs(share) < 0.9995 else f"{share:.0%}"


def _value(value: float, name: str) -> str:
    return _percent(value) if name in TASKS else f"{value:+.3f}"


def _figure(cell: Content, name: str) -> str:
    value, low, high = (_value(cell[part], name) for part in ("value", "low", "high"))
    interval = f"[{low}, {high}], " if cell["low"] < cell["high"] else ""  # a single text has no interval
    return f"{value}{' lost' if name in TASKS else ' nats'} {interval}n {cell['n']:,}"
