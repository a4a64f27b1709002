"""Text files as one array of tokens that sequences are sliced from."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from condense.files import whole_folder
from condense.tasks.documents import form_of, is_dataset, read_documents

_PIECE_CHARACTERS = 20_000
_PIECES_PER_BATCH = 512
_NAMED = 3  # how many of the records left out are named in the report


@dataclass(frozen=True)
class Corpus:
    """Encoded documents, one after the other, each followed by the separator token.

    tokens: ``[N]``, uint16 if the vocabulary allows it, else int32. line_starts: ``[lines]`` int64, ascending:
    positions in ``tokens`` at which a line begins. document_starts: ``[documents]`` int64: where a document begins.
    """

    tokens: np.ndarray
    line_starts: np.ndarray
    document_starts: np.ndarray


class _NoTextError(ValueError):
    """The error of documents without any text."""


def encode_corpus(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Encode documents without special tokens, and put the separator (``eos``) after each.

    Long documents are encoded in parallel, in pieces that end at a newline, across which a tokenizer should not merge.

    Raises ValueError if there is no document with text, or the tokenizer has no ``eos`` token.
    """
    separator = tokenizer.eos_token_id
    if separator is None:
        raise ValueError("tokenizer: wanted one with an eos token to separate documents by, got none: set eos_token")
    dtype: type[np.generic] = np.uint16 if num_ids(tokenizer) <= 2**16 else np.int32
    chunks: list[np.ndarray] = []
    ends_document: list[bool] = []
    pieces = chain.from_iterable(map(_pieces, documents))
    while batch := list(islice(pieces, _PIECES_PER_BATCH)):
        texts = [text for text, _ in batch]
        # verbose=False: no warning for texts longer than the model's positions, because most are
        encoding = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids, (_, is_last) in zip(encoding["input_ids"], batch, strict=True):
            chunks.append(np.array([*ids, separator] if is_last else ids, dtype))
            ends_document.append(is_last)
    if sum(map(len, chunks)) == sum(ends_document):
        raise _NoTextError("documents: wanted at least one document with text, got none")
    tokens, ends = np.concatenate(chunks), np.cumsum(list(map(len, chunks)))[ends_document]
    texts_of_tokens = tokenizer.batch_decode([[index] for index in range(num_ids(tokenizer))])
    ends_line = np.array([text.endswith("\n") for text in texts_of_tokens])
    ends_line[separator] = True
    line_starts = np.concatenate([[0], np.flatnonzero(ends_line[tokens[:-1]]) + 1])
    return Corpus(tokens, line_starts.astype(np.int64), np.array([0, *ends[:-1]], np.int64))


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of token ids up to the highest one; some of these may stand for no token."""
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(argument: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise ValueError, which names the argument, if a model has no embeddings for some ids of text.

    Added tokens may lack embeddings, such as Gemma 3's for a picture.
    """
    special = [i + 1 for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
    ids, known = max(tokenizer.vocab_size, *special, 0), config.get_text_config(decoder=True).vocab_size
    if ids > known:
        raise ValueError(
            f"{argument}: wanted a tokenizer of the model's {known} tokens at most, got {ids} in "
            f"{tokenizer.name_or_path}"
        )


def load_corpus(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, cache: str | Path) -> Corpus:
    """``encode_corpus`` of files and datasets, kept on disk and mapped into memory: all processes share one copy.

    The folder's name is a hash of their contents and of all that decides how the tokenizer encodes. Records that
    hold no text are left out, counted and reported on stderr, with file (or dataset) and line.

    paths: see ``read_documents``. tokenizer: a fast tokenizer. cache: folder for the encoded arrays.
    Raises ValueError as ``read_documents`` and ``encode_corpus``, for a tokenizer that is not a fast one, and for
    truncated files in the cache or a file in its place.
    """
    if Path(cache).exists() and not Path(cache).is_dir():
        raise ValueError(f"cache: wanted a folder, got {cache}")
    folder = Path(cache) / f"tokens-{_fingerprint(paths, tokenizer)}"
    if not folder.is_dir():
        skipped: list[str] = []
        console = Console(stderr=True, markup=False, emoji=False)  # names of files are shown as they are
        documents = track(read_documents(paths, skipped=skipped), "Encoding", transient=True, console=console)
        try:
            corpus = encode_corpus(documents, tokenizer)
        except _NoTextError as error:
            left = f"{len(skipped)} records without a text field, such as {skipped[0]}" if skipped else "none"
            raise ValueError(f"data: wanted texts in {', '.join(map(str, paths))}, got {left}") from error
        if skipped:
            more = f"; and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
            said = f"{len(skipped)}: {'; '.join(skipped[:_NAMED])}{more}"
            console.print(f"condense: records without usable text, left out: {said}", highlight=False, soft_wrap=True)
        try:
            with whole_folder(folder) as part:
                for name, array in vars(corpus).items():
                    np.save(part / f"{name}.npy", array)
        except OSError:
            if not folder.is_dir():  # otherwise another run has encoded the same documents in the meantime
                raise
    names = Corpus.__dataclass_fields__
    try:
        return Corpus(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})
    except (ValueError, EOFError, FileNotFoundError) as error:  # raised for a truncated or missing file
        raise ValueError(f"cache: wanted whole files in {folder}, got others: delete that folder ({error})") from error


def sha256(path: Path) -> str:
    """The hash of a file's contents, or of a dataset's texts, in hexadecimal.

    Raises ValueError if there is no such file; for a dataset as ``read_documents``.
    """
    if is_dataset(path):
        digest = hashlib.sha256()
        for text in read_documents([path], skipped=[]):
            # hashes of texts have one length, so that moving text from one document to the next changes the result
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()
    if not path.is_file():
        raise ValueError(f"data: wanted an existing text file, got {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces that end at a newline, each with whether it is the document's last."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + _PIECE_CHARACTERS) + 1 or len(document)
        yield document[start:end], end == len(document)
        start = end


def _fingerprint(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of the sources' contents, of all that decides how the tokenizer encodes, and of its separator."""
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer: wanted a fast one, of the package tokenizers, got {type(tokenizer).__name__}")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    # these two change with every call of the tokenizer
    del settings["padding"], settings["truncation"]
    digest = hashlib.sha256(json.dumps([settings, tokenizer.eos_token_id]).encode())
    for path in map(Path, paths):
        digest.update(form_of(path).encode() + bytes.fromhex(sha256(path)))
    return digest.hexdigest()[:16]
