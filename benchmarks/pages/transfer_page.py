"""`docs/studies/transfer.md`, from its template, and the table of the same study in `docs/recall.md`.

In the template stand ``{{NAMED}}``, ``{{LENGTHS}}``, ``{{DEVICE}}``, ``{{WORST}}``, ``{{OPENED}}``, ``{{ADAPTED}}``,
``{{CALIBRATED}}``, ``{{SMALLER}}`` and ``{{DENSELY}}``; in the page of Recall the worst cells of the named settings
between ``<!-- transfer -->`` and ``<!-- /transfer -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TITLES = {
    "llama-77m": "77M Llama", "qwen3-83m": "83M Qwen3", "gemma3-44m": "44M Gemma 3", "mla-28m": "25M latents",
    "cohere2-44m": "44M Cohere 2", "olmo2-77m": "77M OLMo 2", "qwen2-79m": "79M Qwen2",
}  # fmt: skip
TOKENS = {"key": "far text needed", "copy": "copies", "identifier": "far identifiers", "other": "other tokens"}
TASKS = {"number": "numbers", "shared": "names that share words", "several": "several at once"}
_DEVICE, _HOST, _CACHE = "recall-device", "recall-host", "cache of 4 bits"
_NAMED = (_DEVICE, _HOST)
# Runs in which makes were trained and read. Those of `_NOW` have the named settings as they are, the first for every
# make. In the others the two names stood for 512 and 256 groups and dense prompts. That computes what the names stand
# for now in texts of up to `_WHOLE` tokens, where all groups are open, and with latents, which are read as before. In
# the others the arm `_SHARED` has the settings that `recall-host` has now
_NOW = "named-", "calibrated-"
_RUNS = "transfer-", "prompts-", "reread-", "evicted-", "opened-", *_NOW
_BEFORE, _SHARED = {_DEVICE: "512 open", _HOST: "256 open"}, "prompts shared"
_WHOLE, _LATENTS = 8448, "mla-28m"
_LOST = {"far text needed": "key", "other tokens": "other", "copies": "copy"}
# the run that says how many open groups are enough after a longer training
OPENED = "opened-20261130T013222Z"
# the arm of an allocation that keeps all on the device
ALLOCATED = "calibrated to 16%"
_BLOCK = re.compile(r"(<!-- transfer -->\n).*?(<!-- /transfer -->)", re.DOTALL)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def models_of(documents: Mapping[str, Any]) -> dict[str, Any]:
    """The models of the newest run that compares settings, by make as `TITLES` has them."""
    newest = max(name for name in documents if name.startswith("transfer-"))
    found = {model["make"]: model for model in documents[newest]["results"]["models"]}
    return {make: _renamed(found[make]) for make in TITLES}


def named_of(documents: Mapping[str, Any]) -> dict[str, Any]:
    """The makes under the named settings: rows of the newest run of these, and of `models_of` where all is open."""
    trained, found = trainings_of(documents), {}
    runs = [max(name for name in documents if name.startswith(begin)) for begin in ("transfer-", _NOW[0])]
    for make in TITLES:
        models = [trained[f"{run}/{make}"] for run in runs if f"{run}/{make}" in trained]
        rows = [row for model in models for row in model["rows"] if row["arm"] in _NAMED]
        found[make] = models[-1] | {"rows": rows}
    return found


def trainings_of(documents: Mapping[str, Any]) -> dict[str, Any]:
    """The models of all runs, by run and make, with arms by the names that settings have now."""
    found = {}
    for name, document in documents.items():
        for model in document["results"].get("models", ()) if name.startswith(_RUNS) else ():
            now, make = name.startswith(_NOW), model["make"]
            rows = [
                row | {"arm": arm}
                for row in model["rows"]
                for arm in ((row["arm"],) if now else _names(row["arm"], make, row["length"]))
            ]
            found[f"{name}/{make}"] = model | {"rows": rows}
    return found


def _names(arm: str, make: str, length: int) -> tuple[str, ...]:
    """The names that an arm of a run before the present settings has now."""
    if arm == _DEVICE and length <= _WHOLE:
        return _NAMED
    if arm in _NAMED and make == _LATENTS:
        return (arm,)
    return (_HOST,) if arm == _SHARED and make != _LATENTS else (_BEFORE.get(arm, arm),)


def _renamed(model: Mapping[str, Any]) -> Mapping[str, Any]:
    return model | {"rows": [row | {"arm": _BEFORE.get(row["arm"], row["arm"])} for row in model["rows"]]}


def title(key: str) -> str:
    """The title of a make, or of a model that `trainings_of` names."""
    return TITLES[key.rpartition("/")[2]]


def write_page(documents: Mapping[str, Any], page: Path) -> None:
    """Write the study's page."""
    newest, named, found = models_of(documents), named_of(documents), allocated(documents)
    rows = [row for model in newest.values() for row in model["rows"]]
    arms = dict.fromkeys(row["arm"] for row in rows if row["arm"] != "dense")
    tables = {
        "NAMED": _worst_cells(trainings_of(documents), (*_NAMED, _CACHE)),
        "LENGTHS": _lengths(named),
        "DEVICE": _device(named),
        "WORST": _worst_cells(newest, arms),
        "OPENED": by_model(documents[OPENED]),
        "ADAPTED": _adapted(_pooled_of(documents)),
        "CALIBRATED": _allocations(
            (make, row) for make, row in found if row["form"] == ALLOCATED and not row["densely"]
        ),
        "SMALLER": _allocations((make, row) for make, row in found if row["form"] != ALLOCATED and not row["densely"]),
        "DENSELY": _allocations((make, row) for make, row in found if row["densely"]),
    }
    template = Path(__file__).with_name("transfer.md").read_text(encoding="utf-8")
    page.write_text(_PLACE.sub(lambda place: tables[place[1]], template), encoding="utf-8")


def fill(page: Path, documents: Mapping[str, Any]) -> None:
    """Write the table of another page anew."""
    table = _worst_cells(trainings_of(documents), (*_NAMED, _CACHE))
    text = page.read_text(encoding="utf-8")
    page.write_text(_BLOCK.sub(lambda block: block[1] + table + block[2], text), encoding="utf-8")


def worst(models: Mapping[str, Any], arm: str, names: Iterable[str]) -> tuple[float, int, str]:
    """The most that an arm loses of these classes of tokens or tasks in any model at any length, where and in which."""
    rows = [(row, make) for make, model in models.items() for row in model["rows"] if row["arm"] == arm]
    return max((row[name][0], row["length"], make) for row, make in rows for name in names if name in row)


def row_of(model: Mapping[str, Any], arm: str, length: int) -> Mapping[str, Any]:
    """The row of an arm; empty if it was not measured."""
    return next((row for row in model["rows"] if (row["arm"], row["length"]) == (arm, length)), {})


def _worst_cells(models: Mapping[str, Any], arms: Iterable[str]) -> str:
    """Arms: bytes, and the most that they lose and diverge in any model at any length."""
    rows = [["", "device", "host store", "read", *_LOST, "worst task", "divergence"], ["---"] * 9]
    for arm in arms:
        measured = [(row, make) for make, model in models.items() for row in model["rows"] if row["arm"] == arm]
        sizes = [
            [f"{row[size]:.0%}" for row, _ in measured if size in row] for size in ("device", "host_store", "read")
        ]
        cells = []
        for names in (*([name] for name in _LOST.values()), TASKS):
            lost, length, make = worst(models, arm, names)
            cells.append(f"{_percent(lost) if names is TASKS else f'{lost:+.3f}'} ({title(make)}, {length:,})")
        kl, length, make = max((row["kl"], row["length"], make) for row, make in measured)
        rows.append([arm, *map(_between, sizes), *cells, f"{kl:.4f} ({title(make)}, {length:,})"])
    return _table(rows)


def _between(shares: Sequence[str]) -> str:
    if not shares:
        return ""
    ends = sorted(set(shares), key=lambda share: float(share[:-1]))
    return f"{ends[0][:-1]} to {ends[-1]}" if len(ends) > 1 else "".join(ends)


def _lengths(models: Mapping[str, Any]) -> str:
    """Text, copies, the worst task and the divergence of the named settings, by model and length."""
    rows = [["", *_NAMED], ["---"] * (1 + len(_NAMED))]
    for make, length in _places(models):
        of_arms = [row_of(models[make], arm, length) for arm in _NAMED]
        cells = (f"{_nats(row)}; {_worst(row)}; {_kl(row)}" if row else "" for row in of_arms)
        rows.append([f"{TITLES[make]}, {length:,}", *cells])
    return _table(rows)


def _device(models: Mapping[str, Any]) -> str:
    """All classes of tokens and tasks under `recall-device`, by model and length, with intervals."""
    names = TOKENS | TASKS
    rows = [["", *names.values()], ["---"] * (1 + len(names))]
    for make, length in _places(models):
        row = row_of(models[make], _DEVICE, length)
        rows.append([f"{TITLES[make]}, {length:,}", *(_cell(row, name) if name in row else "-" for name in names)])
    return _table(rows)


def _places(models: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(make, n) for make, model in models.items() for n in sorted({row["length"] for row in model["rows"]})]


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, low, high = row[name][:3]
    text = _percent(value) if name in TASKS else f"{value:+.3f}"
    interval = f"{_percent(low)} to {_percent(high)}" if name in TASKS else f"{low:+.3f} to {high:+.3f}"
    return f"{text} ({interval})" if name in row["failed"] else f"**{text}** ({interval})"


def by_model(document: Mapping[str, Any]) -> str:
    """The arms of a run: bytes, and what each loses by model and length."""
    models = {model["make"]: _renamed(model) for model in document["results"]["models"]}
    arms = dict.fromkeys(row["arm"] for model in models.values() for row in model["rows"] if row["arm"] != "dense")
    rows = [["", "device", "read", *(f"{TITLES[make]}, {length:,}" for make, length in _places(models))]]
    rows.append(["---"] * len(rows[0]))
    for arm in arms:
        found = [row_of(models[make], arm, length) for make, length in _places(models)]
        sizes = [_between([f"{row[size]:.0%}" for row in found if row]) for size in ("device", "read")]
        rows.append([arm, *sizes, *(f"{_nats(row)}; {_worst(row)}" if row else "" for row in found)])
    return _table(rows)


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("-0.0%", "0.0%")


def _nats(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{row[name][0]:+.3f}" for name in _LOST.values())


def _worst(row: Mapping[str, Any]) -> str:
    """The worst task; a dash for a model that did not learn them."""
    return _percent(max(row[name][0] for name in TASKS)) if TASKS.keys() <= row.keys() else "-"


def _kl(row: Mapping[str, Any]) -> str:
    return f"{row['kl']:.4f}"


def _pooled_of(documents: Mapping[str, Any]) -> dict[str, Any]:
    """Models that were adapted to a form of pooling, by number."""
    models = [of["results"]["models"][0] for name, of in sorted(documents.items()) if name.startswith("adapted-")]
    return {str(n): model for n, model in enumerate((m for m in models if "calibrated" not in m), 1)}


def allocated(documents: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Rows of models under allocations that were found for them, by make, with what tells rows of a make apart.

    form: the allocation. rate: of learning, or "as found". steps: of learning. densely: whether the model was read with
    dense attention after it had learned.
    """
    found = []
    for name, document in sorted(documents.items(), key=lambda item: not item[0].startswith("calibrated-")):
        for model in document["results"]["models"] if name.startswith(("calibrated-", "adapted-")) else ():
            for row in model["rows"] if "calibrated" in model else ():
                arm, _, way = row["arm"].partition(", adapted")
                form, _, rate = arm.partition(", rate ")
                if form in model["calibrated"]:
                    learned = model.get("adapted", {}).get(arm, {}).get("step", 0)
                    told = {"form": form, "rate": rate or "as found", "steps": learned, "densely": bool(way)}
                    found.append((model["make"], row | told))
    return found


def _allocations(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Far text needed, other tokens, copies and the worst task by length, and the divergence, of rows of models."""
    lengths, by_name = (16384, 32768), dict[tuple[str, ...], dict[int, Mapping[str, Any]]]()
    for make, row in sorted(rows, key=lambda entry: entry[1]["form"]):
        rate = f"{float(row['rate']):.0e}".replace("e-0", "e-") if row["steps"] else row["rate"]
        key = row["form"].removeprefix("calibrated to "), TITLES[make], rate, str(row["steps"] or "")
        by_name.setdefault(key, {})[row["length"]] = row
    head = ["", "model", "rate", "steps", "device", "read", *(f"{length:,}" for length in lengths), "divergence"]
    table = [head, ["---"] * len(head)]
    for key, of in by_name.items():
        sizes = [_between([f"{of[n][size]:.0%}" for n in lengths if n in of]) for size in ("device", "read")]
        cells = [f"{_nats(of[n])}; {_worst(of[n])}" if n in of else "" for n in lengths]
        table.append([*key, *sizes, *cells, ", ".join(_kl(of[n]) for n in lengths if n in of)])
    return _table(table)


def _adapted(models: Mapping[str, Any]) -> str:
    """Far text needed, copies and the worst task by length, before and after adapting, of models by label."""
    lengths = 16384, 32768
    rows = [["", "steps", "device", "read", *(f"{length:,}" for length in lengths)], ["---"] * (4 + len(lengths))]
    for label, model in models.items():
        for arm in dict.fromkeys(row["arm"] for row in model["rows"] if row["arm"] != "dense"):
            form, found = arm.partition(", adapted")[0], [row_of(model, arm, length) for length in lengths]
            if "not adapted" in arm and form.removesuffix(", not adapted") not in model["adapted"]:
                continue  # a form that this run did not come to
            steps = f"{model['adapted'][form]['step']:,}" if form in model["adapted"] else ""
            sizes = [_between([f"{row[size]:.0%}" for row in found if row]) for size in ("device", "read")]
            cells = [f"{_nats(row)}; {_worst(row)}" if row else "" for row in found]
            rows.append([f"{arm} [{label}]", steps, *sizes, *cells])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
