"""`compare` beyond the bundled model: choices by layer, tokenizers and configurations that lack things."""

import copy
import re

import pytest
import torch
from models import tiny
from small_models import tiny_llama

import condense
from condense.caches.ring import room_for
from condense.cli.compare import _print
from condense.evaluate.compare import Prompt, compare
from condense.models import condensed_layers

# caches are given by the name of the installed transformers
pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
PROMPT = Prompt("The harbour lay quiet under the moon.\n" * 8, ["Who goes there?"])
POOLED = condense.CCA(group_size=4, window=8)


@pytest.fixture
def model():
    return tiny_llama(vocab_size=400, eos_token_id=None)


def test_layers_that_are_left_out_are_stock_and_what_cannot_be_compared_is_refused(model, tokenizer):
    choices = [condense.Dense(), {1: POOLED}, {0: POOLED, 1: POOLED}, POOLED]
    outcomes = compare(model, tokenizer, choices, PROMPT, max_new_tokens=2)
    assert [outcome.method for outcome in outcomes] == choices
    dense, half, both, method = (outcome.cache_bytes for outcome in outcomes)
    assert both == method
    assert half == (dense + both) / 2
    assert not condensed_layers(model)
    for choice, prompt, new, message in (
        ({2: POOLED}, PROMPT, 2, "layers must be indices from 0 to 1, got 2"),
        (POOLED, PROMPT, 1.5, "max_new_tokens must be an integer >= 1"),
        (POOLED, Prompt("A text", ["a", "b"], ["1"]), 2, "expected must hold one answer per question"),
    ):
        tiny.refused(message, compare, model, tokenizer, [choice], prompt, max_new_tokens=new)
    condense.apply(model, POOLED)
    tiny.refused(r"call condense.restore\(model\) first", compare, model, tokenizer, [condense.Dense()], PROMPT)


def test_a_layer_with_a_sliding_window_counts_with_its_window(tokenizer):
    model = tiny.model("qwen2-mixed", torch.float32, vocab_size=400, max_window_layers=2)  # one sliding layer of three
    (dense,) = compare(model, tokenizer, [condense.Dense()], PROMPT, max_new_tokens=1)
    of_a_token = 2 * 2 * 8 * 4  # keys and values of two heads, 8 wide, in float32
    # the window's keys and the token read last; a layer's counter
    assert 0 <= dense.cache_bytes - 2 * of_a_token * (dense.text_tokens + 1) <= of_a_token * 13 + 8


def test_what_is_for_host_memory_does_not_count_as_the_devices(model, tokenizer, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    prompt = Prompt("The harbour lay quiet under the moon.\n" * 40)
    here = condense.Recall(group_size=4, window=8, unchosen="drop")
    there = here.replace(store="host", slots=0)
    recalled, dense, host = outcomes = compare(model, tokenizer, [here, condense.Dense(), there], prompt)
    groups = (dense.text_tokens + 1 - 8) // 4
    room = room_for(groups)
    assert (recalled.host_bytes, dense.host_bytes) == (0, 0)
    assert host.host_bytes == room * 4 * 2 * 16 * 4  # tokens of the second layer, keys and values in float32
    assert recalled.device_bytes > dense.device_bytes > 4 * host.device_bytes / 3
    _print(prompt, outcomes, "float32", on_cpu=True)
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert any(re.search(r"the device +Dense +memory", line) for line in lines)  # which percentages are of
    (line,) = (line for line in lines if line.startswith(" Recall 2 "))
    *_, device, share, held = re.split(r" {2,}", line.strip())
    assert device == f"{host.device_bytes / 2**20:.2f} MiB"
    assert share == f"{host.device_bytes / dense.device_bytes:.1%}"
    assert held == f"{host.host_bytes / 2**20:.2f} MiB"
    assert shown.count("Recall is slow on a CPU") == 1
    _print(prompt, [dense], "float32", on_cpu=True)
    _print(prompt, outcomes, "float32", on_cpu=False)
    assert "slow" not in capsys.readouterr().out


def test_without_pad_and_eos_and_with_other_settings_for_generate(model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    expected = compare(model, tokenizer, [POOLED], PROMPT, max_new_tokens=3)[0]
    tokenizer.pad_token = tokenizer.eos_token = None
    model.config.use_cache = False
    penalty = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "return_dict_in_generate": True}
    own = model.generation_config
    own.update(use_cache=False, num_beams=3, cache_implementation="static", **penalty)
    found = compare(model, tokenizer, [POOLED], PROMPT, max_new_tokens=3)[0]
    assert (found.answers, found.cache_bytes) == (expected.answers, expected.cache_bytes)
    assert found.token_s is not None
    assert model.generation_config is own
