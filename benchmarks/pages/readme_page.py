"""The README's table: dense attention, the named settings and an allocation; and its prose.

Figures of a named setting are of one configuration. The allocation's quality is that of small models under those found
for them, its cache and times are of one written by hand for the large shape; the README says so.

The table stands between ``<!-- figures -->`` and ``<!-- /figures -->``. Times are the fastest reading of several, of
`benchmarks/generate.py` and `benchmarks/serving/speed.py`; the cache is counted as `condense inspect` counts it.
Quality is that of the models which were measured with these very settings, of the one that lost the most at the length
at which it did. Behind a name's times in `generate` stand the engine's, where it was timed with these settings; a cell
that nobody timed says "not measured".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import serving_page
import torch
import transfer_page
from stored import Documents
from transformers import AutoModelForCausalLM

from condense import CCA, Method, Recall
from condense.models.choice import choice_from_text
from condense.models.inspect import inspect
from condense.models.shapes import shape_config
from condense.ops.recall.choice import SHARED

LENGTH = 131072
NAMES = ("recall-host", "recall-device")
UNKNOWN = "not measured"
_CACHE = "cache of 4 bits"  # an arm of the study of what transfers
_WORDS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}
_TEXT = ("key", "other")  # tokens that need far text, and the others
# dense vLLM, Recall's and an allocation's
_DENSE, _DEVICE, _HOST = "rounds-dense-h200-", "default-recall-device-", "default-recall-host-"
_MIX = "mix-speed-h200-"
_BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


class Quality(NamedTuple):
    """Cells: how many hidden numbers are found, of those that dense attention finds; loss above it, nats per token."""

    found: str
    loss: str


def fill(page: Path, documents: Documents) -> None:
    """Write the table of the page anew."""
    text = page.read_text(encoding="utf-8")
    page.write_text(_BLOCK.sub(lambda block: block[1] + table(documents) + block[2], text), encoding="utf-8")


def table(documents: Documents) -> str:
    """In Markdown."""
    mix = _runs(documents, _MIX)[0]["method"]
    caches = [cache(name) for name in ("dense", "dense", *NAMES, mix)]
    quality, engine, served = [_quality(documents, name) for name in NAMES], _engine(documents), _served(documents)
    quality.append(_allocated(documents))
    rows = [
        ["cache on the GPU", *(f"{kept:#.3g} GiB" for kept, _ in caches)],
        ["read by each further token", *(f"{read:#.3g} GiB" for _, read in caches)],
    ]
    mixed = _first(documents, _MIX), _untouched(documents, _MIX)[0]
    for i, (name, unit) in enumerate((("first token", "s"), ("each further token", "ms"))):
        dense = generate(documents, "dense")[i], engine[i]
        named = [text(generate(documents, each)[i], unit, served.get((each, i), "")) for each in NAMES]
        rows.append([name, *(text(x, unit) for x in dense), *named, text(None, unit, text(mixed[i], unit))])
    rows += [
        ["hidden numbers found, worst task", "all", "all", *(of.found for of in quality)],
        ["loss on text", "0", "0", *(of.loss for of in quality)],
    ]
    names = (f"`{name}`" for name in NAMES)
    head = [f"{LENGTH:,} tokens", "dense, `generate`", "dense, vLLM", *names, "an allocation, adapted"]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def claims(documents: Documents) -> list[str]:
    """Phrases of the README with numbers outside its table, with the numbers of the results and settings."""
    recall, device = (Method.parse(f"recall-{where}").to_dict() for where in ("host", "device"))
    shorter = LENGTH - _longest(documents)
    running = {name: _running(documents, name) for name in ("dense", "condensed")}
    models = [*transfer_page.named_of(documents).values()]
    sizes = sorted({round(model["parameters"] / 1e6) for model in models})
    served = {name: _untouched(documents, start) for name, start in (("dense", _DENSE), ("condensed", _DEVICE))}
    one, most = ({name: of[i] for name, of in served.items()} for i in range(2))
    (far, copies, missed), cache = lost(documents, "recall-device"), lost(documents)
    host, trained = lost(documents, "recall-host"), transfer_page.trainings_of(documents)
    others = {key: model for key, model in trained.items() if model["make"] != "mla-28m"}
    elsewhere = [transfer_page.worst(others, name, ["copy"])[0] for name in ("recall-device", "recall-host")]
    # allocations that models learned, and one of their size in vLLM
    at_once = _runs(documents, _MIX)[0]["capacity"][0]["running"]
    learned = [row for _, row in _learned(documents)]
    firsts = _first(documents, _DEVICE), generate(documents, "recall-device")[0]
    of_four, _ = _untouched(documents, "rounds-dense-int4-")
    return [
        f"form groups of {recall['group_size']},",
        f"opens the {recall['num_recall']:,} groups that",
        f"most to it: a {({0.125: 'eighth', 0.0625: 'sixteenth'})[device['num_recall']]} of them",
        f"and at least {device['min_recall']:,}",
        "sees all others as one token" if device["unchosen"] == "mean" else "does not see the others",
        f"old tokens stay on the GPU, in {device['store_bits']} bits",
        f"one of {SHARED * device['group_size']} tokens chooses"
        if device["prompt"] == "shared"
        else "each token chooses",
        f"{_WORDS[len(models)]} models of {sizes[0]} to {sizes[-1]} million parameters",
        f"texts of up to {max(row['length'] for model in models for row in model['rows']):,} tokens",
        f"loses up to {far} nats a token of text, {copies} on copies, and {missed} of a task's answers",
        f"loses {host[0]}, {host[1]} and {host[2]}",
        f"only with latents, elsewhere {elsewhere[0]:.3f} and {elsewhere[1]:.3f}.",
        f"loses {cache[0]}, {cache[1]} and {cache[2]}",
        f"vLLM's took {text(of_four, 'ms')} a token",
        f"up to {shorter:,} tokens shorter",
        f"ran {running['condensed']} of them at once, dense {running['dense']}.",
        f"gave {_untouched(documents, _MIX)[1]:,.0f} with {at_once} requests of {LENGTH:,} tokens",
        f"{_WORDS[len({make for make, _ in _learned(documents)})].capitalize()} small models",
        f"kept {max(row['device'] for row in learned):.0%} of the cache, all on the GPU",
        f"lost up to {max(row[name][0] for row in learned for name in _TEXT):.3f} nats, "
        f"{max(row['copy'][0] for row in learned):.3f} on copies and "
        f"{max(row[name][0] for row in learned for name in transfer_page.TASKS):.1%} of a task",
        f"first token came after {text(firsts[0], 's')} in vLLM and {text(firsts[1], 's')} in",
        f"one request took {text(one['condensed'], 'ms')} a token",
        f"dense attention {text(one['dense'], 'ms')};",
        f"the most was {most['condensed']:,.0f} tokens a second, dense {most['dense']:.0f}",
    ]


def lost(documents: Documents, name: str | None = None) -> list[str]:
    """The most that a named setting, or a dense cache of 4 bits, loses on text, be it tokens that need far text or the
    others, on copies and of a task, in any training of any make at any length; "nothing" where it loses nothing in any.
    """
    models, arm = transfer_page.trainings_of(documents), name or _CACHE
    forms = {_TEXT: "{:.3f}", ("copy",): "{:.3f}", tuple(transfer_page.TASKS): "{:.1%}"}
    cells = [(transfer_page.worst(models, arm, of)[0], form) for of, form in forms.items()]
    return [form.format(value) if value > 0 else "nothing" for value, form in cells]


def _runs(documents: Documents, start: str) -> list[Any]:
    """The contents of all results whose names begin so."""
    return [x["results"] for name, x in documents.items() if name.startswith(start)]


def _longest(documents: Documents) -> int:
    return int(_runs(documents, _DENSE)[0]["decode-130561"][0][0]["cached_tokens"])


def _running(documents: Documents, attention: str) -> int:
    runs = [x["results"] for name, x in documents.items() if name.startswith(f"serving-speed-{attention}-")]
    return max(measured["answered_in_one_step"] for run in runs for measured in run.get("capacity", ()))


def _untouched(documents: Documents, start: str) -> tuple[float, float]:
    """Milliseconds per token of one request of the longest prompts, and the most tokens a second of any number of them,
    in the runs of a model as it is whose names begin so: medians of their rounds.
    """
    steps = {rows: median(ms) for rows, ms in serving_page.decode_rows(_runs(documents, start), 130561).items()}
    return steps[1], max(1000 * rows / ms for rows, ms in steps.items())


def text(value: float | None, unit: str, served: str = "") -> str:
    """The value, and the engine's behind it."""
    texts = [] if value is None else [f"{value:#.3g} {unit}".replace(". ", " ")]
    texts += [f"vLLM {served}"] if served else []
    return "; ".join(texts) or UNKNOWN


def cache(name: str) -> tuple[float, float]:
    """GiB on the device for one prompt in Llama-3.1-8B's shape, bfloat16, and GiB that a token after it reads.

    name: of a method, of methods by layer as on the command line, or "dense".
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config("llama-3.1-8b"))
    reports = inspect(model, choice_from_text("cca" if name == "dense" else name), LENGTH)
    kept, read = sum(x.bytes for x in reports) / 2**30, sum(x.read_bytes for x in reports) / 2**30
    return (sum(x.dense_bytes for x in reports) / 2**30,) * 2 if name == "dense" else (kept, read)


def generate(documents: Documents, name: str) -> tuple[float | None, float | None]:
    """Seconds to the first token and milliseconds per token of plain `generate`, one row: the fastest readings of the
    newest run that has some, as a setting's code changes; of dense attention, whose code does not, those of all runs.
    """
    found: dict[str, tuple[list[float | None], list[float | None]]] = {}
    plain = {"cca": CCA().to_dict()}  # what files that name no settings timed
    for stem, document in documents.items():
        if not stem.startswith(("generate-", "recall-prompts-")):
            continue
        content = document["results"]
        if content.get("liger"):
            continue
        for row in content["rows"]:
            method = None if row["attention"] == "dense" else content.get("methods", plain).get(row["attention"])
            known = row["attention"] == "dense" if name == "dense" else _is(name, method)
            if known and row["tokens"] == LENGTH and row.get("rows", 1) == 1 and not row.get("chunk"):
                first, step = found.setdefault("" if name == "dense" else stem.rsplit("-", 1)[1], ([], []))
                first.append(row.get("first_s") or row.get("first_token_s"))
                step.append(row["step_ms_median"])
    newest = found[max(found)] if found else ()
    fastest = (min((x for x in of if x is not None), default=None) for of in newest)
    return tuple(fastest) or (None, None)  # type: ignore[return-value]


def _is(name: str, settings: object) -> bool:
    """Whether timed settings are those of a name after `LENGTH` tokens: all alike, but for the least number of open
    groups where what is open differs by less than 1 %, as 511 groups, a sixteenth, and 512. Settings that came later
    have their defaults.
    """
    method = Method.parse(name)
    named = method.to_dict()
    if isinstance(settings, dict) and settings["method"] == named["method"]:
        settings = type(method)().to_dict() | settings
    if not isinstance(settings, dict) or settings | {"min_recall": named.get("min_recall")} != named:
        return settings == named
    timed, wanted = (_opened(Method.parse(dict(each))) for each in (settings, named))
    return abs(timed - wanted) < wanted / 100


def _opened(method: Method) -> int:
    assert isinstance(method, Recall)
    return method.quota.at((LENGTH - method.window) // method.group_size)


def _engine(documents: Documents) -> tuple[float, float]:
    """The same of dense vLLM, in the run beside Recall's; its prompts are a few hundred tokens shorter."""
    return _first(documents, _DENSE), _untouched(documents, _DENSE)[0]


def _served(documents: Documents) -> dict[tuple[str, int], str]:
    """The engine's time to a first token (0) and per token (1) under named settings."""
    found = {}
    for start in (_DEVICE, _HOST):
        run = _runs(documents, start)[0]
        times = [text(_first(documents, start), "s"), text(_untouched(documents, start)[0], "ms")]
        one = run["decode-130561"][0][0]
        if "all_new_ms" in one:
            assert one["new_copies"] == 0
            times[1] += f" if no group is copied, {text(one['all_new_ms']['median'], 'ms')} if all are"
        found |= {(name, i): x for i, x in enumerate(times) for name in NAMES if _is(name, run["settings"])}
    return found


def _first(documents: Documents, start: str) -> float:
    """The fewest seconds to a first token in the runs whose names begin so."""
    return min(x for run in _runs(documents, start) for x in run.get("first", []))


def _quality(documents: Documents, name: str) -> Quality:
    """Findings of models under a named setting."""
    models, title = transfer_page.trainings_of(documents), transfer_page.title
    missed, loss = (transfer_page.worst(models, name, of) for of in (transfer_page.TASKS, _TEXT))
    return Quality(f"{1 - missed[0]:.1%} ({title(missed[2])})", f"{loss[0]:+.3f} ({title(loss[2])})")


def _allocated(documents: Documents) -> Quality:
    """Findings of models that learned the allocations of 16 % that were found for them."""
    missed, loss = (
        max((row[name][0], transfer_page.TITLES[make]) for make, row in _learned(documents) for name in of)
        for of in (transfer_page.TASKS, _TEXT)
    )
    return Quality(f"{1 - missed[0]:.1%} ({missed[1]})", f"{loss[0]:+.3f} ({loss[1]})")


def _learned(documents: Documents) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of these models at the lowest rate at which each learned, by make."""
    found = [(make, row) for make, row in transfer_page.allocated(documents) if row["steps"] and not row["densely"]]
    rows = [(make, row) for make, row in found if row["form"] == transfer_page.ALLOCATED]
    least = {make: min(float(row["rate"]) for of, row in rows if of == make) for make, _ in rows}
    return [(make, row) for make, row in rows if float(row["rate"]) == least[make]]
