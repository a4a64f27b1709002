"""Corpora: files and Hugging Face datasets are read or refused; encodings are the whole text's and kept on disk."""

import codecs
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from models import tiny
from pyarrow import Table, parquet
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from condense.tasks import corpus as corpus_module
from condense.tasks import documents, encode_corpus, load_corpus, read_documents, read_json_lines
from condense.train import RECIPES
from condense.train.record import summary

DOCUMENTS = ["One line.\nA second,\u2028not a third.\n", "Code:\n\tx = 1\n"]
UNREADABLE = [
    ("hf:books", "data: wanted a dataset as hf:OWNER/NAME or .*, got hf:books$"),
    ("hf:a/b/c/d", "data: wanted a dataset as hf:OWNER/NAME or"),
    ("hf:ann/none", r"data: wanted a dataset that can be loaded, got hf:ann/none: Dataset .* doesn't exist$"),
    ("hf:ann/other", "data: wanted a dataset with a column text, got hf:ann/other: its columns are id, body$"),
]


# name, content and how the message begins that names it
BAD_FILES = [
    ("missing.txt", None, "data: wanted an existing text file, got"),
    ("no-text.jsonl", b'{"text": "fine"}\n{"body": "no text"}\n', "line 2 in"),
    ("bad.txt", b"caf\xe9", "data: wanted UTF-8 text, got"), ("a.jsonl.zst", b"caf", "data: wanted a zstd file, got"),
    ("cut.txt.zst", zstandard.compress(b"text")[:-1], "data: wanted a zstd file, got"),
    ("a.parquet", b"text", "data: wanted a Parquet file with a column text, got"),
    ("a.json", b"{}", "data: wanted text, JSON lines or Parquet, got"),
]  # fmt: skip
# with a line break of Unicode, unescaped, inside a record
RECORDS = "".join(json.dumps({"text": x, "kind": "book"}, ensure_ascii=False) + "\n" for x in DOCUMENTS).encode()


def test_records_and_texts_are_read_plain_and_compressed(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    parquet.write_table(Table.from_pylist([json.loads(line) for line in RECORDS.splitlines()]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(compress, RECORDS.splitlines(keepends=True))))  # two frames
    (tmp_path / "one.txt.zst").write_bytes(compress(DOCUMENTS[0].encode()))
    # with a huge window
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "wide.jsonl.zst").write_bytes(wide.compress(RECORDS) + wide.flush())
    (tmp_path / "UPPER.JSONL").write_bytes(RECORDS)
    (tmp_path / "UPPER.JSONL.ZST").write_bytes(compress(RECORDS))
    for name in ("a.jsonl", "a.jsonl.zst", "wide.jsonl.zst", "a.parquet", "UPPER.JSONL", "UPPER.JSONL.ZST"):
        assert list(read_documents([tmp_path / name])) == DOCUMENTS
    assert list(read_documents([tmp_path / "one.txt.zst"])) == DOCUMENTS[:1]
    # as programs on Windows write them
    (tmp_path / "marked.jsonl").write_bytes(codecs.BOM_UTF8 + RECORDS.replace(b"\n", b"\r\n"))
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"a line\r\nand another")
    assert list(read_documents([tmp_path / "marked.jsonl"])) == DOCUMENTS
    assert list(read_documents([tmp_path / "marked.txt"])) == ["a line\nand another"]


def test_bad_files_are_refused(tmp_path, tokenizer):
    for name, content, message in BAD_FILES:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        tiny.refused(f"{message} .*{name}", list, read_documents([tmp_path / name]))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n[2]\n')
    tiny.refused("line 3", list, read_json_lines(tmp_path / "rows.jsonl"))
    tiny.refused("documents: wanted at least one", encode_corpus, [""], tokenizer)
    tiny.refused("an eos token .* got none: set eos_token", encode_corpus, ["a"], SimpleNamespace(eos_token_id=None))
    wanted = "data: wanted texts in .*rows.jsonl, got 2 records without a text field, such as .*rows.jsonl line 1"
    tiny.refused(wanted, load_corpus, [tmp_path / "rows.jsonl"], tokenizer, tmp_path / "cache")
    (tmp_path / "some.jsonl").write_text('{"text": "fine"}\n{"body": "no text"}\n')
    files = [tmp_path / "some.jsonl", tmp_path / "bad.txt"]
    tiny.refused("data: wanted UTF-8 text, got .*bad.txt", load_corpus, files, tokenizer, tmp_path / "cache")
    tiny.refused("cache: wanted a folder, got .*bad.txt", load_corpus, files[:1], tokenizer, files[1])


def test_bad_records_are_counted_and_named(tmp_path, tokenizer, capsys):
    path, other = tmp_path / "some.jsonl", tmp_path / "other.parquet"
    bad = b'none\n{"text": 3}\n\n{"text": "caf\xe9"}\n[1]\n{"text": "\\ud83d"}\n'
    path.write_bytes(b'{"text": "fine"}\n' + bad + b'{"text": "well"}\n')
    parquet.write_table(Table.from_pylist([{"text": None}, {"text": "good"}]), other)
    skipped = []
    assert list(read_documents([path, other], skipped=skipped)) == ["fine", "well", "good"]
    assert skipped == [*(f"{path} line {number}" for number in (2, 3, 5, 6, 7)), f"{other} line 1"]
    assert len(load_corpus([path, other], tokenizer, tmp_path / "cache").document_starts) == 3
    said = " ".join(capsys.readouterr().err.replace("\n", "").split())
    assert "left out: 6:" in said
    assert "and 3 more" in said
    parquet.write_table(Table.from_pylist([{"body": "x"}]), other)
    tiny.refused("data: wanted a Parquet file with a column text, got .*other", list, read_documents([other]))


def test_pieces_equal_the_whole(text, tokenizer, monkeypatch):
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


def test_encoding_is_kept_on_disk(text_file, tokenizer, tmp_path, monkeypatch):
    first = load_corpus([text_file], tokenizer, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert {path.stat().st_mode for path in folder.iterdir()} == {text_file.stat().st_mode}  # that of ordinary files
    assert isinstance(first.tokens, np.memmap)
    monkeypatch.setattr(corpus_module, "encode_corpus", lambda *_: pytest.fail("encoded twice"))
    again = load_corpus([text_file], tokenizer, tmp_path)
    for name in ("tokens", "line_starts", "document_starts"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


def test_another_tokenizer_of_the_same_vocabulary_and_another_form_are_encoded_anew(text_file, tokenizer, tmp_path):
    def changed(change, separator=tokenizer.eos_token):
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        change(settings)
        inner = Tokenizer.from_str(json.dumps(settings))
        return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=separator)

    load_corpus([text_file], tokenizer, tmp_path)
    for other in (
        changed(lambda settings: settings["model"]["merges"].reverse()),
        changed(lambda settings: settings.update(normalizer={"type": "Lowercase"})),
        changed(lambda settings: None, tokenizer.convert_ids_to_tokens(5)),
    ):
        assert other.get_vocab() == tokenizer.get_vocab()
        want = encode_corpus([text_file.read_text(encoding="utf-8")], other)
        np.testing.assert_array_equal(load_corpus([text_file], other, tmp_path).tokens, want.tokens)
    for name in ("a.txt", "a.jsonl"):  # a file that is read otherwise
        (tmp_path / name).write_bytes(RECORDS)
    text, records = (load_corpus([tmp_path / name], tokenizer, tmp_path / "c").tokens for name in ("a.txt", "a.jsonl"))
    assert len(text) > len(records)


def test_ids_with_a_gap_and_tokenizers_that_are_not_fast(tokenizer, tmp_path, text_file):
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    settings["model"]["vocab"]["far"] = last = len(tokenizer) + 100
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(settings)), eos_token="<eos>")
    other.add_tokens("far")
    assert last in encode_corpus(["so far so near"], other).tokens
    wanted = "tokenizer: wanted a fast one, of the package tokenizers, got ByT5Tokenizer"
    tiny.refused(wanted, load_corpus, [text_file], ByT5Tokenizer(), tmp_path)


def test_a_tokenizer_that_has_padded_and_cut_in_between_encodes_nothing_anew(text_file, tokenizer, tmp_path):
    ends = {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.eos_token}
    padding = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **ends)
    load_corpus([text_file], padding, tmp_path)
    padding(["one", "and two"], padding="max_length", truncation=True, max_length=9)
    load_corpus([text_file], padding, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_nothing_on_disk(text_file, tokenizer, tmp_path, monkeypatch):
    def fail(path, array):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        load_corpus([text_file], tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 10, 200, None])
def test_a_cache_that_lost_the_end_of_a_file_is_named(text_file, tokenizer, tmp_path, size):
    load_corpus([text_file], tokenizer, tmp_path)
    (folder,) = tmp_path.iterdir()
    file = folder / "tokens.npy"
    content = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(content[:size])
    with pytest.raises(ValueError, match=f"cache: wanted whole files in {folder}, got others: delete that folder"):
        load_corpus([text_file], tokenizer, tmp_path)


class Rows:
    def __init__(self, columns):
        self._columns, self.column_names = columns, list(columns)

    def select_columns(self, names):
        return Rows({name: self._columns[name] for name in names})

    def iter(self, batch_size):
        for start in range(0, len(next(iter(self._columns.values()))), batch_size):
            yield {name: values[start : start + batch_size] for name, values in self._columns.items()}


@pytest.fixture
def stored(monkeypatch):
    content = {}

    def load_dataset(*name, split):
        if (*name, split) not in content:
            raise FileNotFoundError(f"Dataset {name} doesn't exist\non the Hub")
        return Rows(content[*name, split])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(documents, "_ROWS", 2)
    return content


def test_name_config_and_split_and_the_record_has_the_whole_name(stored):
    run = RECIPES["adapt"]([Path("hf:ann/books/long:test"), Path("b/a.txt")], "c", pretrained="base", method="cca")
    assert summary(run)["data"] == ["hf:ann/books/long:test", "a.txt"]
    stored["ann/books", "train"] = {"id": [1, 2, 3], "text": ["a", "b", "c"], "kind": ["x", "y", "x"]}
    stored["ann/books", "long", "train[:1%]"] = {"text": ["d"]}
    stored["ann/books", "test"] = {"text": ["e"]}
    names = ["hf:ann/books", Path("hf:ann/books/long:train[:1%]"), "hf:ann/books:test"]
    assert list(read_documents(names)) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(("name", "message"), UNREADABLE)
def test_what_cannot_be_read_is_refused_in_one_line(stored, name, message, monkeypatch):
    stored["ann/other", "train"] = {"id": [1], "body": ["a"]}
    tiny.refused(message, list, read_documents([name]))
    monkeypatch.setitem(sys.modules, "datasets", None)
    tiny.refused("data: hf:ann/books needs datasets: pip install datasets", list, read_documents(["hf:ann/books"]))


def test_texts_are_encoded_once_and_anew_when_they_change(stored, tokenizer, tmp_path, capsys):
    columns = {"text": ["One line.\n", None, "Two."]}
    stored["ann/books", "train"] = columns
    expected = encode_corpus(["One line.\n", "Two."], tokenizer)
    for _ in range(2):
        corpus = load_corpus(["hf:ann/books"], tokenizer, tmp_path)
        assert isinstance(corpus.tokens, np.memmap)
        np.testing.assert_array_equal(corpus.tokens, expected.tokens)
    assert len(list(tmp_path.iterdir())) == 1
    assert capsys.readouterr().err.count("left out: 1: hf:ann/books line 2") == 1
    columns["text"] = ["One line.\nTwo."]
    assert len(load_corpus(["hf:ann/books"], tokenizer, tmp_path).document_starts) == 1
    assert len(list(tmp_path.iterdir())) == 2
