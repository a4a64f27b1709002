"""The README's table: dense attention and the named settings, every figure of one configuration; and its prose.

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
from condense.models.inspect import inspect
from condense.models.shapes import shape_config
from condense.ops.recall.choice import SHARED

LENGTH = 131072
NAMES = ("recall-host", "recall-device", "pooled")
UNKNOWN = "not measured"
# arms of the study of what transfers: named settings as they are, and beside them a dense cache
_MEASURED, _CACHE = ("recall-host", "recall-device"), "cache of 4 bits"
_WORDS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}
_TEXT = ("key", "other")  # tokens that need far text, and the others
# the arm of the study of adaptation, its settings and its length
_ARM, _ADAPTED, _ADAPTED_LENGTH = "both", "lca:window=512,rep_bias=log_size", 8192
# dense vLLM, and Recall's; a model adapted to `CCA`
_DENSE, _DEVICE, _HOST = "rounds-dense-h200-", "default-recall-device-", "default-recall-host-"
_POOLED, _ALLOCATED, _MIX = "adapted-20261124T041642Z", "adapted-20261201T010502Z", "mix-speed-h200-"
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
    attentions, quality = ("dense", *NAMES), {name: _quality(documents, name) for name in NAMES}
    engine, served = _engine(documents), _served(documents)
    rows = [
        ["cache on the GPU", *(f"{cache(name)[0]:#.3g} GiB" for name in ("dense", *attentions))],
        ["read by each further token", *(f"{cache(name)[1]:#.3g} GiB" for name in ("dense", *attentions))],
    ]
    for i, (name, unit) in enumerate((("first token", "s"), ("each further token", "ms"))):
        dense = generate(documents, "dense")[i], engine[i]
        named = [text(generate(documents, each)[i], unit, served.get((each, i), "")) for each in NAMES]
        rows.append([name, *(text(x, unit) for x in dense), *named])
    rows += [
        ["hidden numbers found, worst task", "all", "all", *(_cell(quality[name], "found") for name in NAMES)],
        ["loss on text", "0", "0", *(_cell(quality[name], "loss") for name in NAMES)],
    ]
    head = [f"{LENGTH:,} tokens", "dense, `generate`", "dense, vLLM", *(f"`{name}`" for name in NAMES)]
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
    # one adapted to pooling, in the tests of Recall
    ours = transfer_page.row_of(documents[_POOLED]["results"]["models"][0], "pooled, adapted", 16384)
    # an allocation that a model was calibrated and adapted to, and one of its size in vLLM
    at_once = _runs(documents, _MIX)[0]["capacity"][0]["running"]
    found = documents[_ALLOCATED]["results"]["models"][0]
    learned = [row for row in found["rows"] if row["arm"] == "calibrated to 16%, rate 0.0001, adapted"]
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
        f"lost {ours['key'][0]:.3f} nats on far text and {max(ours[x][0] for x in transfer_page.TASKS):.1%} of a task",
        f"vLLM's took {text(of_four, 'ms')} a token",
        f"up to {shorter:,} tokens shorter",
        f"ran {running['condensed']} of them at once, dense {running['dense']}.",
        f"gave {_untouched(documents, _MIX)[1]:,.0f} with {at_once} requests of {LENGTH:,} tokens",
        f"kept {max(row['device'] for row in learned):.0%} of the cache, all on the GPU, and lost "
        f"{max(row[name][0] for row in learned for name in transfer_page.TOKENS):.3f} nats and "
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
    """GiB on the device for one prompt in Llama-3.1-8B's shape, bfloat16, and GiB that a token after it reads."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config("llama-3.1-8b"))
    reports = inspect(model, "cca" if name == "dense" else name, LENGTH)
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


def _quality(documents: Documents, name: str) -> Quality | None:
    """Findings of models under a named setting; None if none were measured with it."""
    if Method.parse(name) == Method.parse(_ADAPTED):
        return _adapted(documents)
    if name not in _MEASURED:
        return None
    models, title = transfer_page.trainings_of(documents), transfer_page.title
    missed, loss = (transfer_page.worst(models, name, of) for of in (transfer_page.TASKS, _TEXT))
    return Quality(f"{1 - missed[0]:.1%} ({title(missed[2])})", f"{loss[0]:+.3f} ({title(loss[2])})")


def _adapted(documents: Documents) -> Quality:
    """Findings of the models that were adapted, beside dense models that were trained on as many tokens."""
    runs: dict[str, dict[int, Any]] = {"dense": {}, _ARM: {}}
    for name, document in documents.items():
        if name == "adaptation-8192-h200-20261122T083308Z":
            for run in (x["results"] for x in document):
                runs.get(run.get("arm"), {})[run["seed"]] = run

    def of(run: Mapping[str, Any], what: str, name: str) -> Any:
        return next(entry for entry in run[what] if entry["name"] == name)

    pairs = [(runs[_ARM][seed], runs["dense"][seed]) for seed in sorted(runs[_ARM])]
    shares = [
        [of(a, "retrieval", b)["exact"]["share"] for a, b in zip(pair, ("own", "dense"), strict=True)] for pair in pairs
    ]
    found = [own / dense for own, dense in shares]
    loss = [of(own, "text", "own")["loss"] - of(dense, "text", "dense")["loss"] for own, dense in pairs]
    parameters = documents["demo-model-seed0"]["results"]["parameters"] / 1e6
    return Quality(
        f"{min(found):.1%} (another task, {parameters:.0f}M, {_ADAPTED_LENGTH:,} tokens)",
        f"{max(loss):+.3f} (above another dense model)",
    )


def _cell(quality: Quality | None, what: str) -> str:
    return UNKNOWN if quality is None else str(getattr(quality, what))
