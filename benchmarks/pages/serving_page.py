"""The tables of `serving.md` in `docs` and `docs/studies`, and their picture: what `benchmarks/serving` measured.

The pages name their results; a table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` and is written anew. Every
process of `speed.py` is a round, or has several; a cell is the median of rounds, with the least and the most in
brackets where they are written otherwise.
"""

import re
from collections import defaultdict
from statistics import median

from condense.plots import plot_lines

LENGTHS = (4097, 32769, 130561)
_CACHES = {"auto": "", "fp8": ", FP8", "int4_per_token_head": ", 4 bits"}
NAMES = ("dense", "condensed")
CCA = "`CCA`"
# what is compared, by how the names of its results begin: its name, and what it needs
SYSTEMS = {
    "rounds-dense-h200": ("dense vLLM", "nothing"),
    "rounds-dense-fp8": ("its FP8 cache", "nothing"),
    "rounds-dense-int4": ("its 4-bit cache", "nothing"),
    "default-recall-device": ("`recall-device`", "nothing"),
    "rounds-recall-device": ("its form before, 512 groups", "nothing"),
    "default-recall-host": ("`recall-host`", "host memory"),
    "slots-recall-host": ("its form before, 256 groups", "host memory"),
    "recall-host-speed": ("the same without slots", "host memory"),
    "mix-speed": ("allocation of 16 %", "a text to calibrate on"),
    "serving-speed-condensed": (CCA, "adaptation"),
}
_STEPS = {rows: f"{rows} request{'s' * (rows > 1)}" for rows in (1, 2, 4, 6, 12, 16, 20)}
_AT_ONCE, _MOST, _FIRST, _SHORT = "requests at once", "most tokens/s", "first token", "48 prompts of 4,096 tokens"
# the columns of the tables of these systems
COLUMNS = {"systems": (_AT_ONCE, _STEPS[1], _MOST, _FIRST, _SHORT, "needs"), "steps": (*_STEPS.values(),)[1:]}


def fill(pages, documents, picture=None):
    """Write the tables of pages anew, and the picture. Raises ValueError for pages that do not name their results."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages}

    def named(begin):
        names = dict.fromkeys(re.findall(rf"`({begin}-[^`]+)`", "".join(texts.values())))
        if not names:
            raise ValueError(f"{pages[0]} must name its results, got none of {begin}-*")
        return [documents[name]["results"] for name in names]

    rounds = {name: named(f"serving-speed-{name}") for name in NAMES}
    tables = {f"decode {length}": _decode_table(rounds, length) for length in LENGTHS}
    tables |= {"first and traffic": _traffic_table(rounds), "paged": _paged_table(named("paged-step"))}
    systems = [_cells(named(begin), *said) for begin, said in SYSTEMS.items()]
    tables |= {name: _systems_table(systems, columns) for name, columns in COLUMNS.items()}
    columns = _AT_ONCE, _FIRST, *_STEPS.values(), _MOST
    for name in ("h100", "latents", "large"):
        tables[name] = _systems_table([_cells([content], _name(content)) for content in named(name)], columns)
    block = re.compile(rf"(<!-- ({'|'.join(tables)}) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
    for page, text in texts.items():
        page.write_text(block.sub(lambda found: found[1] + tables[found[2]] + found[3], text), encoding="utf-8")
    if picture is not None:
        _draw(rounds, picture)


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


def _decode_table(rounds, length):
    dense, condensed = (decode_rows(rounds[name], length) for name in NAMES)
    best = max(rows / median(ms) for rows, ms in dense.items())
    table = f"| requests | dense: ms, tokens/s | {CCA}: ms, tokens/s | tokens/s |\n|---|---|---|---|\n"
    for rows in sorted(dense | condensed):
        rates = [rows / median(steps[rows]) if rows in steps else None for steps in (dense, condensed)]
        ratio = f"{rates[1] / rates[0]:.2f}x" if rates[0] and rates[1] else f"{rates[1] / best:.1f}x of its best"
        table += f"| {rows} | {_step(dense, rows)} | {_step(condensed, rows)} | {ratio} |\n"
    return table


def _cells(rounds, name, needs=""):
    """A system's cells, by their columns."""
    steps = decode_rows(rounds, LENGTHS[-1])
    rates = {rows: 1000 * rows / median(ms) for rows, ms in steps.items()}
    most = max(rates, key=rates.__getitem__)
    capacity, short = (_every(rounds, kind) for kind in ("capacity", "short"))
    at_once = spread([run["answered_in_one_step"] for run in capacity] or [max(steps)], ".0f")
    cells = {"": name, _AT_ONCE: at_once if capacity else f"at least {at_once}"}
    cells |= {label: f"{spread(steps[rows], '.2f')} ms" for rows, label in _STEPS.items() if rows in steps}
    if short:
        cells[_SHORT] = f"{spread([run['requests_per_second'] for run in short], '.2f')} a second"
    if first := _every(rounds, "first"):
        cells[_FIRST] = f"{min(first):.2f} s"
    return cells | {_MOST: f"{rates[most]:,.0f} with {most}", "needs": needs}


def _systems_table(systems, columns):
    """A row for each system, of its cells in those columns that any has."""
    labels = ["", *(label for label in columns if any(label in cells for cells in systems))]
    table = f"|{' | '.join(labels)} |\n{'|---' * len(labels)}|\n"
    return table + "".join(f"| {' | '.join(cells.get(label, '') for label in labels)} |\n" for cells in systems)


def _name(content):
    return f"`{content['method']}`" if content["method"] else f"dense{_CACHES[content['cache']]}"


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
