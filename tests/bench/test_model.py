"""Whole models: figures, the gate, what happens to what is wrong or cannot run; `python benchmarks/speed` on a CPU."""

import functools
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli import test_commands
from models import tiny
from small_models import tiny_llama
from speed import model_gate, runners, tasks
from speed.command import main
from speed.model import ModelPlan, bench_model
from speed.model_gate import ModelGate
from speed.model_shapes import random_model, ready
from transformers import GenerationConfig, LlamaForCausalLM

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
ran, refused, run_here = (
    functools.partial(each, entry=main) for each in (test_commands.ran, test_commands.refused, test_commands.run_here)
)
KERNEL = ("kernel", "--device", "cpu", "--shape", "4/2/16/16", "--budget", "0", "--method=cca:window=16")
BAD = [
    (("kernel", "--shape", "32/5"), "shape must be H/Hkv/D/Dv"),
    (("kernel", "--lengths", "0"), "lengths: wanted a number of tokens >= 1"),
    (("kernel", "--baselines", "fastest"), "baselines must be of cudnn"),
    (("kernel", "--decode-batches", "4,x"), "decode_batches must be numbers of rows >= 1"),
    (("kernel", "--backend", "torch,abacus"), "backend must be"),
    (("kernel", "--method=dga:selection=prompt", "--ops=decode", "--baselines=none"), "ops: none of decode"),
    (("kernel", "--results", "file"), "results: wanted a path that can be written"),
    (("model", "--shape", "llama-9"), "shape must be one of llama-3.1-8b"),
    (("model", "--runners", "fast"), "runners must be of dense"),
    (("model", "--shape", "llama-3.1-8b", "--model", "x"), "shape and model exclude each other"),
    (("model", "--layers", "2", "--model", "x"), "layers belongs to a shape"),
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
    assert len(runners.read_by_loop(model, torch.arange(20)[None], 16, None).steps_s) == 16
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
    assert [row for row in rows if "error" in row] == []
    assert len(rows) == 2 + 3 * len(ALL)


def test_experts_are_named_and_pieces_are_nothing_for_a_method_that_looks_ahead():
    model = ready(tiny.model("deepseek_v2", torch.float32, **tiny.EXPERTS))
    methods = {"lca": LCA, "ahead": LCA.replace(summary="prompt")}
    content = run(model, (40,), methods, ("dense", "condensed"), prefill_chunk=20)
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
    dense, *condensed = run(model, (40,), METHODS, ("dense", "condensed"))["rows"]
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
    read = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    monkeypatch.setitem(runners.RUNNERS, "dense", Mock(description="stock", compile=None, read=read))
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


def rows_of(path):
    return json.loads(path.read_text())["results"]["rows"]


def test_kernel_prints_and_writes_what_it_measured(tmp_path):
    words = ["--lengths", "64,128", "--ops", "layer,decode", "--decode-batches", "1,2", "--backend", "torch,reference"]
    # in float32, of which these rows have few numbers, it is the CPU's model that decides whose largest error is twice
    # the other's
    words += ["--dtype", "bfloat16", "--method=recall:group_size=4,window=8,num_recall=2"]
    done = ran(*KERNEL, *words, "--results", str(tmp_path / "results"))
    assert "no claims" in done.stdout
    assert "backend torch, reference" in done.stdout
    assert "attention of one decode step, 2 rows at once" in done.stdout
    assert "faster than every dense baseline: " in done.stdout
    (path,) = (tmp_path / "results").iterdir()
    assert path.match("bench-kernel-h4-kv2-*cpu-*-20*Z.json")
    assert all(row["gate"]["passed"] for row in rows_of(path) if row["condensed"])


def test_a_wrong_kernel_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "attention", lambda *args, **options: condense.attention(*args, **options) * 1.01)
    done = run_here(*KERNEL, "--lengths", "64", "--ops", "layer", "--results", str(tmp_path))
    assert done.returncode == 1
    assert "times the budget, not timed" in done.stdout
    (path,) = tmp_path.iterdir()
    assert ["times" in row for row in rows_of(path) if row["condensed"]] == [False]


def test_model_runs_a_saved_model_as_it_was_saved(tmp_path):
    model, saved = tiny_llama(vocab_size=64, num_key_value_heads=1), tmp_path / "tiny"
    condense.apply(model, condense.CCA(group_size=4, window=8), layers=[1]).save_pretrained(saved)
    command = ["model", "--device", "cpu", "--lengths", "48", "--steps", "2", "--runners", "dense,condensed"]
    command += ["--prefill-chunk", "20"]
    assert "time per further token" in ran(*command, "--model", saved, "--results", tmp_path / "layer").stdout
    (path,) = (tmp_path / "layer").iterdir()
    assert json.loads(path.read_text())["results"]["prefill_chunk"] == 20
    dense, condensed = rows_of(path)
    assert condensed["runner"] == "condensed CCA(group_size=4, window=8) in layers 1"
    assert condensed["method"] == {"1": condense.CCA(group_size=4, window=8).to_dict()}
    assert condensed["gate"]["passed"]
    assert dense["cache_bytes"] / 2 < condensed["cache_bytes"] < dense["cache_bytes"]
    model = condense.apply(LlamaForCausalLM.from_pretrained(saved), condense.LCA(group_size=4, window=8))
    by_method = ("--method", "cca:group_size=4,window=8")
    for name, given, expected in (
        ("whole", (), "LCA(group_size=4, window=8)"), ("stock", (), "recall-device"), ("own", by_method, by_method[1]),
    ):  # fmt: skip
        model.save_pretrained(tmp_path / name)
        ran(*command, *given, "--model", str(tmp_path / name), "--results", str(tmp_path / "results" / name))
        (path,) = (tmp_path / "results" / name).iterdir()
        assert [row["runner"] for row in rows_of(path)] == ["dense", f"condensed {expected}"]
        condense.restore(model)


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: "_".join(x) if isinstance(x, tuple) else "")
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    refused(message, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
