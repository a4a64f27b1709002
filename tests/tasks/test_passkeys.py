"""Passkey sequences: the text they say, in any text and with every tokenizer; shared names, numbers anywhere."""

import re
from collections import Counter

import numpy as np
import pytest
from models import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import condense
from condense.tasks import Key, SequenceBuilder, draw_keys, encode_corpus, hide, key_line, load_words, question_prompt

LINE = re.compile(r"^The number of the (\w+) (\w+) is (\d{4})\.$", re.MULTILINE)
QUESTION = re.compile(r"^Question: What is the number of the (\w+) (\w+)\?\nAnswer: (\d{4})\.$", re.MULTILINE)
WORDS = load_words().held_out
BAD = [
    (lambda *_: hide("", [], []), "text: wanted"),
    (lambda *_: hide("x", [Key("a", "b", "1")], [2.0]), "depths: wanted 1 numbers from 0 to 1"),
    (lambda *_: question_prompt(Key("a", "b", "1"), "poem"), "form: wanted one of cloze, question, got 'poem'"),
    (lambda *_: draw_keys(np.random.default_rng(0), ["a", "b"], 2), "count: wanted 1 to 1 keys"),
    (lambda *_: draw_keys(np.random.default_rng(0), "abcd", 3, shared=True), "count: wanted 1 to 2 keys .*, got 3"),
    (lambda *of: SequenceBuilder(*of, ["a"], 0), "length: wanted at least 128 tokens, got 0"),
    (lambda *of: SequenceBuilder(*of, ["a"], 10**9), r"corpus: wanted more .* got \d+: give more text, or ask for sh"),
]


@pytest.fixture(scope="module")
def builder(tokenizer, corpus):
    return SequenceBuilder(tokenizer, corpus, load_words().trained, 1024)


@pytest.mark.parametrize("form", condense.tasks.FORMS)
def test_a_sequence_is_the_text_it_says(builder, tokenizer, form):
    for seed in range(20):
        sequence = builder.passkeys(np.random.default_rng(seed), 6, form)
        assert sequence.input_ids.shape == (1024,)
        text = tokenizer.decode(sequence.input_ids[1:])
        assert tokenizer(text)["input_ids"] == sequence.input_ids.tolist()

        named = [(key.first, key.second, key.number) for key in sequence.keys]
        assert len(named) == 6
        stated = LINE.findall(text)
        if form == "cloze":  # questions and lines read alike: the last six are the questions
            stated, asked = stated[:6], stated[6:]
        else:
            asked = QUESTION.findall(text)
        assert sorted(stated) == sorted(named)  # each stated once
        assert asked == named
        for key, (start, stop) in zip(sequence.keys, sequence.answers, strict=True):
            assert tokenizer.decode(sequence.input_ids[start:stop]) == f" {key.number}"
        end = text.index(question_prompt(sequence.keys[0], form), text.index(key_line(sequence.keys[0])) + 1)
        for key, depth in zip(sequence.keys, sequence.depths, strict=True):
            share = text.index(key_line(key)) / end
            assert abs(share - depth) < 0.1


def test_depth_is_uniform(builder):
    drawn = (builder.passkeys(np.random.default_rng(seed), 8, "cloze") for seed in range(100))
    depths = [depth for sequence in drawn for depth in sequence.depths]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() > 0.6 * counts.mean()


def test_keys_that_do_not_fit_are_dropped_and_plain_text_has_none(builder, tokenizer, corpus, text):
    sequence = SequenceBuilder(tokenizer, corpus, WORDS, 128).passkeys(np.random.default_rng(0), 8, "question")
    assert 1 <= len(sequence.keys) < 8
    assert sequence.input_ids.shape == (128,)
    # plain text is the corpus
    ids = builder.plain(np.random.default_rng(1))
    assert ids.shape == (1024,)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) in text


def test_words_are_split_once_and_for_all():
    words = load_words()
    assert (len(words.trained), len(words.held_out)) == (2400, 600)
    assert not set(words.trained) & set(words.held_out)
    assert all(re.fullmatch("[a-z]{3,10}", word) for word in (*words.trained, *words.held_out))


def test_hiding_in_a_users_text():
    keys = [Key("quiet", "bridge", "4821"), Key("old", "gate", "1000"), Key("red", "hill", "2000")]
    text = "first\n" * 10 + "a\u2028b\n" + "last"
    hidden = hide(text, keys, [0.0, 0.5, 1.0])
    assert hidden.startswith(key_line(keys[0]) + "\nfirst")
    assert hidden.endswith("last\n" + key_line(keys[2]) + "\n")
    for key in keys:
        assert hidden.count(key_line(key)) == 1
        hidden = hidden.replace(key_line(key) + "\n", "")
    assert hidden == text + "\n"


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(tokenizer, corpus, call, message):
    tiny.refused(message, call, tokenizer, corpus)


def test_tokenizers_that_put_a_space_before_a_text(text):
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([*parts])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator([text], trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    builder = SequenceBuilder(tokenizer, encode_corpus([text], tokenizer), load_words().trained, 1024)
    decoded = tokenizer.decode(builder.passkeys(np.random.default_rng(0), 3, "question").input_ids)
    assert len(LINE.findall(decoded)) == len(QUESTION.findall(decoded)) == 3


@pytest.fixture(scope="module")
def varied_builder():
    _, tokenizer = condense.demo_model()
    text = condense.demo.demo_text().text
    return SequenceBuilder(tokenizer, encode_corpus([text], tokenizer), WORDS, 1024), tokenizer


@pytest.mark.parametrize("count", [1, 8, 72])
def test_names_differ_and_share_words(count):
    keys = draw_keys(np.random.default_rng(0), WORDS, count, shared=True)
    assert len({(key.first, key.second) for key in keys}) == len({key.number for key in keys}) == count
    assert not {key.first for key in keys} & {key.second for key in keys}
    if count > 1:
        uses = Counter(word for key in keys for word in (key.first, key.second))
        # each of the at most 2 * ceil(sqrt(2 * count)) words names sqrt(count / 2) keys in the mean
        assert sum(n > 1 for n in uses.values()) > len(uses) / 2


@pytest.mark.parametrize("form", ["cloze", "question"])
def test_numbers_stand_between_words_and_are_answered(varied_builder, form):
    sequences, tokenizer = varied_builder
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
def test_a_number_opens_the_text(varied_builder, anywhere):
    sequences, tokenizer = varied_builder
    for seed in range(4):
        task = sequences.passkeys(np.random.default_rng(seed), 6, "cloze", anywhere=anywhere, opening=True)
        (first,) = [key for key, depth in zip(task.keys, task.depths, strict=True) if depth == min(task.depths)]
        text = tokenizer.decode(task.input_ids, skip_special_tokens=True).lstrip()
        assert text.startswith(f"The number of the {first.first} {first.second} is {first.number}.")
        assert len(task.keys) == 6


@pytest.mark.parametrize("size", [300, 700])
def test_a_task_ends_early_and_other_text_follows(varied_builder, size):
    sequences, tokenizer = varied_builder
    task = sequences.passkeys(np.random.default_rng(0), 4, "question", size=size)
    assert len(task.input_ids) == 1024
    assert tokenizer.decode(task.input_ids[max(stop for _, stop in task.answers) : size]) == ".\n"
    rest = tokenizer.decode(task.input_ids[size:])
    assert not [key for key in task.keys if f"{key.first} {key.second}" in rest]
