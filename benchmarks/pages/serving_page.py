"""The tables of `docs/serving.md` and its picture: what `benchmarks/serving` measured.

The page names its results; a table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` and is written anew:
``decode LENGTH``, ``first and traffic``, ``paged`` and those of `COLUMNS`. Every process of `speed.py` is a round, or
has several; a cell is the median of rounds, with the least and the most in brackets where they are written otherwise.
"""

import re
from collections import defaultdict
from statistics import median

from condense.plots import plot_lines

LENGTHS = (4097, 32769, 130561)
_CACHES = {"auto": "", "fp8": ", FP8", "int4_per_token_head": ", 4 bits"}
NAMES = ("dense", "condensed")
CCA = "`CCA`"
# tables with a column for each process, and how the names of their results begin
COLUMNS = {
    "recall": "rounds", "recall h100": "h100", "recall host": "recall-host-speed",
    "recall shared": "recall-shared-speed", "latents": "latents", "large": "large",
}  # fmt: skip
_BLOCK = re.compile(r"(<!-- ((?:decode|first|paged|recall|latents|large).*?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def fill(page, documents, picture=None):
    """Write the tables of a page anew, and the picture. Raises ValueError for a page that names no results."""
    text = page.read_text(encoding="utf-8")
    speed, paged = (_named(text, documents, name) for name in ("serving-speed", "paged-step"))
    if not speed or not paged:
        raise ValueError(f"{page} must name its results, got none of serving-speed-* or of paged-step-*")
    rounds = {name: [content for content in speed if content["attention"] == name] for name in NAMES}
    makers = {f"decode {length}": lambda length=length: _decode_table(rounds, length, CCA) for length in LENGTHS}
    makers |= {"first and traffic": lambda: _traffic_table(rounds), "paged": lambda: _paged_table(paged)}
    makers |= {
        name: lambda begin=begin: _columns_table(_named(text, documents, begin), LENGTHS[-1])
        for name, begin in COLUMNS.items()
    }
    page.write_text(_BLOCK.sub(lambda block: block[1] + makers[block[2]]() + block[3], text), encoding="utf-8")
    if picture is not None:
        _draw(rounds, picture)


def _named(text, documents, name):
    return [documents[found]["results"] for found in dict.fromkeys(re.findall(rf"`({name}-[^`]+)`", text))]


def decode_rows(rounds, length):
    """Milliseconds between tokens in every round, by how many requests run."""
    rows = defaultdict(list)
    for content in rounds:
        for measured in content.get(f"decode-{length}", []):
            for row in measured:
                if "step_ms" in row:
                    assert row["preempted"] == 0
                    rows[row["rows"]].append(row["step_ms"]["median"])
    return rows


def _decode_table(rounds, length, setting):
    dense, condensed = (decode_rows(rounds[name], length) for name in NAMES)
    best = max(rows / median(ms) for rows, ms in dense.items())
    table = f"| requests | dense: ms, tokens/s | {setting}: ms, tokens/s | tokens/s |\n|---|---|---|---|\n"
    for rows in sorted(dense | condensed):
        rates = [rows / median(steps[rows]) if rows in steps else None for steps in (dense, condensed)]
        ratio = f"{rates[1] / rates[0]:.2f}x" if rates[0] and rates[1] else f"{rates[1] / best:.1f}x of its best"
        table += f"| {rows} | {_step(dense, rows)} | {_step(condensed, rows)} | {ratio} |\n"
    return table


def _columns_table(contents, length):
    """A column for each process: first token, milliseconds between tokens by requests, and the most tokens a second."""
    names = [
        f"`{content['method']}`" if content["method"] else f"dense{_CACHES[content['cache']]}" for content in contents
    ]
    steps = [decode_rows([content], length) for content in contents]
    table = f"| | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|\n"
    first = [f"{min(content['first']):.2f} s" for content in contents]
    table += f"| first token | {' | '.join(first)} |\n"
    for rows in (1, 2, 4, 6, 12, 20):
        cells = [f"{spread(each[rows], '.2f')} ms" if rows in each else "" for each in steps]
        if rows <= 6 or len(list(filter(None, cells))) > 1:
            table += f"| {rows} request{'s' * (rows > 1)} | {' | '.join(cells)} |\n"
    rates = [{rows: 1000 * rows / median(ms) for rows, ms in each.items()} for each in steps]
    most = [max(each, key=each.__getitem__) for each in rates]
    cells = [f"{each[rows]:,.0f} with {rows}" for rows, each in zip(most, rates, strict=True)]
    table += f"| most tokens/s | {' | '.join(cells)} |\n"
    if all("short" in content for content in contents):
        short = [spread([run["requests_per_second"] for run in content["short"]], ".2f") for content in contents]
        table += f"| 48 prompts of 4,096 tokens, requests/s | {' | '.join(short)} |\n"
    at_once = [content["capacity"][0]["answered_in_one_step"] if "capacity" in content else "" for content in contents]
    return table + (f"| requests at once | {' | '.join(map(str, at_once))} |\n" if any(at_once) else "")


def _step(steps, rows):
    if rows not in steps:
        return "do not fit"
    return f"{spread(steps[rows], '.2f')}, {1000 * rows / median(steps[rows]):,.0f}"


def spread(values, form):
    """The median, and least and most of several that are not written alike."""
    least, middle, most = (format(x, form) for x in (min(values), median(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def _every(rounds, name):
    return [value for content in rounds for value in content.get(name, [])]


def _traffic_table(rounds):
    long, short = ({name: _every(rounds[name], kind) for name in NAMES} for kind in ("long", "short"))
    capacity, documents = ({name: _every(rounds[name], kind) for name in NAMES} for kind in ("capacity", "documents"))
    # without each process's first prompt, which compiles kernels
    first = [value for content in rounds["condensed"] for value in content.get("first", [])[1:]]
    least = [run["first_token_s"]["min"] for run in long["dense"]]
    lines = [
        ("first token of a prompt of 130,560 tokens, alone", f"{spread(least, '.2f')} s, the first of two",
         f"{spread(first, '.2f')} s", "4.5 s"),
        _requests("2 prompts of 130,560 tokens at once, 512 tokens of answer each", long, ".3f", "2.5x"),
        _requests("48 prompts of 4,096 tokens at once, 512 tokens of answer each", short, ".2f", "0.9x"),
        ("requests of 131,072 tokens that run at once",
         *(spread([run["answered_in_one_step"] for run in capacity[name]], ".0f") for name in NAMES), "80"),
        ("questions on ten texts of 130,432 tokens, read before: found in the cache",
         *(spread([sum(n > 0 for n in run["cached"]) for run in documents[name]], ".0f") + " of 10" for name in NAMES),
         "10"),
        ("first token of such a question", "as unread",
         spread([1000 * run["first_token_s"]["median"] for run in documents["condensed"]], ".0f") + " ms", "300 ms"),
    ]  # fmt: skip
    head = f"| | dense vLLM | {CCA} | goal |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _requests(label, runs, form, goal):
    rates = {name: [run["requests_per_second"] for run in runs[name]] for name in NAMES}
    ratio = median(rates["condensed"]) / median(rates["dense"])
    cells = [f"{spread(rates[name], form)} requests/s" for name in NAMES]
    return label, cells[0], f"{cells[1]}, {ratio:.2f}x", goal


def _paged_table(contents):
    table = "| requests | contiguous | pages, kernels that start early | pages, one after the other | ratio |\n"
    table += "|---|---|---|---|---|\n"
    runs = defaultdict(list)
    for content in contents:
        for row in content["rows"]:
            runs[row["rows"]].append(row)
    for rows, measured in sorted(runs.items()):
        forms = ("contiguous", "early", "one_after_another")
        contiguous, *pages = (median(row[form] for row in measured) for form in forms)
        times = [spread([1000 * row[form] for row in measured], ".1f") for form in forms]
        table += f"| {rows} | {' us | '.join(times)} us | {min(pages) / contiguous:.2f} |\n"
    return table


def _draw(rounds, path):
    panels = {}
    for length in LENGTHS:
        lines = {}
        for name in NAMES:
            steps = sorted((rows, median(ms)) for rows, ms in decode_rows(rounds[name], length).items())
            lines[name.replace("condensed", "CCA")] = [ms for _, ms in steps], [1000 * rows / ms for rows, ms in steps]
        panels[f"{length:,} tokens"] = lines
    plot_lines(panels, path, x_label="ms between tokens", y_label="tokens/s")
