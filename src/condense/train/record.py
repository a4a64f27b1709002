"""A record of the run in its work folder, with hashes of data and base model, so that only the same run resumes it."""

import json
from pathlib import Path
from typing import Any

from condense.results import plain, write_results
from condense.tasks.corpus import sha256
from condense.tasks.documents import is_dataset
from condense.train.config import TrainConfig

_RUN = "run.json"


def check_same_run(config: TrainConfig) -> None:
    """Write the run's record to its work folder.

    Raises ValueError if the folder has another run's record or a truncated one, and if data are missing.
    """
    note = config.work / _RUN
    content = plain({**summary(config), **_contents(config), "seed": config.seed, "phases": config.phases})
    if not note.exists():
        write_results(note, content, seed=config.seed)
        return
    try:
        before = json.loads(note.read_text(encoding="utf-8"))["results"]
    except ValueError as error:
        raise ValueError(
            f"resume: wanted the record of a run, got {note} without its end ({error}): delete {config.work}, or this "
            "file if it is the same run"
        ) from error
    changed = sorted(_changed(before, content))
    if changed:
        raise ValueError(
            f"resume: wanted the run that lies in {config.work}, got another {', '.join(changed)}; resume with the "
            "same settings, delete that folder or choose another output"
        )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Names of the settings that differ; phases, if there are as many as before, are compared setting by setting."""
    names = {name for name in before | now if before.get(name) != now.get(name)}
    phases = before.get("phases", []), now["phases"]
    if "phases" in names and len(phases[0]) == len(phases[1]):
        names.remove("phases")
        for old, new in zip(*phases, strict=True):
            names |= {name for name in old | new if old.get(name) != new.get(name)}
    return names


def summary(config: TrainConfig) -> dict[str, Any]:
    """A run's settings by name, as its report has them."""
    return {
        "recipe": config.recipe,
        "data": [_name(path) for path in config.data],
        **({"data_weights": config.data_weights} if config.data_weights else {}),
        "architecture": config.architecture,
        "pretrained": None if config.pretrained is None else Path(config.pretrained).name,
        "dtype": config.dtype,
        "train": config.train,
        **({"lora_rank": config.lora_rank, "lora_targets": config.lora_targets} if config.train == "lora" else {}),
    }


def _contents(config: TrainConfig) -> dict[str, Any]:
    """Hashes of the data and of a base model in a folder: names alone would not tell different contents apart."""
    data = [{"name": _name(path), "sha256": sha256(path)} for path in config.data]
    if config.pretrained is None:
        return {"data": data}
    folder = Path(config.pretrained)
    # hashes of whole files: two models of the same shape differ in their weights only; loading reads them all anyway
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return {"data": data, "pretrained": {path.name: sha256(path) for path in files} or str(config.pretrained)}


def _name(source: Path) -> str:
    return str(source) if is_dataset(source) else source.name
