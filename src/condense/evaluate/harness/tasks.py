"""Tasks by the harness's names and our own: found, loaded from hub or folder, or refused with the way out."""

import contextlib
import hashlib
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from condense.config import close_names

OWN_FOLDER = Path(__file__).parent / "task_files"
OWN = tuple(sorted(path.stem for path in OWN_FOLDER.glob("[!_]*.yaml")))  # files with _ in front are groups
# where a file of tasks names a task, group or tag
_NAMES = re.compile(rb"^[ \t]*(?:- +)?[\"']?(?:(?:task|group|tag)[\"']?:)?[ \t]*[\"'\[]?([\w.:+-]*\w)(?!:)", re.M)


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError without the package lm_eval, and for a name that no file of tasks holds, naming the closest.

    The files are searched as text: the harness's index of them takes ten times as long.
    """
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.submodule_search_locations is None:
        install = "pip install 'lm-eval[longbench]>=0.4.13,<0.5' wonderwords"
        raise ValueError(f"evaluation needs lm-evaluation-harness: {install}")
    if set(names) <= set(OWN):
        return
    folder = Path(package.submodule_search_locations[0]) / "tasks"
    text = b"\n".join(path.read_bytes() for path in [*folder.rglob("*yaml"), *OWN_FOLDER.glob("*.yaml")])
    words = set(re.findall(rb"[^\s\"'\[\],]+", text))
    for name in names:
        if name.encode() not in words:
            raise _unknown(name, [found.decode() for found in _NAMES.findall(text)])


def _unknown(name: str, known: Iterable[str]) -> ValueError:
    nearest = close_names(name, [*dict.fromkeys(known)])
    return ValueError(f"task: the harness has none called {name!r}{nearest}; our own: {', '.join(OWN)}")


def load_tasks(
    names: Sequence[str], metadata: dict[str, Any], *, data: Path | None, run_generated_code: bool
) -> tuple[Any, list[Any]]:
    """The harness's ``TaskManager`` and the tasks and groups of those names that are no part of another.

    metadata: for tasks that make their documents; see ``task_files/documents.py``. data: folder of local files.
    Raises ValueError as `check_names`, for a task that runs programs of the model's unless run_generated_code, and for
    missing data, saying what to download and where to put it.
    """
    check_names(names)
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=OWN_FOLDER, include_defaults=not set(names) <= set(OWN), metadata=metadata)
    found: dict[str, Any] = {}
    parts: set[str] = set()
    with contextlib.nullcontext() if data is None else _in_folder(data):
        for name in names:
            if name not in manager.task_index:
                raise _unknown(name, manager.all_tasks)
            unsafe = (manager.task_index[name].cfg or {}).get("unsafe_code")
            loaded = {} if unsafe and not run_generated_code else _load(manager, name)
            if not run_generated_code and (unsafe or any(hasattr(x, "UNSAFE_CODE") for x in loaded["tasks"].values())):
                raise ValueError(
                    f"task: {name} runs the programs that the model writes: add --run-generated-code, on a machine "
                    "where they can do no harm"
                )
            found |= loaded["tasks"] | loaded["groups"]
            parts |= {member for members in loaded["group_map"].values() for member in members}
    return manager, [each for name, each in found.items() if name not in parts]


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load([name])
    except Exception as error:
        # datasets raises many kinds of errors for data that it cannot load: ConnectionError, FileNotFoundError, its own
        logging.getLogger(__name__).debug("loading %s", name, exc_info=True)
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError):
            raise ValueError(f"task: {name} needs a package: {said}") from error
        if isinstance(error, ValueError):
            raise ValueError(f"task: {said}") from error
        repository = re.search(r"'([\w.-]+/[\w.-]+)'", said)
        copy = repository[1] if repository else "OWNER/NAME"
        raise ValueError(
            f"task: {name} cannot get its data: {said}; without a network, put a copy into --data FOLDER: "
            f"hf download --repo-type dataset {copy} --local-dir FOLDER/{copy}"
        ) from error


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Work in the folder, where `datasets` and `evaluate` find copies of repositories by name before they ask a hub.

    What the harness downloads by address (RULER's questions) is found there by the last part of the address, and what
    NLTK downloads in ``nltk_data``.
    """
    import datasets
    import nltk
    import requests

    nltk.data.path.append(str(folder / "nltk_data"))
    download, cache = requests.get, datasets.config.HF_DATASETS_CACHE
    # `datasets` caches rows by repository and card alone, so changed rows under the same card would not be read
    files = sorted((str(file), file.stat().st_mtime_ns) for file in folder.rglob("*.*"))
    datasets.config.HF_DATASETS_CACHE = cache / hashlib.sha256(repr(files).encode()).hexdigest()[:16]

    def get(url: str, *args: Any, **settings: Any) -> requests.Response:
        file = Path(url.rpartition("/")[2])
        if not file.is_file():
            return download(url, *args, **settings)
        found = requests.Response()
        found.status_code, found._content = 200, file.read_bytes()
        return found

    requests.get = get
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        requests.get, datasets.config.HF_DATASETS_CACHE = download, cache
