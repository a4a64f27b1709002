"""Local files in place of the hub, for the data sets that the harness's tasks get from `datasets.load_dataset`.

A folder of data may hold, beside the files of `FILES`, copies of hub repositories at ``OWNER/NAME``, as
``hf download --repo-type dataset OWNER/NAME --local-dir FOLDER/OWNER/NAME`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condense.evaluate.harness.longbench import longbench_row
from condense.tasks import read_json_lines

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalFiles:
    """A data set of the hub as small local files.

    splits: split -> patterns of its files' names, without ``.jsonl`` or ``.jsonl.zst``; ``{name}`` stands for the
    configuration's name. row: ``row(line, configuration, split)`` makes of a line a row as the hub has it, or None to
    leave the line out.
    """

    splits: dict[str, tuple[str, ...]]
    row: Callable[[Row, str | None, str], Row | None] = lambda line, name, split: line


def _mbpp(line: Row, name: str | None, split: str) -> Row | None:
    # the first ten problems are examples for prompts; the harness has these itself
    return line if line["task_id"] > 10 else None


def _mmlu(line: Row, name: str | None, split: str) -> Row | None:
    if name not in (line["subject"], "all") or line["split"] != split:
        return None
    fields = {field: line[field] for field in ("question", "subject", "choices")}
    return fields | {"answer": "ABCD".index(line["answer"])}


def _olympiad(line: Row, name: str | None, split: str) -> Row | None:
    text_only = {"modality": "Text-only", "subject": "Math", "language": "English"}
    return line if all(line.get(field, value) == value for field, value in text_only.items()) else None


FILES = {
    "openai/gsm8k": LocalFiles({"train": ("gsm8k-train*",), "test": ("gsm8k-test*",)}),
    "google-research-datasets/mbpp": LocalFiles({"test": ("mbpp-test*",)}, _mbpp),
    "cais/mmlu": LocalFiles({"dev": ("mmlu-*",), "test": ("mmlu-*",)}, _mmlu),
    "Xnhyacinth/LongBench": LocalFiles({"test": ("longbench/{name}", "*minilongbench*")}, longbench_row),
    "Hothan/OlympiadBench": LocalFiles({"train": ("olympiadbench*",)}, _olympiad),
}
SOURCES = {
    "multidoc_em": "nq-open files of github.com/nelson-liu/lost-in-the-middle (qa_data), unpacked to .jsonl",
    "text_loss": "long documents: JSON lines with a text field, or .txt",
}


def rows(path: Path) -> Iterator[Row]:
    """The rows of a ``.jsonl`` or ``.jsonl.zst`` file."""
    return read_json_lines(path)


def find(folder: str | Path | None, task: str, *patterns: str, required: bool = True) -> list[Path]:
    """Files in the folder that fit a pattern; a pattern without an ending is tried with ``.jsonl`` and ``.jsonl.zst``.

    Raises ValueError if there are none and they are required, saying what to download and where to put it.
    """
    endings = {pattern: [""] if "." in pattern else [".jsonl", ".jsonl.zst"] for pattern in patterns}
    names = [pattern + ending for pattern in patterns for ending in endings[pattern]]
    found = sorted({path for name in names for path in Path(folder).glob(name)}) if folder else []
    if not found and required:
        raise ValueError(
            f"{task}: no data: wanted {' or '.join(names)} in --data{f' {folder}' if folder else ' FOLDER'}; "
            f"download {SOURCES[task]}"
        )
    return found


def names_of_files(path: str, name: str | None) -> list[str]:
    """Names of local files that can replace this data set of the hub; empty if only a copy of its repository can."""
    known = FILES.get(path)
    patterns = [pattern for of_split in known.splits.values() for pattern in of_split] if known else []
    return [f"{pattern.format(name=name or '*')}.jsonl" for pattern in dict.fromkeys(patterns)]


def has(folder: Path, path: str, name: str | None) -> bool:
    """True if the folder holds this data set of the hub, in files of `FILES` or as a copy of its repository."""
    return (folder / path).is_dir() or _read(folder, path, name) is not None


@contextmanager
def local_datasets(folder: Path | None) -> Iterator[list[tuple[str, str | None]]]:
    """Inside the block `datasets.load_dataset` looks into the folder first, then where it always looks.

    Yields a list, to which the name and configuration of each data set are added when it is asked for.
    """
    import datasets

    stock, asked = datasets.load_dataset, []

    def load(path: str, name: str | None = None, *args: Any, **settings: Any) -> Any:
        asked.append((path, name))
        found = None if folder is None else _read(folder, path, name)
        if found is not None:
            split = settings.get("split")
            return found if split is None else found[split]
        if folder is not None and (folder / path).is_dir():
            path = str(folder / path)
        return stock(path, name, *args, **settings)

    datasets.load_dataset = load
    try:
        yield asked
    finally:
        datasets.load_dataset = stock


def _read(folder: Path, path: str, name: str | None) -> Any:
    """The data set of the hub called ``path``, from local files; None unless the folder has rows of all its splits."""
    import datasets

    known = FILES.get(path)
    if known is None:
        return None
    parts = {
        split: [
            row
            for file in find(folder, path, *(pattern.format(name=name) for pattern in patterns), required=False)
            for line in rows(file)
            if (row := known.row(line, name, split)) is not None
        ]
        for split, patterns in known.splits.items()
    }
    if not all(parts.values()):
        return None
    return datasets.DatasetDict({split: datasets.Dataset.from_list(found) for split, found in parts.items()})
