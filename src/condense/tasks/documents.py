"""Documents in local files (text, JSON lines, Parquet) and in Hugging Face datasets."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from condense.tasks.hub import is_dataset, read_dataset

_ZSTD_WINDOW = 2**27  # what `zstd --ultra --long=27` needs at most
_NAMED = 3  # how many of the records left out are named in the report


@dataclass
class Skipped:
    """Records that were left out: how many, and where the first of them stand and why."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(reason)

    def __str__(self) -> str:
        more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"condense: records without usable text, left out: {self.count}: {'; '.join(self.first)}{more}"


def read_documents(
    paths: Sequence[str | Path], kind: str | None = None, *, skipped: Skipped | None = None
) -> Iterator[str]:
    """The documents of text files and datasets, in order.

    ``.jsonl`` files have one JSON object per line with a ``text`` field, ``.parquet`` files a column ``text``; any
    other file is one document of UTF-8 text. Text and JSON lines may be compressed (``.zst``). A dataset is named as
    ``hf:OWNER/NAME/CONFIG:SPLIT`` (see ``read_dataset``) and has a column ``text``.

    paths: files to read, and names of datasets. kind: of records, read only those whose ``kind`` has this value.
    skipped: counts the records without text, which are left out; None: such a record raises.
    Raises ValueError if a file is missing or is not what its name says, or needs a package that is not installed; for a
    dataset as ``read_dataset``.
    """
    for path in map(Path, paths):
        records = _records(path, kind is not None)
        if records is None:
            yield _text(path)
            continue
        for number, record in records:
            is_record = isinstance(record, dict)
            if is_record and kind is not None and record.get("kind") != kind:
                continue
            if is_record and isinstance(record.get("text"), str):
                yield record["text"]
            elif skipped is None:
                raise ValueError(f"data: wanted records with a text field, got another line {number} in {path}")
            else:
                skipped.add(f"{path} line {number}")


def _text(path: Path) -> str:
    """A file that is one document."""
    with _opened(path) as stream:
        try:
            return str(stream.read(), "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"data: wanted UTF-8 text, got {path}: {error}") from error


def _records(path: Path, with_kind: bool) -> Iterator[tuple[int, Any]] | None:
    """The records of a file or dataset with their numbers from 1; None for a file that is one document."""
    if is_dataset(path):
        return read_dataset(path, with_kind)
    if not path.is_file():
        raise ValueError(f"data: wanted an existing text file, got {path}")
    suffixes = [suffix for suffix in path.suffixes if suffix != ".zst"]
    if suffixes and suffixes[-1] == ".parquet":
        return _parquet(path, with_kind)
    return _json_lines(path) if suffixes and suffixes[-1] == ".jsonl" else None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a ``.jsonl`` or ``.jsonl.zst`` file, one per line; empty lines are left out.

    Raises ValueError for a line that is no JSON object, and for a compressed file without the package zstandard.
    """
    for number, record in _json_lines(path):
        if not isinstance(record, dict):
            raise ValueError(f"data: wanted a JSON object in every line, got none: line {number} in {path}")
        yield record


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers with the JSON value in each line, None for a line that is no JSON."""
    with _opened(path) as stream:
        # read as bytes, whose lines end at "\n" alone: text may hold other line breaks of Unicode, which end no record
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError:
                    yield number, None


def _parquet(path: Path, with_kind: bool) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file with their numbers from 1: their text, and with_kind their kind."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"data: {path} needs pyarrow: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
        columns = ["text", "kind"] if with_kind else ["text"]
        if "text" not in file.schema_arrow.names:
            raise OSError(f"its columns are {', '.join(file.schema_arrow.names)}")
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except (ArrowException, OSError) as error:
        raise ValueError(f"data: wanted a Parquet file with a column text, got {path}: {error}") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file's bytes, decompressed."""
    with path.open("rb") as file:
        if path.suffix != ".zst":
            yield file
            return
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"data: {path} needs zstandard: pip install zstandard") from error
        try:
            with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(file) as stream:
                yield io.BufferedReader(stream)
        except zstandard.ZstdError as error:
            raise ValueError(f"data: wanted a zstd file, got {path}: {error}") from error
