"""Naming methods and the layers they are for; and the line that tells of pooling a model that was not adapted."""

import json
import logging
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from models import tiny
from small_models import random_llama
from transformers import AutoModelForCausalLM

import condense
from condense.cli.options import DEMO_METHOD
from condense.evaluate.compare import attention_of
from condense.methods import methods_in
from condense.models import adapted, condensed_layers

RECALL = tiny.RECALL
NAMED = {
    "indices": {0: RECALL, 1: tiny.CCA, 2: tiny.CCA}, "negative": {-3: RECALL, "-2--1": tiny.CCA},
    "rest": {0: RECALL, "rest": tiny.CCA}, "rest-first": {"rest": tiny.CCA, 0: RECALL},
    "text": {"0": RECALL, "1-2": tiny.CCA}, "open-range": {"1--1": tiny.CCA, "0": RECALL},
    "list": {(0,): RECALL, range(1, 3): tiny.CCA}, "empty-rest": {0: RECALL, "1,2": tiny.CCA, "rest": condense.Dense()},
    "dicts-and-text": {0: RECALL.to_dict(), "rest": "cca:group_size=4,window=8"},
    "one-text": "recall:group_size=4,window=8,num_recall=2@-3+cca:group_size=4,window=8@rest",
}  # fmt: skip
FILES = [
    ("no JSON", "wanted JSON, got "),
    ('{"layers": []}', 'must be {"methods": [{"method": {...}, "layers": [...]}, ...]}'),
    (f'{{"results": "{"word " * 99}"}}', "word word ..."),
    ('{"methods": [{"method": "cca", "layers": [0]}, {"method": "lca", "layers": [0]}]}', "layer 0 is named twice"),
    ('{"methods": [{"method": "mystery", "layers": [0]}]}', "method must be one of"),
]


@pytest.mark.parametrize("choice", NAMED.values(), ids=NAMED)
def test_ways_to_name_the_same_layers(choice):
    assert condensed_layers(condense.apply(tiny.model("llama"), choice)) == {0: RECALL, 1: tiny.CCA, 2: tiny.CCA}


def test_one_method_for_all_layers_opens_all_groups_in_the_first():
    """Of the layers that can be condensed; what is named by layer is taken as it is."""
    some = RECALL.replace(num_recall=0.5, store="host")
    first = some.replace(num_recall=1.0, store="device")
    assert condensed_layers(condense.apply(tiny.model("llama"), some)) == {0: first, 1: some, 2: some}
    assert condensed_layers(condense.apply(tiny.model("gemma2"), some)) == {1: first}
    more = some.replace(num_recall=1.0, min_recall=2 * some.min_recall, slots=2 * some.slots)
    assert condensed_layers(condense.apply(tiny.model("deepseek_v3"), some)) == {0: first, 1: more, 2: more}
    few = condensed_layers(condense.apply(tiny.model("deepseek_v3"), RECALL.replace(prompt="shared")))
    assert few[2] == RECALL.replace(num_recall=2 * RECALL.num_recall, min_recall=more.min_recall, prompt="exact")
    assert few[0].prompt == "exact"
    assert condensed_layers(condense.apply(tiny.model("llama"), {"rest": some})) == dict.fromkeys(range(3), some)


@pytest.mark.parametrize("choice", [tiny.CCA, {"rest": tiny.CCA}], ids=["all", "rest"])
def test_layers_that_stay_as_they_are_are_listed_with_the_reason(choice, caplog):
    model = tiny.model("qwen2-mixed")
    with caplog.at_level(logging.WARNING, "condense"):
        condense.apply(model, choice)
    assert condensed_layers(model) == {0: tiny.CCA}
    assert "layers [1, 2] have a sliding window and stay as they are" in caplog.text
    caplog.clear()
    with condense.use(model, tiny.STREAMING):  # every training step
        assert condensed_layers(model) == {0: tiny.STREAMING}
    assert not caplog.text
    condense.apply(tiny.model("llama"), {1: RECALL})
    assert "layers [0, 2] are not named and stay as they are" in caplog.text


BAD = {
    "twice": ({1: RECALL, "0-2": tiny.CCA}, f"layer 1 is named twice, for {RECALL} and {tiny.CCA}"),
    "too-low": ({"-4": RECALL}, "layers must be indices from 0 to 2, got -4"),
    "no-index": ({None: RECALL}, "layers must be named by an index, by several or as text, got None"),
    "none": ({}, "method must name at least one layer, got an empty mapping"),
    "no-method": ({0: None}, "method must be a condense method such as"),
    "text-of-several": ("recall@0+cca", "each of several must name its layers, got 'cca'; write cca@rest"),
    "no-file": ("@missing.json", "method: no such file: missing.json"),
    "text": ("cda", "method must be one of"),
}
LAYERS = {
    "too-high": ([0, 3], "layers must be indices from 0 to 2, got 3"),
    "negative": ([-4], "layers must be indices from 0 to 2, got -4"),
    "bool": ([True], "layers must be indices from 0 to 2, got True"),
    "text": ("first", "layers must look like 2-31 or 0,4-7, got 'first'"),
    "backwards": ("-1-1", "layers: a range must go from its lower to its higher end, got '-1-1'"),
    "empty": ([], "layers must name at least one layer, got none; leave it out to condense all"),
    "number": (1, "layers must be a list of layer indices, got 1"),
}
REFUSED = {name: ("llama", choice, None, said) for name, (choice, said) in BAD.items()} | {
    f"layers-{name}": ("llama", tiny.STREAMING, layers, said) for name, (layers, said) in LAYERS.items()
}
SLIDING = "has a sliding window and cannot be condensed; full are [0]"
REFUSED |= {
    "sliding": ("qwen2-mixed", {"0-1": RECALL}, None, f"layer 1 {SLIDING}"),
    "sliding-layers": ("qwen2-mixed", tiny.STREAMING, [0, 2], f"layer 2 {SLIDING}"),
    "latents": ("deepseek_v3", {0: RECALL, 1: tiny.SELECT}, None, "layer 1: DGA("),
    "beside": ("llama", {0: RECALL}, [0], "layers must be left out where method names them"),
}


@pytest.mark.parametrize(("name", "choice", "layers", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_choices_change_nothing(name, choice, layers, said):
    model = condense.apply(tiny.model(name), tiny.CCA, layers=[0])
    before, config = tiny.logits(model, tiny.tokens()), json.dumps(model.config.to_dict())
    for call in (condense.apply, tiny.enter):
        tiny.refused(re.escape(said), call, model, choice, layers=layers)
    assert condensed_layers(model) == {0: tiny.CCA}
    assert json.dumps(model.config.to_dict()) == config
    assert torch.equal(tiny.logits(model, tiny.tokens()), before)


@pytest.mark.parametrize(("content", "said"), FILES, ids=["json", "form", "cut", "twice", "method"])
def test_bad_files(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_text(content)
    tiny.refused(re.escape(said), condense.apply, tiny.model("llama"), f"@{path}")


@pytest.fixture
def told(caplog):
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=adapted.__name__):
        yield caplog
    logging.Logger.warning_once.cache_clear()


@pytest.mark.parametrize("method", [tiny.CCA, "pooled", "dga", "cca@0-1", {"rest": tiny.CCA}], ids=str)
def test_pooling_is_told_once_with_the_ways_out(method, told):
    condense.apply(random_llama(), method)
    tiny.enter(random_llama(), tiny.CCA)
    (line,) = told.messages
    assert "\n" not in line
    for way_out in ("'recall-host'", "'recall-device'", "condense train adapt", "model.config.condense_adapted = "):
        assert way_out in line


def test_nothing_is_told_of_what_keeps_tokens_or_was_chosen_by_layer_but_compare_and_generate_tell_it(told):
    for method in ("recall-device", "streaming_llm", "dense", {0: tiny.CCA, 1: tiny.CCA}, "pooled@1+recall@rest"):
        condense.apply(random_llama(), method)
    condense.apply(random_llama().train(), tiny.CCA)  # which is being adapted
    assert told.messages == []
    with attention_of(random_llama(), tiny.CCA):
        assert len(told.messages) == 1


def test_a_mark_in_the_configuration_is_kept_and_nothing_is_told(told, tmp_path):
    model = random_llama()
    with condense.use(model.train(), tiny.CCA):
        model.config.condense_adapted = model.config.condense
        model.save_pretrained(tmp_path)
    loaded = condense.restore(AutoModelForCausalLM.from_pretrained(tmp_path))
    condense.apply(loaded, tiny.CCA)
    assert methods_in(loaded.config.condense_adapted) == dict.fromkeys(range(2), tiny.CCA)
    assert told.messages == []


def test_the_bundled_model_is_small_and_stock_and_says_what_it_learned(told):
    assets = [path for path in Path(str(files("condense") / "assets")).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in assets) <= 24 * 2**20
    assert max(path.stat().st_size for path in assets) <= 16 * 2**20
    assert not [path for path in assets if path.suffix in {".bin", ".pt", ".pkl"}]
    model, tokenizer = condense.demo_model(dtype=torch.bfloat16)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert not hasattr(model.config, "condense")
    assert model.dtype == torch.bfloat16
    text = "It was 1871, at the café.\n\nTwo lines."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert methods_in(model.config.condense_adapted) == dict.fromkeys(range(8), condense.Method.parse(DEMO_METHOD))
    condense.apply(model, "cca")
    assert told.messages == []
