"""Tasks whose names share words, and whose numbers stand anywhere in the text."""

import re
from collections import Counter

import numpy as np
import pytest

import condense
from condense.tasks import SequenceBuilder, draw_keys, encode_corpus, load_words

WORDS = load_words().held_out


@pytest.fixture(scope="module")
def builder():
    _, tokenizer = condense.demo_model()
    text = condense.demo.demo_text().text
    return SequenceBuilder(tokenizer, encode_corpus([text], tokenizer), WORDS, 1024), tokenizer


@pytest.mark.parametrize("count", [1, 8, 72])
def test_names_differ_and_share_words(count):
    keys = draw_keys(np.random.default_rng(0), WORDS, count, shared=True)
    names = {(key.first, key.second) for key in keys}
    assert len(names) == len({key.number for key in keys}) == count
    assert not {key.first for key in keys} & {key.second for key in keys}
    if count > 1:
        uses = Counter(word for key in keys for word in (key.first, key.second))
        # each of the at most 2 * ceil(sqrt(2 * count)) words names sqrt(count / 2) keys in the mean
        assert sum(n > 1 for n in uses.values()) > len(uses) / 2


def test_too_many_names_for_the_words_are_refused():
    with pytest.raises(ValueError, match="count: wanted 1 to 2 keys for 4 words, got 3"):
        draw_keys(np.random.default_rng(0), WORDS[:4], 3, shared=True)


@pytest.mark.parametrize("form", ["cloze", "question"])
def test_numbers_stand_between_words_and_are_answered(builder, form):
    sequences, tokenizer = builder
    inside = 0
    for seed in range(8):
        task = sequences.passkeys(np.random.default_rng(seed), 6, form, shared=True, anywhere=True)
        assert len(task.input_ids) == 1024
        text = tokenizer.decode(task.input_ids)
        for key, (start, stop) in zip(task.keys, task.answers, strict=True):
            assert tokenizer.decode(task.input_ids[start:stop]) == f" {key.number}"
            statement = f" The number of the {key.first} {key.second} is {key.number}."
            before, after = text.split(statement, 1)
            assert re.match(r"[ \n]", after)  # no word is cut
            inside += not before.endswith("\n")
    assert inside > 24  # of 48: a line of this text has about ten words


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_number_opens_the_text(builder, anywhere):
    sequences, tokenizer = builder
    for seed in range(4):
        task = sequences.passkeys(np.random.default_rng(seed), 6, "cloze", anywhere=anywhere, opening=True)
        (first,) = [key for key, depth in zip(task.keys, task.depths, strict=True) if depth == min(task.depths)]
        text = tokenizer.decode(task.input_ids, skip_special_tokens=True).lstrip()
        assert text.startswith(f"The number of the {first.first} {first.second} is {first.number}.")
        assert len(task.keys) == 6


@pytest.mark.parametrize("size", [300, 700])
def test_a_task_ends_early_and_other_text_follows(builder, size):
    sequences, tokenizer = builder
    task = sequences.passkeys(np.random.default_rng(0), 4, "question", size=size)
    assert len(task.input_ids) == 1024
    end = max(stop for _, stop in task.answers)
    assert tokenizer.decode(task.input_ids[end:size]) == ".\n"
    rest = tokenizer.decode(task.input_ids[size:])
    assert not [key for key in task.keys if f"{key.first} {key.second}" in rest]


def test_other_tasks_are_the_same_as_without_it(builder):
    sequences, _ = builder
    first, second = (sequences.passkeys(np.random.default_rng(3), 4, "cloze", **more) for more in ({}, {"shared": 0}))
    assert first.keys == second.keys
    assert np.array_equal(first.input_ids, second.input_ids)
