"""Text files as one array of tokens that sequences are sliced from."""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from condense.files import whole_file

_PIECE_CHARACTERS = 20_000
_PIECES_PER_BATCH = 512
_ZSTD_WINDOW = 2**27  # what `zstd --ultra --long=27` needs at most


@dataclass(frozen=True)
class Corpus:
    """Encoded documents, one after the other, each followed by the separator token.

    tokens: ``[N]``, uint16 if the vocabulary allows it, else int32. line_starts: ``[lines]`` int64, ascending:
    positions in ``tokens`` at which a line begins. document_starts: ``[documents]`` int64, ascending: positions at
    which a document begins.
    """

    tokens: np.ndarray
    line_starts: np.ndarray
    document_starts: np.ndarray


def read_documents(paths: Sequence[str | Path], kind: str | None = None) -> Iterator[str]:
    """The documents of text files, in order.

    ``.jsonl`` and ``.jsonl.zst`` files have one JSON object per line with a ``text`` field; any other file is
    one document of UTF-8 text.

    paths: files to read. kind: with JSON lines, only objects whose ``kind`` field has this value.
    Raises ValueError if a file is missing or is not what its name says.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"paths: wanted an existing text file, got {path}")
        if path.suffixes[-2:] == [".jsonl", ".zst"] or path.suffix == ".jsonl":
            for number, record in enumerate(read_json_lines(path), start=1):
                if kind is not None and record.get("kind") != kind:
                    continue
                if not isinstance(record.get("text"), str):
                    raise ValueError(
                        f"paths: wanted JSON objects with a text field, got another line {number} in {path}"
                    )
                yield record["text"]
        else:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"paths: wanted UTF-8 text, got {path}: {error}") from error


def encode_corpus(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Encode documents without special tokens, and put the separator (``eos``) after each.

    Long documents are encoded in pieces that end at a newline, which is what makes encoding parallel. With a
    tokenizer that never merges across a newline (the library's own) the pieces give the same tokens as the whole.

    Raises ValueError for no document, or nothing but empty ones; or the tokenizer has no ``eos`` token.
    """
    separator = tokenizer.eos_token_id
    if separator is None:
        raise ValueError("tokenizer: wanted one with an eos token to separate documents by, got none")
    dtype: type[np.generic] = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    chunks: list[np.ndarray] = []
    document_starts: list[int] = []
    total = 0
    pieces = chain.from_iterable(_pieces(document) for document in documents)
    while batch := list(islice(pieces, _PIECES_PER_BATCH)):
        texts = [text for text, _ in batch]
        for ids, (_, first) in zip(_encode(tokenizer, texts), batch, strict=True):
            if first:
                if document_starts:
                    chunks.append(np.array([separator], dtype))
                    total += 1
                document_starts.append(total)
            chunks.append(np.array(ids, dtype))
            total += len(ids)
    if total == 0:
        raise ValueError("documents: wanted at least one document with text, got none")
    tokens = np.concatenate([*chunks, np.array([separator], dtype)])
    ends_line = np.zeros(len(tokenizer), bool)
    ends_line[[*newline_tokens(tokenizer), separator]] = True
    line_starts = np.concatenate([[0], np.flatnonzero(ends_line[tokens[:-1]]) + 1])
    return Corpus(tokens, line_starts.astype(np.int64), np.array(document_starts, np.int64))


def load_corpus(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, cache: str | Path) -> Corpus:
    """``encode_corpus`` of files, kept on disk: the second call with the same files and tokenizer reads it back.

    paths: see ``read_documents``. tokenizer: a fast tokenizer. cache: folder for the encoded arrays.
    Raises ValueError as ``read_documents`` and ``encode_corpus``.
    """
    file = Path(cache) / f"tokens-{_fingerprint(paths, tokenizer)}.npz"
    if file.is_file():
        with np.load(file) as arrays:
            return Corpus(arrays["tokens"], arrays["line_starts"], arrays["document_starts"])
    console = Console(stderr=True)
    documents = track(list(read_documents(paths)), description="Encoding", transient=True, console=console)
    corpus = encode_corpus(documents, tokenizer)
    with whole_file(file, overwrite=True) as stream:
        np.savez(
            stream,
            tokens=corpus.tokens,
            line_starts=corpus.line_starts,
            document_starts=corpus.document_starts,
        )
    return corpus


def sha256(path: Path) -> str:
    """The hash of a file's contents, in hexadecimal. Raises ValueError if there is no such file."""
    if not path.is_file():
        raise ValueError(f"paths: wanted an existing text file, got {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newline_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of all tokens whose text ends in a newline."""
    texts = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
    return [index for index, text in enumerate(texts) if text.endswith("\n")]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a ``.jsonl`` or ``.jsonl.zst`` file, one per line; empty lines are left out.

    Raises ValueError for a line that is no JSON object, and for a compressed file without the package zstandard.
    """
    with path.open("rb") as file, _decompressed(file, path) as stream:
        # Lines of bytes end at "\n" alone: some texts hold other line breaks of Unicode, which end no record.
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"paths: wanted JSON objects, got another line {number} in {path}") from error
            if not isinstance(record, dict):
                raise ValueError(f"paths: wanted JSON objects, got another line {number} in {path}")
            yield record


@contextlib.contextmanager
def _decompressed(file: Any, path: Path) -> Iterator[Any]:
    if path.suffix != ".zst":
        yield file
        return
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(f"paths: {path} needs zstandard: pip install 'condense-attention[train]'") from error
    try:
        with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(file) as stream:
            yield io.BufferedReader(stream)
    except zstandard.ZstdError as error:
        raise ValueError(f"paths: wanted a zstd file, got {path}: {error}") from error


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces that end at a newline, each with whether it is the document's first."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + _PIECE_CHARACTERS) + 1 or len(document)
        yield document[start:end], start == 0
        start = end


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # verbose=False: no warning for texts longer than the model's positions, as most are
    encoding = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(encoding["input_ids"])


def _fingerprint(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of the files' contents, of all that decides how the tokenizer encodes, and of its separator."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    # these two change with every call of the tokenizer
    del settings["padding"], settings["truncation"]
    digest = hashlib.sha256(json.dumps([settings, tokenizer.eos_token_id]).encode())
    for path in map(Path, paths):
        digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()[:16]
