import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from transformers import PreTrainedTokenizerBase

from condense.tasks import corpus as corpus_module
from condense.tasks import encode_corpus, load_corpus, read_documents

DOCUMENTS = ["One line.\nA second,\u2028not a third.\n", "Code:\n\tx = 1\n"]


def _records(documents: list[str]) -> bytes:
    kinds = ("book", "code")
    lines = [json.dumps({"text": text, "kind": kind}) for text, kind in zip(documents, kinds, strict=True)]
    # \u2028 unescaped: a line break of Unicode inside a record
    return "\n".join(line.replace("\\u2028", "\u2028") for line in lines).encode() + b"\n"


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.zst"])
def test_json_lines_are_read_plain_and_compressed(tmp_path: Path, name: str) -> None:
    data = _records(DOCUMENTS)
    if name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    path = tmp_path / name
    path.write_bytes(data)
    assert list(read_documents([path])) == DOCUMENTS
    assert list(read_documents([path], kind="code")) == DOCUMENTS[1:]


def test_bad_files_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"paths: wanted an existing text file, got .*missing.txt"):
        list(read_documents([tmp_path / "missing.txt"]))
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_documents([path]))
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"line 1 in .*bad.jsonl"):
        list(read_documents([path]))
    for name, message in (("bad.txt", "wanted UTF-8 text"), ("bad.jsonl.zst", "wanted a zstd file")):
        path = tmp_path / name
        path.write_bytes(b"caf\xe9")
        with pytest.raises(ValueError, match=f"paths: {message}, got .*{name}"):
            list(read_documents([path]))
    with pytest.raises(ValueError, match="documents: wanted at least one"):
        encode_corpus([""], tokenizer)


def test_pieces_equal_the_whole(text: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_PIECE_CHARACTERS", 100)
    corpus = encode_corpus([text, "", DOCUMENTS[0]], tokenizer)
    whole = [tokenizer(document, add_special_tokens=False)["input_ids"] for document in (text, DOCUMENTS[0])]
    end = [tokenizer.eos_token_id]
    np.testing.assert_array_equal(corpus.tokens, [*whole[0], *end, *whole[1], *end])
    assert corpus.document_starts.tolist() == [0, len(whole[0]) + 1]
    ends = [tokenizer.decode(token) for token in corpus.tokens[corpus.line_starts[1:] - 1]]
    assert set(ends) == {"\n", tokenizer.eos_token}
    assert len(corpus.line_starts) == 1 + sum(map(ends.count, ("\n", tokenizer.eos_token)))
    assert corpus.tokens.dtype == np.uint16


def test_encoding_is_kept_on_disk(
    text_file: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_corpus([text_file], tokenizer, tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".npz"
    assert file.stat().st_mode == text_file.stat().st_mode  # that of an ordinary file
    monkeypatch.setattr(corpus_module, "encode_corpus", lambda *_: pytest.fail("encoded twice"))
    again = load_corpus([text_file], tokenizer, tmp_path)
    for name in ("tokens", "line_starts", "document_starts"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


def test_a_failure_leaves_nothing_on_disk(
    text_file: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: Any, **arrays: np.ndarray) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(KeyboardInterrupt):
        load_corpus([text_file], tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_huge_window_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    stream = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(stream, closefd=False) as writer:
        writer.write(_records(DOCUMENTS))
    path = tmp_path / "wide.jsonl.zst"
    path.write_bytes(stream.getvalue())
    assert list(read_documents([path])) == DOCUMENTS
