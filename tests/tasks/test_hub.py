"""Hugging Face datasets as data, by a stand-in for the package `datasets`."""

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from condense.tasks import documents, encode_corpus, load_corpus, read_documents
from condense.tasks.corpus import sha256
from condense.train import RECIPES
from condense.train.record import summary


class Rows:
    """A dataset in memory: the part of `datasets.Dataset` that is used."""

    def __init__(self, columns):
        self._columns = columns
        self.column_names = list(columns)

    def select_columns(self, names):
        return Rows({name: self._columns[name] for name in names})

    def iter(self, batch_size):
        for start in range(0, len(next(iter(self._columns.values()))), batch_size):
            yield {name: values[start : start + batch_size] for name, values in self._columns.items()}


@pytest.fixture
def stored(monkeypatch):
    """What `load_dataset` gives, by its arguments; tests add to it."""
    content = {}

    def load_dataset(*name, split):
        if (*name, split) not in content:
            raise FileNotFoundError(f"Dataset {name} doesn't exist\non the Hub")
        return Rows(content[*name, split])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(documents, "_ROWS", 2)
    return content


def test_name_config_and_split(stored):
    stored["ann/books", "train"] = {"id": [1, 2, 3], "text": ["a", "b", "c"], "kind": ["x", "y", "x"]}
    stored["ann/books", "long", "train[:1%]"] = {"text": ["d"]}
    stored["ann/books", "test"] = {"text": ["e"]}
    names = ["hf:ann/books", Path("hf:ann/books/long:train[:1%]"), "hf:ann/books:test"]
    assert list(read_documents(names)) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:books", "data: wanted a dataset as hf:OWNER/NAME or .*, got hf:books$"),
        ("hf:a/b/c/d", "data: wanted a dataset as hf:OWNER/NAME or"),
        ("hf:/books", "data: wanted a dataset as hf:OWNER/NAME or"),
        ("hf:ann/none", r"data: wanted a dataset that can be loaded, got hf:ann/none: Dataset .* doesn't exist$"),
        ("hf:ann/other", "data: wanted a dataset with a column text, got hf:ann/other: its columns are id, body$"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(stored, name, message):
    stored["ann/other", "train"] = {"id": [1], "body": ["a"]}
    with pytest.raises(ValueError, match=message):
        list(read_documents([name]))


def test_a_missing_package_is_named(monkeypatch):
    stock = builtins.__import__

    def importing(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    message = r"data: hf:ann/books needs datasets: pip install datasets"
    with pytest.raises(ValueError, match=message):
        list(read_documents(["hf:ann/books"]))


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
    before = sha256(Path("hf:ann/books"))
    columns["text"] = ["One line.\nTwo."]
    assert sha256(Path("hf:ann/books")) != before
    assert len(load_corpus(["hf:ann/books"], tokenizer, tmp_path).document_starts) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_the_record_has_the_whole_name(tmp_path):
    data = [Path("hf:ann/books/long:test"), tmp_path / "a.txt"]
    run = RECIPES["adapt"](data, tmp_path / "b", pretrained="base", method="cca")
    assert summary(run)["data"] == ["hf:ann/books/long:test", "a.txt"]
