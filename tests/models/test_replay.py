"""Plain generate over replayed steps: a static cache chosen by itself, the growing cache's tokens, one capture."""

import pytest
import torch
from models import tiny
from transformers import DynamicCache, StaticCache

import condense
from condense.models import hooks, replay
from condense.models.replay import ReplayedForward

ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26)]
IDS, MASK = tiny.left_padded(ROWS)
SETTINGS = {"attention_mask": MASK, "max_new_tokens": tiny.NEW, "do_sample": False, "pad_token_id": 1}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 7},
    "token-by-token": {"prefill_chunk_size": 1},
    "logits-processor": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}
EAGER = {
    "beams": {"num_beams": 2},
    "growing": {"cache_implementation": "dynamic"},
    "returned": {"return_dict_in_generate": True},
    "given": {"past_key_values": DynamicCache},
    "not-compiled": {"disable_compile": True},
}


class _Recorded:
    """In place of a CUDA graph, without a GPU: a replay runs the forward again on the tensors held."""

    def __init__(self, forward, cache, inputs):
        self.forward, self.cache, self.inputs = forward, cache, inputs

    def replay(self):
        self.forward._output = self.forward._model(past_key_values=self.cache, **self.inputs)


@pytest.fixture
def captured(monkeypatch):
    """As if the model were on a GPU; the caches that steps were captured over."""
    caches = []

    def capture(self, cache, inputs):
        caches.append(cache)
        return _Recorded(self, cache, inputs)

    monkeypatch.setattr(ReplayedForward, "_capture", capture)
    for module in (hooks, replay):
        monkeypatch.setattr(module, "can_replay", lambda model: True)
    return caches


def _model(monkeypatch, method=tiny.CCA, name="llama"):
    model = condense.apply(tiny.model(name), method)
    compilable = type(model)._valid_auto_compile_criteria

    def criteria(self, model_kwargs, generation_config):
        """As on CUDA: static caches are compiled unless the caller says no."""
        if generation_config.disable_compile:
            return compilable(self, model_kwargs, generation_config)
        return isinstance(model_kwargs["past_key_values"], StaticCache)

    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", criteria)
    return model


def _generate(model, **settings):
    torch.manual_seed(3)
    return model.generate(IDS, **SETTINGS | settings)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens_are_those_of_the_growing_cache(captured, monkeypatch, mode):
    model = _model(monkeypatch)
    want = _generate(model, cache_implementation="dynamic", **mode)
    assert not captured
    assert torch.equal(_generate(model, **mode), want)
    assert len(set(map(id, captured))) == 1
    assert type(captured[0]) is StaticCache


@pytest.mark.parametrize("method", ["streaming-select-log", "dga", "select"])
def test_every_call_has_a_cache_of_its_own(captured, monkeypatch, method):
    model = _model(monkeypatch, {**tiny.METHODS, "select": tiny.SELECT}[method])
    want = _generate(model, cache_implementation="dynamic")
    for _ in range(2):
        assert torch.equal(_generate(model), want)
    assert len(set(map(id, captured))) == 2


@pytest.mark.parametrize("settings", EAGER.values(), ids=EAGER)
def test_what_the_caller_chose_stays(captured, monkeypatch, settings):
    model = _model(monkeypatch)
    settings = {key: x() if x is DynamicCache else x for key, x in settings.items()}
    out = _generate(model, **settings)
    assert not captured
    if settings.get("return_dict_in_generate"):
        assert type(out.past_key_values) is DynamicCache


def test_stock_models_keep_their_cache(captured, monkeypatch):
    _generate(condense.restore(_model(monkeypatch)))
    assert not captured


def test_other_arguments_are_captured_anew(captured, monkeypatch):
    """Another mask length, or other keywords, than those of the step before run as they are."""
    model = _model(monkeypatch)
    forward, cache = ReplayedForward(model), StaticCache(config=model.config, max_cache_len=64)
    out = model(IDS, past_key_values=cache)
    tokens = out.logits[:, -1:].argmax(-1)
    for keywords, expected in (({}, 0), ({}, 1), ({"use_cache": True}, 1), ({"use_cache": True}, 2)):
        forward(input_ids=tokens, past_key_values=cache, **keywords)
        assert len(captured) == expected


def test_a_compiled_forward_is_left_alone(monkeypatch):
    model = _model(monkeypatch)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert replay.can_replay(model)
    model.forward = torch.compile(model.forward)
    assert not replay.can_replay(model)
