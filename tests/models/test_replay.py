"""Plain generate over replayed steps: a static cache chosen by itself, the growing cache's tokens, one capture."""

import contextlib
from unittest.mock import Mock

import pytest
import torch
from models import small, test_laws, tiny
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache, StaticCache
from transformers.generation.utils import DeferredStopCheck
from transformers.modeling_outputs import CausalLMOutputWithPast

import condense
from condense.caches import CACHE
from condense.models import hooks, replay
from condense.models.families import has_eager_experts
from condense.models.replay import CacheOfOneCall, ReplayedForward

ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26)]
IDS, MASK = tiny.left_padded(ROWS)
EXPERTS = [("gpt_oss", "batched_mm"), *((name, "eager") for name in ("llama4_text", "dbrx", "gpt_oss", "llama"))]
SETTINGS = {"attention_mask": MASK, "max_new_tokens": tiny.NEW, "do_sample": False, "pad_token_id": 1}
MODES = {name: test_laws.MODES[name] for name in ("greedy", "sampling", "three-samples", "chunks", "token-by-token")}
MODES["logits-processor"] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
CALLS = {name: (tiny.CCA, mode) for name, mode in MODES.items()} | {"select": (tiny.SELECT, {})}
CALLS |= {name: (tiny.METHODS[name], {}) for name in ("streaming-select-log", "dga")}
HYBRIDS = dict.fromkeys(("qwen3_next", "lfm2", "nemotron_h", "gpt_oss", "llama4_text"), tiny.CCA)
HYBRIDS["kimi_linear"] = condense.LCA(group_size=4, window=8)
EAGER = {
    "beams": {"num_beams": 2}, "growing": {"cache_implementation": "dynamic"},
    "returned": {"return_dict_in_generate": True}, "given": {CACHE: DynamicCache},
    "not-compiled": {"disable_compile": True},
}  # fmt: skip
BOTH = {"cca": tiny.CCA, "recall": condense.Recall(group_size=4, window=8, num_recall=2)}


class _Recorded(TorchDispatchMode):
    """Operations of a step in place of a CUDA graph, on the tensors that it had then, without Python. Numbers on the
    host stand still, a tensor that a step would exchange for another is read as it was, and the host may read no single
    number; that it may not count or copy results either is seen on a GPU alone.
    """

    def __init__(self, forward, cache, inputs):
        super().__init__()
        self.forward, self.cache, self.calls = forward, cache, []
        state = [x for layer in cache.layers for x in tree_leaves(vars(layer)) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in state]
        with self:
            self.logits = forward._forward(cache, inputs).logits
        for x, old in zip(state, before, strict=True):  # a capture computes nothing
            x.copy_(old)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.data_dependent_output not in func.tags, func
        self.calls.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.calls[-1][-1]

    def replay(self):
        made = {}
        for func, args, kwargs, outs in self.calls:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: made.get(id(x), x), (args, kwargs))
            made.update(zip(map(id, tree_leaves(outs)), tree_leaves(func(*args, **kwargs)), strict=True))
        self.forward._output = CausalLMOutputWithPast(logits=made[id(self.logits)], **{CACHE: self.cache})


@pytest.fixture
def captured(monkeypatch):
    """As if the model were on a GPU; the caches that steps were captured over."""
    monkeypatch.setattr(torch, "Event", Mock())  # on a CPU all is done at once
    caches = []

    def capture(self, cache, inputs):
        caches.append(cache)
        return _Recorded(self, cache, inputs)

    monkeypatch.setattr(ReplayedForward, "_capture", capture)
    for module in (hooks, replay):
        monkeypatch.setattr(module, "can_replay", lambda model: True)
    return caches


def _model(monkeypatch, method=tiny.CCA, stock=None):
    model = condense.apply(tiny.model("llama", num_hidden_layers=2) if stock is None else stock, method)
    compilable = type(model)._valid_auto_compile_criteria

    def criteria(self, model_kwargs, generation_config):
        """As on CUDA: static caches are compiled unless the caller says no."""
        if generation_config.disable_compile:
            return compilable(self, model_kwargs, generation_config)
        return isinstance(model_kwargs[CACHE], StaticCache)

    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", criteria)
    return model


def _generate(model, **settings):
    torch.manual_seed(3)
    return model.generate(**{"inputs": IDS} | SETTINGS | settings)


@pytest.mark.parametrize(("method", "mode"), CALLS.values(), ids=CALLS)
def test_tokens_are_those_of_the_growing_cache(captured, monkeypatch, method, mode):
    model = _model(monkeypatch, method)
    want = _generate(model, cache_implementation="dynamic", **mode)
    assert not captured
    for calls in (1,) if mode else (1, 2):
        assert torch.equal(_generate(model, **mode), want)
        assert len(set(map(id, captured))) == calls
    assert type(captured[0]) is CacheOfOneCall


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_rows_that_have_ended_are_passed_over(captured, monkeypatch, method):
    model = _model(monkeypatch, method)
    free = _generate(model, cache_implementation="dynamic")[:, IDS.shape[1] :]
    # a token that the first row writes early and the second does not
    end = next(int(x) for x in free[0, 2:5] if x not in free[1])
    at = int((free[0] == end).nonzero()[0])
    want = _generate(model, cache_implementation="dynamic", eos_token_id=end)
    assert torch.equal(_generate(model, eos_token_id=end), want)
    seen = {tuple(layer.buffers.seen.tolist()) for layer in captured[0].layers}
    assert seen == {(len(ROWS[0]) + at, len(ROWS[1]) + tiny.NEW - 1)}


def test_the_host_looks_one_step_late_whether_a_text_has_ended(captured, monkeypatch):
    """So the next step is queued before; its token is neither returned nor streamed."""
    model, steps, call = _model(monkeypatch), [], ReplayedForward.__call__
    monkeypatch.setattr(ReplayedForward, "__call__", lambda *of, **inputs: steps.append(inputs) or call(*of, **inputs))

    def generated(**settings):
        streamed = []
        streamer = Mock(put=lambda tokens: streamed.extend(tokens.flatten().tolist()))
        out = _generate(model, inputs=IDS[1:], attention_mask=MASK[1:], streamer=streamer, **settings)
        assert streamed == out[0].tolist()
        return out

    free = generated(cache_implementation="dynamic")[0, IDS.shape[1] :].tolist()
    at = next(i for i in range(3, len(free)) if free[i] not in free[:i])
    want = generated(cache_implementation="dynamic", eos_token_id=free[at])
    assert not steps
    assert torch.equal(generated(eos_token_id=free[at]), want)
    assert len(steps) == at + 1  # the prompt's forward gives the first token


@pytest.mark.parametrize(
    ("device", "cache", "is_assistant", "is_late"),
    [
        ("cuda:1", CacheOfOneCall, False, True), ("cuda:0", CacheOfOneCall, False, False),
        ("cuda:1", CacheOfOneCall, True, False), ("cuda:1", StaticCache, False, False),
    ],
)  # fmt: skip
def test_the_host_looks_late_on_the_current_device_alone(monkeypatch, device, cache, is_assistant, is_late):
    """On another one it would wait for an event of the wrong device: for nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    cache = cache(tiny.config("llama"), 40)
    late = DeferredStopCheck.is_supported(torch.device(device), cache, False, is_assistant=is_assistant)
    assert late is is_late


@pytest.mark.parametrize("chunk", [1, 5])
def test_end_tokens_of_a_prompt_end_nothing(captured, monkeypatch, chunk):
    model = _model(monkeypatch)
    end = int(IDS[0, 20])
    assert end in IDS[1, -20:]
    want = _generate(model, cache_implementation="dynamic", eos_token_id=end)
    assert torch.equal(_generate(model, eos_token_id=end, prefill_chunk_size=chunk), want)


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_other_kinds_keep_their_state_where_it_is(captured, monkeypatch, name):
    stock = small.model(name)
    stock.set_experts_implementation("batched_mm")
    model = _model(monkeypatch, HYBRIDS[name], stock)
    logits = []

    def record(ids, scores):
        logits.append(scores.clone())
        return scores

    settings = {"logits_processor": [record], "eos_token_id": small.VOCAB}  # with an end that no row reaches
    want = _generate(model, cache_implementation="dynamic", **settings)
    assert not captured
    assert torch.equal(_generate(model, **settings), want)
    assert len(captured) == (name not in small.NO_STATIC_MASKS)
    growing, replayed = torch.stack(logits).chunk(2)
    torch.testing.assert_close(replayed, growing, rtol=0, atol=5e-6)  # linear attention of stock models is float32


@pytest.mark.parametrize("settings", EAGER.values(), ids=EAGER)
def test_what_the_caller_chose_stays(captured, monkeypatch, settings):
    model = _model(monkeypatch)
    settings = {key: x() if x is DynamicCache else x for key, x in settings.items()}
    out = _generate(model, **settings)
    assert not captured
    if settings.get("return_dict_in_generate"):
        assert type(out[CACHE]) is DynamicCache
    _generate(condense.restore(model))  # stock models keep their cache
    assert not captured


@torch.no_grad()
def test_other_arguments_are_captured_anew(captured, monkeypatch):
    """Another mask length, or other keywords, than those of the step before run as they are."""
    model = _model(monkeypatch)
    forward, cache = ReplayedForward(model), StaticCache(config=model.config, max_cache_len=64)
    tokens = model(IDS, past_key_values=cache).logits[:, -1:].argmax(-1)
    for keywords, expected in (({}, 0), ({}, 1), ({"use_cache": True}, 1), ({"use_cache": True}, 2)):
        forward(input_ids=tokens, **{CACHE: cache}, **keywords)
        assert len(captured) == expected


@pytest.mark.parametrize(("name", "experts"), EXPERTS)
def test_experts_that_wait_are_known(name, experts):
    model = small.model(name)
    model.set_experts_implementation(experts)
    waits, ids = pytest.raises((DataDependentOutputException, DynamicOutputShapeException)), tiny.tokens(1, 2)
    with FakeTensorMode(allow_non_fake_inputs=True), waits if has_eager_experts(model) else contextlib.nullcontext():
        tiny.logits(model, ids)


def test_a_compiled_forward_is_left_alone(monkeypatch):
    model = _model(monkeypatch)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert replay.can_replay(model)
    model.forward = torch.compile(model.forward)
    assert not replay.can_replay(model)
