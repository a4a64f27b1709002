"""The line that a model is told when it is pooled and its configuration does not say that it was adapted."""

import logging

import pytest
from small_models import random_llama
from transformers import AutoModelForCausalLM

import condense
from condense.cli.options import DEMO_METHOD
from condense.evaluate.compare import attention_of
from condense.methods import methods_in
from condense.models import adapted

POOLING = condense.CCA(group_size=4, window=8)


@pytest.fixture
def told(caplog):
    """What is logged of it, in a process that has not said it yet."""
    adapted._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=adapted.__name__):
        yield caplog
    adapted._warn_once.cache_clear()


@pytest.mark.parametrize("method", [POOLING, "pooled", "dga", "cca@0-1", {"rest": POOLING}], ids=str)
def test_pooling_is_told_once_with_the_ways_out(method, told):
    model = random_llama()
    condense.apply(model, method)
    with condense.use(random_llama(), POOLING), attention_of(random_llama(), POOLING):
        pass
    (line,) = told.messages
    assert "\n" not in line
    for way_out in ("'recall-host'", "'recall-device'", "condense train adapt", "model.config.condense_adapted = "):
        assert way_out in line


def test_compare_and_generate_tell_it_too(told):
    with attention_of(random_llama(), POOLING):
        assert len(told.messages) == 1


def test_nothing_is_told_of_what_keeps_tokens_or_was_chosen_by_layer(told):
    for method in ("recall-device", "streaming_llm", "dense", {0: POOLING, 1: POOLING}, "pooled@1+recall@rest"):
        condense.apply(random_llama(), method)
    condense.apply(random_llama().train(), POOLING)  # which is being adapted
    assert told.messages == []


def test_a_mark_in_the_configuration_is_kept_and_nothing_is_told(told, tmp_path):
    model = random_llama()
    with condense.use(model.train(), POOLING):
        model.config.condense_adapted = model.config.condense
        model.save_pretrained(tmp_path)
    loaded = condense.restore(AutoModelForCausalLM.from_pretrained(tmp_path))
    condense.apply(loaded, POOLING)
    assert methods_in(loaded.config.condense_adapted) == dict.fromkeys(range(2), POOLING)
    assert told.messages == []


def test_the_bundled_model_says_what_it_learned(told):
    model, _ = condense.demo_model()
    assert methods_in(model.config.condense_adapted) == dict.fromkeys(range(8), condense.Method.parse(DEMO_METHOD))
    condense.apply(model, "cca")
    assert told.messages == []
