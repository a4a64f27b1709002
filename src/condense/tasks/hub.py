"""Hugging Face datasets by name, as sources of documents beside local files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PREFIX = "hf:"
_ROWS = 1000  # read at a time


def is_dataset(source: str | Path) -> bool:
    """True if a source of documents is the name of a dataset, False if it is a local file."""
    return str(source).startswith(_PREFIX)


def read_dataset(source: str | Path, with_kind: bool) -> Iterator[tuple[int, Any]]:
    """The rows of a dataset with their numbers from 1: their text, and with_kind their kind.

    The package datasets downloads the dataset into its own cache, or finds it there, and maps it into memory.

    source: ``hf:OWNER/NAME`` or ``hf:OWNER/NAME/CONFIG``, either also with ``:SPLIT``: any split that
    `datasets.load_dataset` takes, such as ``train[:1%]``; by default ``train``.
    Raises ValueError for a name of another form, without the package datasets, for a dataset that cannot be loaded, and
    for one without a column ``text``.
    """
    name, _, split = str(source).removeprefix(_PREFIX).partition(":")
    owner, *rest = name.split("/")
    if not 1 <= len(rest) <= 2 or not all((owner, *rest)):
        raise ValueError(f"data: wanted a dataset as hf:OWNER/NAME or hf:OWNER/NAME/CONFIG[:SPLIT], got {source}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"data: {source} needs datasets: pip install datasets") from error
    try:
        rows = load_dataset(f"{owner}/{rest[0]}", *rest[1:], split=split or "train")
    except Exception as error:  # of the many classes that the package and its clients raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"data: wanted a dataset that can be loaded, got {source}: {reason}") from error
    if "text" not in rows.column_names:
        raise ValueError(
            f"data: wanted a dataset with a column text, got {source}: its columns are {', '.join(rows.column_names)}"
        )
    columns = [name for name in ("text", "kind") if name in rows.column_names and (with_kind or name == "text")]
    number = 0
    for batch in rows.select_columns(columns).iter(batch_size=_ROWS):
        for values in zip(*(batch[name] for name in columns), strict=True):
            number += 1
            yield number, dict(zip(columns, values, strict=True))
