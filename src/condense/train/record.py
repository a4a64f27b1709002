"""What run a work folder is of, down to the contents of its data and base model, so that no other goes on in it."""

import json
from pathlib import Path
from typing import Any

from condense.results import plain, write_results
from condense.tasks.corpus import sha256
from condense.train.config import TrainConfig

_RUN = "run.json"


def check_same_run(config: TrainConfig) -> None:
    """Note in the work folder what run it is of. Raises ValueError if it is of another one, or data are missing."""
    note = config.work / _RUN
    content = plain({**summary(config), **_contents(config), "seed": config.seed, "phases": config.phases})
    if not note.exists():
        write_results(note, content, seed=config.seed)
        return
    before = json.loads(note.read_text(encoding="utf-8"))["results"]
    changed = sorted(name for name in content if before.get(name) != content[name])
    if changed:
        raise ValueError(
            f"resume: wanted the run that lies in {config.work}, got another {', '.join(changed)}; resume with the "
            "same settings, delete that folder or choose another output"
        )


def summary(config: TrainConfig) -> dict[str, Any]:
    """A run in names, as its report has them."""
    return {
        "recipe": config.recipe,
        "data": [path.name for path in config.data],
        "architecture": config.architecture,
        "pretrained": None if config.pretrained is None else Path(config.pretrained).name,
        "dtype": config.dtype,
    }


def _contents(config: TrainConfig) -> dict[str, Any]:
    """What names do not tell apart: the bytes of the data, and of a model in a folder."""
    data = [{"name": path.name, "sha256": sha256(path)} for path in config.data]
    if config.pretrained is None:
        return {"data": data}
    folder = Path(config.pretrained)
    # of two models alike in shape and size only the weights' bytes differ, and loading will read them all anyway
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return {"data": data, "pretrained": {path.name: sha256(path) for path in files} or str(config.pretrained)}
