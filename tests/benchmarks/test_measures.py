"""Retrieval and losses on text, as the benchmarks measure them, and cells of `benchmarks/generate.py`."""

import dataclasses
import math
from functools import partial

import generate
import numpy as np
import pytest
import reread
import torch
from generate import Cell
from models import tiny
from retrieval import retrieval
from small_models import tiny_llama
from speed.budget import Verdict
from text_loss import text_loss, text_sequences

import condense
from condense.evaluate.intervals import Proportion
from condense.evaluate.verify_texts import passkey_sequences
from condense.tasks import SequenceBuilder, load_words

METHODS = {
    "dense": condense.Dense(),
    "condensed": condense.CCA(group_size=8, window=32, summary="streaming", key_pooling="select"),
    "window": condense.StreamingLLM(sink=4, window=60),
}
BAD = [
    (lambda m, s: retrieval(m, {}, s), "methods: wanted methods and sequences, got 0 and 1"),
    (lambda m, s: retrieval(m, METHODS, s, decoding="guess"), "decoding"),
    (lambda m, s: text_loss(m, METHODS, []), "methods: wanted methods and sequences"),
    (lambda m, s: text_loss(m, METHODS, [np.zeros(8), np.zeros(9)]), r"sequences: wanted one length, got \[8, 9\]"),
    (lambda m, s: text_loss(m, METHODS, [np.zeros(8)], edges=(0, 8)), "edges: wanted ascending positions below 8"),
]


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_llama(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=1, initializer_range=0.3)


@pytest.fixture(scope="module")
def builder(tokenizer, corpus):
    return SequenceBuilder(tokenizer, corpus, load_words().held_out, 512)


def _half_answered_by(model, sequence):
    """The sequence with every second answer replaced by what the model itself would write."""
    ids = torch.from_numpy(sequence.input_ids.copy())[None]
    for start, stop in sequence.answers[::2]:
        ids[:, start:stop] = model.generate(ids[:, :start], max_new_tokens=stop - start, do_sample=False)[:, start:]
    return dataclasses.replace(sequence, input_ids=ids[0].numpy())


@pytest.mark.parametrize("name", METHODS)
def test_one_forward_equals_greedy_generation(model, builder, name):
    with condense.use(model, METHODS[name]):
        # An untrained model answers nothing: let some answers be its own, so that both outcomes occur.
        sequences = [_half_answered_by(model, each) for each in passkey_sequences(builder, 2, keys=4, form="cloze")]
    for sequence in sequences:
        read = partial(retrieval, model, {name: METHODS[name]}, [sequence])
        forced, generated = (read(decoding=how)[0].exact for how in ("forced", "generate"))
        assert forced == generated
        assert 0 < forced.right < forced.total == 4


def test_results_say_which_method_and_where_of_what_a_seed_asks(model, builder):
    sequences = passkey_sequences(builder, 3, keys=4, form="question", seed=2)
    results = retrieval(model, METHODS, sequences, depths=4)
    assert {result.name: result.method for result in results} == METHODS
    assert {(result.exact.total, sum(part.total for part in result.by_depth)) for result in results} == {(12, 12)}
    assert model.config._attn_implementation == "sdpa"
    # the same seed asks the same
    first, again, other = (passkey_sequences(builder, 2, keys=3, seed=seed) for seed in (0, 0, 1))
    for one, same in zip(first, again, strict=True):
        np.testing.assert_equal(dataclasses.asdict(one), dataclasses.asdict(same))
    assert [sequence.keys for sequence in first] != [sequence.keys for sequence in other]
    assert {word for s in first for key in s.keys for word in (key.first, key.second)} <= set(load_words().held_out)


def test_text_loss_is_the_models_own(model, builder):
    sequences = text_sequences(builder, 3)
    dense, condensed, _ = text_loss(model, METHODS, sequences, edges=(0, 16, 40))
    ids = torch.from_numpy(np.stack(sequences))
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
    assert math.isclose(dense.loss, expected, rel_tol=1e-5)
    assert dense.tokens == 3 * 511
    assert [(part.start, part.stop) for part in dense.by_position] == [(0, 16), (16, 40), (40, 512)]
    mean = np.average([part.loss for part in dense.by_position], weights=(15, 24, 472))
    assert math.isclose(mean, dense.loss, rel_tol=1e-9)
    # Nothing is condensed before window + group tokens have been read.
    assert math.isclose(condensed.by_position[0].loss, dense.by_position[0].loss, rel_tol=1e-6)
    assert not math.isclose(condensed.by_position[2].loss, dense.by_position[2].loss, rel_tol=1e-6)


@pytest.mark.parametrize("judge", [retrieval, partial(text_loss, edges=(0,))], ids=["retrieval", "text_loss"])
def test_training_goes_on_in_the_mode_it_was_in(model, builder, judge, monkeypatch):
    sequences = passkey_sequences(builder, 1, keys=2) if judge is retrieval else text_sequences(builder, 1)
    frozen = model.model.layers[0]  # a part that its owner keeps without dropout
    model.train()
    frozen.eval()
    before = [module.training for module in model.modules()]
    forward, modes = model.forward, []
    monkeypatch.setattr(model, "forward", lambda **inputs: modes.append(model.training) or forward(**inputs))
    judge(model, METHODS, sequences)
    assert modes == [False] * len(METHODS)
    assert [module.training for module in model.modules()] == before
    monkeypatch.setattr(model, "forward", lambda **inputs: pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        judge(model, METHODS, sequences)
    assert [module.training for module in model.modules()] == before
    model.eval()


def test_wilson_interval():
    # Values of the closed formula, as printed in statistics tables.
    interval = Proportion.of([True] * 81 + [False] * 182)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    assert Proportion.of([True] * 20).low == pytest.approx(0.8389, abs=1e-4)
    assert Proportion.of([]).high == 1.0
    assert math.isnan(Proportion.of([]).share)


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(model, builder, call, message):
    tiny.refused(message, call, model, passkey_sequences(builder, 1, keys=2))


def test_a_cell_is_tokens_rows_chunk_and_attention():
    assert Cell.parse("131072=dense") == (131072, 1, 0, "dense")
    assert Cell.parse("4096x8/1024=recall:store=host") == (4096, 8, 1024, "recall:store=host")
    assert Cell.parse("4096=recall-host").method == condense.Method.parse("recall-host")
    for text in ("dense", "4096", "4096x=dense", "4096=nope"):
        tiny.refused("must be", Cell.parse, text)


def test_figures_are_of_the_named_method_and_what_does_not_agree_is_not_timed(monkeypatch):
    model, cells = tiny.model("llama"), [Cell.parse(f"60={name}") for name in ("dense", "cca:group_size=4,window=8")]
    assert [generate.wrong(model, cell) for cell in cells] == [None, None]
    dense, cca = (generate.measured(model, cell, 4) for cell in cells)
    assert len(cca["steps_ms"]) == 4
    assert cca["device_cache_bytes"] < dense["device_cache_bytes"]
    assert not condense.models.condensed_layers(model)
    monkeypatch.setattr(generate.ModelGate, "check", lambda *args: Verdict(3.0))
    assert generate.wrong(model, cells[1]) == "wrong: logits 3 times the bound apart, not timed"


def test_shares_of_a_prompt_are_compared_with_all_of_it():
    arms, whole = reread.arms(4096), condense.Method.parse("recall-device")
    kept = [arms[f"keep {share}%"] for share in (25, 50, 75)]
    assert arms["recall-device"] == whole
    assert kept == [whole.replace(prompt="exact", keep=share) for share in (0.25, 0.5, 0.75)]
