"""Whole models: figures, the gate, and what happens to what is wrong or cannot run."""

from types import SimpleNamespace

import pytest
import torch
from models import tiny
from small_models import tiny_llama
from speed import model_gate, runners
from speed.model import ModelPlan, bench_model
from speed.model_gate import ModelGate
from speed.model_shapes import random_model, ready
from transformers import GenerationConfig

import condense

LCA = condense.LCA(group_size=4, window=8, rep_bias="log_size")
METHODS = {"cca": condense.CCA(group_size=4, window=8), "lca": LCA}
# every method of the package, and DGA on whole prompts
ALL = {
    "dense": condense.Dense(), "cca": METHODS["cca"], "lca": METHODS["lca"],
    "streaming_llm": condense.StreamingLLM(sink=2, window=8), "lm_infinite": condense.LMInfinite(n_global=2, window=8),
    "dga": condense.DGA(group_size=4, window=8),
    "dga_prompt": condense.DGA(group_size=4, window=8, min_focal=10, selection="prompt"),
    "recall": condense.Recall(group_size=4, window=8, num_recall=2),
}  # fmt: skip
PUBLISHED = [  # as published with the models
    *(("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-2-7b", 6.74), ("qwen3-8b", 8.19)),
    *(("qwen2.5-7b", 7.62), ("gemma-3-12b", 11.77), ("deepseek-v2-lite", 15.7), ("minicpm3-4b", 4.07)),
]


def run(model, lengths, methods, runners, steps=2, **options):
    return bench_model(model, ModelPlan(lengths, methods, runners, steps, repeats=1, **options))


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    # weights so large that attention has a say in the logits
    return ready(tiny_llama(**sizes, initializer_range=0.4))


@pytest.mark.parametrize("chunk", [None, 7])
def test_every_row_has_its_figures(model, chunk):
    plan = ModelPlan((40, 60), METHODS, ("dense", "condensed"), steps=3, prefill_chunk=chunk)
    seen = []
    content = bench_model(model, plan, on_row=seen.append)
    assert len(content["rows"]) == len(seen) == 2 * len(plan.cases()) == 6
    for row in content["rows"]:
        assert row["first"]["median_ms"] > 0
        assert row["first"]["runs"] == 5
        assert row["step"]["runs"] == 3 * row["first"]["runs"]
        if row["condensed"]:
            assert row["gate"]["passed"] is True
            assert row["speedup"]["first"].keys() == row["speedup"]["step"].keys() == {"dense"}
    assert content["parameters"] == sum(p.numel() for p in model.parameters())
    assert not condense.models.condensed_layers(model)


def test_the_models_own_settings_of_generation_do_not_count(model, monkeypatch):
    ends = {"eos_token_id": list(range(model.config.vocab_size)), "stop_strings": ["a"], "max_time": 1e-6}
    own = GenerationConfig(**ends, do_sample=True, num_beams=4)
    monkeypatch.setattr(model, "generation_config", own)
    reading = runners.read_by_loop(model, torch.arange(20)[None], 16, None)
    assert len(reading.steps_s) == 16
    assert model.generation_config is own


def test_feed_forward_can_be_compiled_for_all_runners(model, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    content = run(model, (40,), METHODS, ("dense",), compile_feed_forward=True)
    assert content["compile_feed_forward"] is True
    assert compiled == [(layer.mlp, {"dynamic": True}) for layer in model.model.layers]


def test_every_method_runs_in_every_runner(model):
    runners = ("dense", "dense_graph", "condensed", "condensed_graph", "condensed_growing")
    rows = run(model, (40,), ALL, runners, steps=3)["rows"]
    assert len(rows) == 2 + 3 * len(ALL)
    for row in rows:
        # what cannot run says why
        if row["runner"] != "condensed_graph dga_prompt" or "error" not in row:
            assert row["first"]["median_ms"] > 0, row
        else:
            assert "selection='prompt'" in row["error"]


def test_experts_are_named_and_pieces_are_nothing_for_a_method_that_looks_ahead():
    experts = {key: value for key, value in tiny.EXPERTS.items() if key != "experts_implementation"}
    model = ready(tiny.model("deepseek_v2", torch.float32, **experts))
    methods = {"lca": LCA, "ahead": LCA.replace(summary="prompt")}
    content = run(model, (40,), methods, ("dense", "condensed"), steps=2, prefill_chunk=20)
    *errors, ahead = (row.get("error") for row in content["rows"])
    assert errors == [None, None]
    assert "needs the whole prompt in one forward" in ahead
    assert ModelGate(model, methods["ahead"], 0).check(None) is None  # which has no gate
    assert content["experts"] == model.config._experts_implementation


def test_cache_bytes_are_those_of_a_cache_that_read_as_much(model):
    content = run(model, (60,), METHODS, ("dense", "condensed"), steps=3)
    # the last of the new tokens is not read
    dense = 2 * 2 * 2 * 8 * 4 * (60 + 3)
    assert content["rows"][0]["cache_bytes"] == dense
    assert [row["host_bytes"] for row in content["rows"]] == [0] * len(content["rows"])  # all on one device
    for row, method in zip(content["rows"][1:], METHODS.values(), strict=True):
        with condense.use(model, method), torch.no_grad():
            cache = model(torch.arange(63)[None], use_cache=True).past_key_values
        assert row["cache_bytes"] == condense.cache_nbytes(cache) < dense


def test_a_model_that_says_something_else_in_pieces_is_not_timed(model, monkeypatch):
    stock = condense.caches.CondensedLayer.read

    def forgetful(self, k, v, request):
        if self.state is not None and self.state.entries[0].shape[2] > 0:
            keys, values = self.state.entries
            self.state = self.state._replace(entries=(keys, values.roll(1, 2)))
        return stock(self, k, v, request)

    monkeypatch.setattr(condense.caches.CondensedLayer, "read", forgetful)
    content = run(model, (40,), METHODS, ("dense", "condensed"), steps=2)
    dense, *condensed = content["rows"]
    assert "error" not in dense
    assert all(row["error"].startswith("wrong: logits") and "first" not in row for row in condensed)


class ForgetfulDecoder(condense.GraphDecoder):
    def prefill(self, ids, *args, **options):
        return super().prefill(ids[:, 1:] if ids.shape[1] > 1 else ids, *args, **options)


@pytest.mark.parametrize("decoder", [condense.GraphDecoder, ForgetfulDecoder])
def test_a_graph_decoder_is_held_to_the_eager_loop(model, monkeypatch, decoder):
    for module in (runners, model_gate):
        monkeypatch.setattr(module, "GraphDecoder", decoder)
    for row in run(model, (40,), METHODS, ("dense_graph", "condensed_graph"), prefill_chunk=9)["rows"]:
        assert row.get("error", "").startswith("wrong: logits") is (decoder is ForgetfulDecoder)
        assert ("first" in row) is (decoder is condense.GraphDecoder)


def test_an_error_stands_in_its_row(model, monkeypatch):
    def broken(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    stock = SimpleNamespace(description="stock", compile=None, read=broken)
    monkeypatch.setitem(runners.RUNNERS, "dense", stock)
    dense, condensed = run(model, (40,), {"cca": METHODS["cca"]}, ("dense", "condensed"), steps=2)["rows"]
    assert dense["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert condensed["speedup"] == {"first": {}, "step": {}}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    model = random_model(name, dtype=torch.bfloat16, device=torch.device("meta"))
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(billions * 1e9, rel=2e-3)
    one = random_model(name, num_layers=1, dtype=torch.bfloat16, device=torch.device("meta"))
    assert sum(p.numel() for p in one.parameters()) < count / 3
