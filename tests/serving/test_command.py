"""`condense serve` up to the moment when vLLM takes over, without vLLM."""

import importlib.util
import json
import logging
import os
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from small_models import random_latents, tiny_llama
from transformers import GPTNeoXConfig, GptOssConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config

import condense
from condense.cli.main import main
from condense.methods import methods_in, settings_of, step_settings
from condense.models import adapted
from condense.named import NAMED_SETTINGS
from condense.serving.plan import serving_plans
from condense.serving.vllm import command as command_module
from condense.serving.vllm.command import server_command

METHOD = condense.CCA(summary="streaming")
SAVED = settings_of({0: METHOD, 1: METHOD})
REFUSED = [
    (["--method", "dense"], "got dense attention only"),
    (["--method", "cca", "--hf-overrides", "{"], "--hf-overrides must be JSON"),
    (["--method", "cca", "--hf-overrides", "[]"], "must be a JSON object"),
    (["--method", "cca", "--hf-overrides"], "must have a value"),
    (["--method", "cca", '--hf-overrides={"condense": {}}'], "leave out 'condense'"),
    (["--method", "cca", "--hf-overrides={}", "--hf_overrides={}"], "once and in full"),
    (["--method", "cca", "--hf-overrides.rope_theta", "2"], "as a JSON object, got --hf-overrides.rope_theta"),
    (["--method", "cca", "--hf-over", "{}"], "got --hf-over:"),
    (["--method", "dense@0+dga@rest"], "layers 1-2: method must be one of Recall"),
    (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be the model's"),
    (["--kv_cache_dtype=fp8", "--speculative-config", "{}"], "; --speculative-config is not served"),
    (["--spec-model", "small"], "--speculative-config is not served"),
    (["--ubatch-size", "2"], "--enable-dbo and --ubatch-size are not served"),
    (["--method", "dga", "--block-size=16"], "; method must be"),
    (["--method", "dga", "-tp", "3", "--hf-overrides", "{"], "; --hf-overrides must be JSON"),
    (["--method", "cca", "--block_size", "16"], "--block-size must be left out"),
    (["--method", "dga", "-tp", "3"], "model.generate; --tensor-parallel-size must divide the model's 2 KV heads"),
    (["--method", "recall-host", "-pp", "2"], "--pipeline-parallel-size is served only if all layers are condensed"),
    (["--method", "cca@0-1", "--pipeline-parallel-size=2"], "use --tensor-parallel-size"),
    (["--method", "recall-host", "--enable-sleep-mode"], "--enable-sleep-mode is not served with tokens in host"),
]
OF_LATENTS = [
    (["--method", "recall", "-tp", "2"], "must be 1 for Recall on latents (MLA) whose prompts choose groups, got 2"),
    (["--enable-lora"], "--enable-lora is not served with latents (MLA)"),
    (["--method", "lca@0"], "got dense attention in layers 1: give each a method"),
    (["--method", "dense@0+lca@rest"], "got dense attention in layers 0: give each a method"),
    (["--method", "dga"], "method must be one of"),
]
DRAFTS = [
    ("recall:store=device", "ngram", True), ("recall-device", "ngram", False),
    ("cca:summary=streaming", "ngram", False), ("cca", "ngram", True), ("cca", "eagle", False),
]  # fmt: skip
CHECKPOINTS = [
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, True),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, False),
    ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, False),
]


@pytest.fixture
def serve(monkeypatch, capsys):
    """Calls `condense serve`: the command that vLLM would get, or None, and what was printed on stderr."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    started = Mock(side_effect=SystemExit)
    monkeypatch.setattr(os, "execv", started)

    def call(*arguments):
        started.reset_mock()
        monkeypatch.setattr(sys, "argv", ["condense", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit):
            main()
        return started.call_args and started.call_args.args[1], capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    path = tmp_path_factory.mktemp("stock")
    tiny_llama(num_hidden_layers=3).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def saved(stock, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    condense.apply(LlamaForCausalLM.from_pretrained(stock), METHOD, layers=[0, 2]).save_pretrained(path)
    return path


def check_refused(served, *words):
    command, err = served
    assert command is None
    assert all(each in err for each in words), err
    assert "Traceback" not in err


def overrides(command):
    return json.loads(command[command.index("--hf-overrides") + 1])


def test_a_saved_model_is_served_as_it_was_saved(serve, saved):
    # of flags for weights in FP8 too nothing is refused
    flags = ["--port", "8123", "--enable-sleep-mode", "--quantization", "fp8", "--kv-cache-dtype", "bfloat16"]
    command, err = serve(saved, *flags)
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(saved)]
    assert command[-7:] == flags
    assert overrides(command)["architectures"] == ["CondensedLlamaForCausalLM"]
    assert methods_in(overrides(command)["condense"]) == {0: METHOD, 2: METHOD}
    assert err == ""
    # all of whose layers the stages of a pipeline need
    check_refused(serve(saved, "-pp", "2"), "--pipeline-parallel-size is served only if")
    assert serve(saved, "-pp", "2", "--method", "recall-device")[0] is not None
    # unless a method replaces the saved one
    command, err = serve(saved, "--method", "lca:window=32@1-2")
    assert methods_in(overrides(command)["condense"]) == {i: condense.LCA(window=32) for i in (1, 2)}
    assert err == ""


def test_dense_layers_of_an_allocation_stay_the_engines(serve, stock, tmp_path):
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps(settings_of({0: condense.Dense(), 1: METHOD, 2: condense.LCA()})))
    command, _ = serve(stock, "--method", f"@{path}")
    plans = {i: plan.settings for i, plan in serving_plans(overrides(command)["condense"]).items()}
    assert plans == {1: step_settings(METHOD), 2: step_settings(condense.LCA())}


def test_an_unadapted_model_is_warned_of(serve, stock, caplog):
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=adapted.__name__):
        command, _ = serve(stock, "--method", "cca:summary=streaming")
    assert methods_in(overrides(command)["condense"]) == dict.fromkeys(range(3), METHOD)
    assert caplog.text.count("condense train adapt") == 1


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=" ".join)
def test_what_is_refused(serve, stock, arguments, words):
    check_refused(serve(stock, *arguments), words)


@pytest.mark.parametrize(("flags", "words"), OF_LATENTS, ids=str)
def test_what_is_refused_of_latents(serve, tmp_path, flags, words):
    random_latents().save_pretrained(tmp_path)
    # by a named setting, which reads prompts exactly
    assert overrides(serve(tmp_path, "-tp", "2")[0])["architectures"] == ["CondensedMiniCPM3ForCausalLM"]
    command, err = serve(tmp_path, *flags)
    assert command is None
    assert err.count(words) == 1


@pytest.mark.parametrize("named", [lambda x: ["-sc", json.dumps({"method": x})], lambda x: ["--spec-method", x]])
@pytest.mark.parametrize(("method", "drafts", "passed"), DRAFTS)
def test_drafts_that_can_be_taken_back(serve, stock, method, drafts, passed, named):
    """Whether it runs on a CPU, vLLM's process sees."""
    command, err = serve(stock, "--method", method, *named(drafts))
    assert (command is not None) is passed
    assert ("--speculative-config is not served" in err) is not passed


@pytest.mark.parametrize(("settings", "is_served"), CHECKPOINTS, ids=str)
def test_checkpoints_in_fp8(serve, tmp_path, settings, is_served):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], quantization_config=settings).save_pretrained(tmp_path)
    command, err = serve(tmp_path)
    assert (command is not None) == is_served
    assert is_served or "give --kv-cache-dtype bfloat16" in err
    assert serve(tmp_path, "--kv-cache-dtype", "bfloat16")[0] is not None


def test_gpt_oss(serve, tmp_path):
    config = GptOssConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(tmp_path)
    given = overrides(serve(tmp_path)[0])
    assert given["architectures"] == ["CondensedGptOssForCausalLM"]
    assert [part["layers"] for part in given["condense"]["methods"]] == [[1], [3]]
    check_refused(serve(tmp_path, "--enable-lora"), "--enable-lora is not served with condensed GPT-OSS", "or merge")


def test_an_adapter_must_have_been_trained_with_the_method(serve, stock, tmp_path):
    """As loading it with PEFT; adapters without a record were trained on stock models, and may be served."""
    lora = ["--enable-lora", "--lora-modules"]
    for form in (f"mine={tmp_path}", json.dumps({"name": "mine", "path": str(tmp_path)})):
        (tmp_path / "condense.json").unlink(missing_ok=True)
        assert serve(stock, "--method", "cca", *lora, form)[0] is not None
        (tmp_path / "condense.json").write_text(json.dumps(settings_of(dict.fromkeys(range(3), METHOD))))
        assert serve(stock, "--method", "cca:summary=streaming", *lora, form)[0] is not None
        check_refused(serve(stock, "--method", "cca", *lora, form), f"{tmp_path} was trained with {METHOD}")
    assert serve(stock, "--method", "cca", f"--lora_modules=mine={tmp_path}", "another=elsewhere")[0] is None


def test_other_architectures_and_orders_are_refused_and_without_vllm_all(serve, saved, stock, tmp_path, monkeypatch):
    check_refused(serve("--model", stock, "--method", "cca"), "condense serve DIR")
    LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2).save_pretrained(tmp_path)
    assert overrides(serve(tmp_path)[0])["architectures"] == ["CondensedLlamaForCausalLM"]
    GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    check_refused(serve(tmp_path, "--method", "cca"), "GPTNeoXForCausalLM: use model.generate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_refused(serve(saved), "condense: serve needs vLLM, which is not installed: pip install 'vllm>=0.30,<0.34'\n")


def test_an_untouched_model_gets_the_named_setting(serve, stock):
    command, err = serve(stock)
    named = condense.Method.parse("recall-device")
    first = named.of_layer(is_first=True, has_latents=False)
    assert methods_in(overrides(command)["condense"]) == {0: first, 1: named, 2: named}
    assert err.count("\n") == 1
    assert "recall-device. Any model as it is" in err
    assert f"Measured to lose {NAMED_SETTINGS['recall-device'].loses}" in err
    assert f"condense verify {stock} --text FILE" in err


def test_a_model_whose_queries_have_several_rotations_is_refused(serve, stock, tmp_path):
    config = json.loads((stock / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dual_chunk_attention_config": {"chunk_size": 8}}))
    check_refused(serve(tmp_path, "--method", "recall"), "dual_chunk_attention_config", "remove it from config.json")


def test_the_package_vllm_has_a_command(serve, saved, monkeypatch):
    monkeypatch.setattr(command_module, "_version", lambda: "0.32.0")
    command, _ = serve(saved)
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(saved)]
    monkeypatch.setattr(command_module, "_version", lambda: "0.29.1")
    assert "install 'vllm>=0.30,<0.34'" in serve(saved)[1]


def test_flags_in_a_file(serve, stock, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("max-num-batched-tokens: 512\nperformance_mode: balanced\n")
    command, _ = serve(stock, "--config", file)
    assert command[-2:] == ["--config", str(file)]
    assert not {"--max-num-batched-tokens", "--performance-mode"} & {*command}
    file.write_text("kv_cache_dtype: fp8\nenable-dbo: true\n")
    words = "--kv-cache-dtype must be the model's", "--enable-dbo and --ubatch-size"
    check_refused(serve(stock, "--config", file), *words)
    file.write_text("kv_cache_dtype: fp8\n")
    assert serve(stock, "--config", file, "--kv-cache-dtype", "auto")[0]  # a flag counts for more, as in vLLM
    # what a file turns off is not asked for
    file.write_text("enable-dbo: false\ndisable-hybrid-kv-cache-manager: false\nenable_chunked_prefill: false\n")
    assert "--max-num-batched-tokens" not in serve(stock, "--config", file)[0]
    file.write_text("port 8000")
    check_refused(serve(stock, "--config", file), "--config must name a YAML file of names and values, got 'port 8000'")
    file.write_text("port: [1,")
    check_refused(serve(stock, "--config", file), f"--config must name a YAML file, got {file}: ")
    file.write_text("hf-overrides:\n  rope_theta: 2\n")
    check_refused(serve(stock, "--config", file), "not in the file of --config")


@pytest.mark.parametrize("name", ["--hf-overrides", "--hf_overrides"])
def test_own_overrides_batch_and_mode_are_kept(name):
    own = ["--max-num-batched-tokens=512", "--performance_mode=throughput", "--prefix-cache-retention-interval=0"]
    flags = [name + '={"rope_scaling": null}', *own]
    config = Qwen2Config(architectures=["Qwen2ForCausalLM"], condense=SAVED)
    make = partial(server_command, "model", config, check_adapter=Mock(), page_of={2: 320, 4: 416}.get)
    command = make(flags)
    given = {"architectures": ["CondensedQwen2ForCausalLM"], "condense": SAVED}
    assert overrides(command) == {"rope_scaling": None, **given}
    assert [flag for flag in command if "batched" in flag or "performance" in flag or "retention" in flag] == own
    command = make([])
    assert command[command.index("--max-num-batched-tokens") + 1] == "4096"
    assert command[command.index("--performance-mode") + 1] == "interactivity"
    for flags, tokens in (([], "5120"), (["--dtype", "float32"], "6656")):  # pages doubled as often as 8,192 allow
        command = make(flags)
        assert command[command.index("--prefix-cache-retention-interval") + 1] == tokens
    # vLLM refuses it for longer texts whose prompts are read whole
    assert "--max-num-batched-tokens" not in make(["--no_enable_chunked_prefill"])
