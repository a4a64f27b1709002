"""Tasks by the harness's names and our own: found, checked and loaded, or refused with the way out."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from condense.evaluate.harness.local import has, local_datasets, names_of_files

OWN_FOLDER = Path(__file__).parent / "task_files"
OWN = tuple(sorted(path.stem for path in OWN_FOLDER.glob("*.yaml")))


class LoadedTasks(NamedTuple):
    """The harness's ``TaskManager``, and the tasks and groups by name that its ``load`` returned."""

    manager: Any
    loaded: dict[str, Any]


def require_harness() -> None:
    """Raise ValueError if the package lm_eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        install = "pip install 'lm-eval[longbench]>=0.4.13,<0.5' wonderwords"
        raise ValueError(f"evaluation needs lm-evaluation-harness: {install}") from error


def load_tasks(
    names: Sequence[str], metadata: dict[str, Any], *, data: Path | None, run_generated_code: bool
) -> LoadedTasks:
    """The tasks of those names.

    metadata: for tasks that make their documents; see ``task_files/documents.py``. data: folder of local files.
    Raises ValueError for an unknown name (naming the closest), for a task that runs programs written by the model
    unless run_generated_code, and for missing data (saying what to download, and where to put it).
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own_only = set(names) <= set(OWN)
    manager = TaskManager(include_path=OWN_FOLDER, include_defaults=not own_only, metadata=metadata)
    for name in names:
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=4, cutoff=0.5)
            raise ValueError(
                f"task: the harness has none called {name!r}"
                + (f"; close: {', '.join(close)}" if close else "")
                + f"; our own: {', '.join(OWN)}"
            )
    unsafe = [] if run_generated_code else sorted(_unsafe(names, manager.task_index))
    if unsafe:
        raise ValueError(
            f"task: {', '.join(unsafe)} runs the programs that the model writes: add --run-generated-code, on a "
            "machine where they can do no harm"
        )
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with local_datasets(data) as asked:
        for name in names:
            for part, found in _load(manager, name, data, asked).items():
                loaded[part].update(found)
    return LoadedTasks(manager, loaded)


def _load(manager: Any, name: str, data: Path | None, asked: Sequence[tuple[str, str | None]]) -> Any:
    try:
        return manager.load([name])
    except ImportError as error:
        raise ValueError(f"task: {name} needs a package: {_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"task: {_line(error)}") from error
    except Exception as error:
        # datasets raises many kinds of errors for data that it cannot load: ConnectionError, FileNotFoundError, its own
        logging.getLogger(__name__).debug("loading %s", name, exc_info=True)
        missing = asked[-1] if asked else ("OWNER/NAME", None)
        raise ValueError(_missing(manager.task_index, name, data, missing, error)) from error


def _missing(index: Any, name: str, data: Path | None, missing: tuple[str, str | None], error: Exception) -> str:
    """The message for a missing data set: what to put where, and which tasks of a group have their data."""
    repository, configuration = missing
    files = "".join(f"{file} or " for file in names_of_files(repository, configuration))
    parts = [(task, s["dataset_path"], s.get("dataset_name")) for task, s in _leaves([name], index) if _is_on_hub(s)]
    there = [task for task, *of in parts if data is not None and has(data, *of)]
    rest = f"; {data} has those of {', '.join(there)}, which can be named instead" if there else ""
    return (
        f"task: the data of {name} cannot be had: {_line(error)}; offline, put {files}a copy of the data set into "
        f"--data FOLDER: hf download --repo-type dataset {repository} --local-dir FOLDER/{repository}{rest}"
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _settings(entry: Any) -> dict[str, Any]:
    """A task's or group's YAML without its functions, includes resolved."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if entry.yaml_path is None:
        return entry.cfg or {}
    return dict(load_yaml(entry.yaml_path, resolve_func=False, recursive=True))


def _leaves(names: Iterable[Any], index: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """Single tasks among names, groups and tags, with their settings."""
    for each in names:
        name = each if isinstance(each, str) else each.get("task") or each.get("group")
        if not isinstance(name, str) or name not in index:
            continue
        entry = index[name]
        if entry.kind.name == "TAG":
            yield from _leaves(sorted(entry.tags), index)
            continue
        settings = _settings(entry)
        members = settings.get("task")
        if isinstance(members, list):
            yield from _leaves(members, index)
        else:
            yield name, settings


def _unsafe(names: Sequence[str], index: Any) -> Iterable[str]:
    return [name for name, settings in _leaves(names, index) if settings.get("unsafe_code")]


def _is_on_hub(settings: dict[str, Any]) -> bool:
    return bool(settings.get("dataset_path")) and "custom_dataset" not in settings
