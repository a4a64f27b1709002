"""Recipes: functions that make a training configuration; those from scratch stand in ``scratch.json``."""

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from condense.config import check_int, check_list, close_names
from condense.models import MethodChoice, parse_choice
from condense.train.config import PhaseConfig, TrainConfig
from condense.train.growth import largest_group, trained

_ASSETS = Path(__file__).parents[1] / "assets"
_TEXT_FIELDS = ("pretrained", "method")
_LIST_FIELDS = ("data", "data_weights", "group_sizes", "keys")
_RUN_FIELDS = ("data_weights", "dtype", "train", "lora_rank", "lora_targets", "shard_size", "report_to")
ADAPT_FIELDS = (
    *(field.name for field in dataclasses.fields(PhaseConfig) if field.name not in ("name", "method")),
    *_RUN_FIELDS,
)
# the settings of the papers, as recipe files
PRESETS: Mapping[str, Path] = {path.stem: path for path in sorted((_ASSETS / "recipes").glob("*.toml"))}


def adapt(
    data: Sequence[Path],
    output: Path,
    *,
    pretrained: str | Path,
    method: MethodChoice | str,
    seed: int = 0,
    cache: Path | None = None,
    workers: int = 4,
    **fields: Any,
) -> TrainConfig:
    """Adapt a saved Hugging Face model to a method, on any text, half of it with hidden numbers.

    By default it learns from its dense self alone (``distill`` 1), in condensed steps whose groups grow from a quarter
    of their size; docs/studies/adaptation.md tells what each is worth. The adapted model is saved condensed.

    The rate is 3e-5 by default, for models of a billion weights: at 3e-4 one of that size moved further from its dense
    self than it was before training. Adapters (``train="lora"``) have 3e-4, which small models as a whole need too.

    method: also by layer, such as an allocation of `condense.calibrate`, and as text, such as ``"cca:window=512"`` or
    ``"@FILE"``; see `PhaseConfig`. fields: any of `PhaseConfig` but its name, and ``data_weights``,
    ``dtype``, ``train``, ``lora_rank``, ``lora_targets``, ``shard_size``, ``report_to`` of `TrainConfig`.
    Raises ValueError for another field, for data in no list, and where `PhaseConfig` and `TrainConfig` do.
    """
    _check_names(fields, ADAPT_FIELDS)
    check_list("data", data)
    choice = parse_choice(method)
    size = 0 if fields.get("mix") == "dense" else largest_group(trained(choice))
    steps = fields.get("steps", 1000)
    check_int("steps", steps, 1)
    values: dict[str, Any] = {
        "steps": steps,
        "sequence_length": 4096,
        "batch_size": 16,
        "mix": "condensed",
        "group_sizes": (size // 4, size // 2) if size >= 8 and size % 4 == 0 else (),
        "distill": 1.0,
        "learning_rate": 3e-4 if fields.get("train") == "lora" else 3e-5,
        "dtype": "bfloat16",
        "checkpoint_steps": max(1, steps // 4),
        **fields,
    }
    values = _with_tuples(values)
    of_run = {name: values.pop(name) for name in _RUN_FIELDS if name in values}
    phase = PhaseConfig(name="adapt", method=choice, **values)
    of_run |= {"seed": seed, "pretrained": pretrained, "cache": cache, "workers": workers}
    return TrainConfig(recipe="adapt", data=tuple(data), output=output, phases=(phase,), save_condensed=True, **of_run)


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a recipe file (TOML), as `adapt` takes them.

    Raises ValueError for a file that is missing or no TOML, and for a field unknown to `adapt` or of another type.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"recipe: wanted a TOML file, got {path}: {error}") from error
    _check_names(fields, ("data", "pretrained", "method", "seed", "workers", *ADAPT_FIELDS), f" in {path}")
    for names, kind, wanted in ((_TEXT_FIELDS, str, "a text"), (_LIST_FIELDS, list, "a list")):
        for name in names:
            if name in fields and not isinstance(fields[name], kind):
                raise ValueError(f"{name}: wanted {wanted}, got {fields[name]!r} in {path}")
    if not all(isinstance(source, str) for source in fields.get("data", ())):
        raise ValueError(f"data: wanted a list of texts, got {fields['data']} in {path}")
    return fields


def _from_scratch(name: str, about: Sequence[str], workers: int, **fields: Any) -> Callable[..., TrainConfig]:
    """The recipe of a run from random weights. about: lines of its description; workers: its default of these."""

    def recipe(
        data: Sequence[Path], output: Path, *, seed: int = 0, cache: Path | None = None, workers: int = workers
    ) -> TrainConfig:
        check_list("data", data)
        phases = tuple(PhaseConfig(**_with_tuples(phase)) for phase in fields["phases"])
        options = {"seed": seed, "cache": cache, "workers": workers, "phases": phases}
        return TrainConfig(recipe=name, data=tuple(data), output=output, **fields | options)

    recipe.__doc__ = "\n".join(about)
    return recipe


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields read from JSON or TOML, with tuples in place of lists as the configuration wants them."""
    lists = {name: tuple(value) for name, value in fields.items() if name in _LIST_FIELDS and isinstance(value, list)}
    return {**fields, **lists}


def _check_names(fields: Iterable[str], known: Sequence[str], where: str = "") -> None:
    """Raise ValueError for names of fields that are not known."""
    if unknown := sorted({*fields} - {*known}):
        got = ", ".join(f"{name}{close_names(name, known)}" for name in unknown)
        raise ValueError(f"recipe: wanted fields of {', '.join(known)}; got {got}{where}")


RECIPES: dict[str, Callable[..., TrainConfig]] = {"adapt": adapt}
_SCRATCH = json.loads((_ASSETS / "scratch.json").read_text(encoding="utf-8"))
RECIPES |= {name: _from_scratch(name, **settings) for name, settings in _SCRATCH.items()}
