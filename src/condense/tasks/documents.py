"""Documents in local files (text, JSON lines, Parquet) and in Hugging Face datasets."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

_ZSTD_WINDOW = 2**27  # what `zstd --ultra --long=27` needs at most
_BYTES = 2**20  # of a file, read at a time
_PREFIX = "hf:"
_ROWS = 1000  # rows of a dataset that are read at a time


def read_documents(paths: Sequence[str | Path], *, skipped: list[str] | None = None) -> Iterator[str]:
    """The documents of text files and datasets, in order.

    ``.jsonl`` files have one JSON object per line with a ``text`` field, ``.parquet`` files a column ``text``; any
    other file is one document of UTF-8 text. Text and JSON lines may be compressed (``.zst``). A dataset is named as
    ``hf:OWNER/NAME`` or ``hf:OWNER/NAME/CONFIG``, either also with ``:SPLIT``: any split that `datasets.load_dataset`
    takes, such as ``train[:1%]``, by default ``train``; it has a column ``text``. The package datasets downloads it
    into its own cache, or finds it there, and maps it into memory.

    paths: files to read, and names of datasets. skipped: gets the places of records without text; None: these raise.
    Raises ValueError for a missing file or one that is not what its name says, for a dataset that is named otherwise,
    cannot be loaded or has no column ``text``, and where one needs a package that is not installed.
    """
    for path in map(Path, paths):
        for number, record in _records(path):
            try:
                text = record["text"]
                text.encode()  # fails for half a character, which JSON can spell (\ud83d) and no tokenizer takes
            except (AttributeError, KeyError, TypeError, UnicodeEncodeError):
                if skipped is None:
                    wanted = "data: wanted records with a text field in UTF-8"
                    raise ValueError(f"{wanted}, got another line {number} in {path}") from None
                skipped.append(f"{path} line {number}")
            else:
                yield text


def is_dataset(source: str | Path) -> bool:
    """True if a source of documents is the name of a dataset, False if it is a local file."""
    return str(source).startswith(_PREFIX)


def form_of(source: Path) -> Literal["dataset", "parquet", "jsonl", "text"]:
    """The form of a source of documents, by its name.

    Raises ValueError for names of tables in other forms, which would be read as one text.
    """
    if is_dataset(source):
        return "dataset"
    last = next((suffix for suffix in map(str.lower, reversed(source.suffixes)) if suffix != ".zst"), "")
    if last in (".json", ".ndjson", ".csv", ".tsv"):
        raise ValueError(
            f"data: wanted text, JSON lines or Parquet, got {source}: name plain text .txt and JSON lines .jsonl, and "
            "convert other tables"
        )
    return "parquet" if last == ".parquet" else "jsonl" if last == ".jsonl" else "text"


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file or dataset with their numbers from 1."""
    if (form := form_of(path)) != "dataset" and not path.is_file():
        raise ValueError(f"data: wanted an existing text file, got {path}")
    return {"dataset": _dataset, "parquet": _parquet, "jsonl": _json_lines, "text": _text}[form](path)


def plain_text(content: bytes) -> str:
    """UTF-8 text without a byte order mark, whose lines end by a newline alone."""
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _text(path: Path) -> Iterator[tuple[int, Any]]:
    """The one document of a text file, numbered 1."""
    try:
        yield 1, {"text": plain_text(b"".join(_pieces(path)))}
    except UnicodeDecodeError as error:
        raise ValueError(f"data: wanted UTF-8 text, got {path}: {error}") from error


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
    for number, line in enumerate(_lines(_pieces(path)), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file, reduced to their text, with their numbers from 1."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"data: {path} needs pyarrow: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise OSError(f"its columns are {', '.join(file.schema_arrow.names)}")
        rows = (row for batch in file.iter_batches(columns=["text"]) for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except (ArrowException, OSError) as error:
        raise ValueError(f"data: wanted a Parquet file with a column text, got {path}: {error}") from error


def _dataset(source: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a dataset, reduced to their text, with their numbers from 1."""
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
    except Exception as error:  # the package and its clients raise errors of many classes
        reason = str(error).partition("\n")[0]
        raise ValueError(f"data: wanted a dataset that can be loaded, got {source}: {reason}") from error
    if "text" not in rows.column_names:
        raise ValueError(
            f"data: wanted a dataset with a column text, got {source}: its columns are {', '.join(rows.column_names)}"
        )
    batches = rows.select_columns(["text"]).iter(batch_size=_ROWS)
    yield from enumerate(({"text": text} for batch in batches for text in batch["text"]), start=1)


def _pieces(path: Path) -> Iterator[bytes]:
    """The file's bytes in order, decompressed. Refuses a frame without its end, which zstandard reads as if whole."""
    with path.open("rb") as file:
        pieces = iter(lambda: file.read(_BYTES), b"")
        if path.suffix.lower() != ".zst":
            yield from pieces
            return
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"data: {path} needs zstandard: pip install zstandard") from error
        frames, frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW), None
        try:
            for piece in pieces:
                while piece:
                    frame = frame or frames.decompressobj()
                    yield frame.decompress(piece)
                    piece, frame = frame.unused_data, None if frame.eof else frame  # a file may have several frames
            if frame:
                raise zstandard.ZstdError("it ends too early, as if it was not copied whole")
        except zstandard.ZstdError as error:
            raise ValueError(f"data: wanted a zstd file, got {path}: {error}") from error


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a file that is read in pieces. They end at newlines alone: text may hold other line breaks of
    Unicode, which end no record.
    """
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest
