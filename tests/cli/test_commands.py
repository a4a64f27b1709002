"""The command line as a user meets it: the bundled model, files, pipes, and bad input."""

import contextlib
import functools
import io
import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import transformers
from small_models import saved_with_tokenizer, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM, LlamaForCausalLM

import condense
from condense.cli.main import main
from condense.demo import demo_text
from condense.models import condensed_layers
from condense.named import NAMED_SETTINGS
from condense.train.trainer import MixedTrainer

ALL_FOCAL = {"gamma=0.5": "min_focal=1024", "gamma=1,min_focal=1": "gamma=1"}
LINE = "The number of the quiet bridge is 4821."
# what `inspect` says: at any length and setting, of weights that do not fit, and of steps that run on PyTorch
SAID = [
    (("--method", "cca:window=20000000"), "all layers: cache"),
    (("--method", "dga:group_size=20000000"), "all layers: cache"),
    (("--length", "1000000000", "--method", "recall:num_recall=0.05"), "all layers: cache"),
    (("--method", f"streaming_llm:sink=9,window={2**70}", "--length", f"{2**65}"), "all layers: cache"),
    (("--shape", "qwen3-8b", "--memory", "1GB"), "weights alone need more"),
    (("--shape", "qwen3-8b", "--length", "64K"), "layer 0: recall: all 65536 tokens stay"),
    (("--shape", "qwen3-8b", "--length", "64K"), "layers 1-35: recall: of 65536 tokens"),
    (("--method", "dga:group_size=128"), "up to 128 tokens, got 141"),
    (("--method", "dga:focal=random"), "makes its entries itself"),
]
# of which only some layers have attention over all tokens
MIXED = [
    (transformers.Qwen3NextConfig(num_hidden_layers=12), "layers 7, 11"),
    (transformers.Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=0), "layer 11"),
]
NO_MODULE = "condense: -m must name a module, as of python -m, got '{}': there is none of this name here\n"
NO_OPTION = "condense: run needs -m before the module, as in condense run -m lm_eval, got '{}'\n"
BAD = [
    (("compare", "--text", "missing.txt"), "text: no such file"),
    (("compare", "--text", "."), "text: no such file: ."),
    (("compare", "--text", "/dev/null"), "text: /dev/null is empty"),
    (("compare", "--model", "."), "model: no model in ., which has no config.json"),
    (("compare", "--question", "Who?"), "question needs a text"),
    (("compare", "--method", "cca:window"), "name=value"),
    (("compare", "--method", "recall-host:method=cca"), "must name each setting once, got 'method' again"),
    (("inspect", "--method", "cca:window=5,window=6"), "must name each setting once, got 'window' again"),
    (("compare", "--model", "./missing"), "model: no such folder"),
    (("compare", "--dtype", "int4"), "dtype must be one of"),
    (("compare", "--device", "mps"), "device must have float64"),
    (("inspect", "--method", "recall@2", "--method", "cca@2"), "layers 2 are named twice"),
    (("generate", "a", "--method", "@a.json", "--method", "cca@rest"), "stands alone, got @a.json cca@rest"),
    (("compare", "--json", "."), "json"),
    (("compare", "--json", "new/out.json"), "json: wanted a path in a folder that exists, got new/out.json"),
    # root may write there by its permissions, and still cannot
    (("compare", "--json", "/proc/out.json"), "json: wanted a path that can be written, got /proc/out.json"),
    (("compare", "--nonsense"), "No such option"),
    (("compare", "--text", "a.txt", "--text=b.txt"), "--text takes one value, got 2: give it once"),
    (("inspect", "--length", "4K", "--json", "a.json", "--length", "8K"), "--length takes one value, got 2: give it"),
    (("train", "smoke", "--data", "a", "--output", "b", "--method", "cca"), "belong to adapt: --method"),
    (("compare", "--plot", "picture.doc"), "plot must end in"),
    (("compare", "--chat"), "--chat needs a text"),
    (("generate", "hi", "--chat"), "no chat template"),
    (("generate", "caf\udce9"), "must be UTF-8, got 'caf\\udce9'"),
    (("generate", "hi", "--device", "cpu", "--device-map", "auto"), "not both"),
    (("generate",), "prompt"),
    (("generate", "a", "--text", "b"), "prompt"),
    (("generate", ""), "prompt must not be empty"),
    (("generate", "a", "--seed", str(2**64)), "'--seed': Input should be less than"),
    (("inspect", "--length", "0"), "length: wanted a number of tokens >= 1, such as 4096, 32K or 1M, got '0'"),
    (("inspect", "--memory", "80"), "memory: wanted bytes, such as 80GB or 512GiB, got '80'"),
    (("inspect", "--memory", "0.0GB"), "memory: wanted bytes, such as 80GB or 512GiB, got '0.0GB'"),
    (("inspect", "--batch", "0", "--memory", "80GB"), "Invalid value for '--batch'"),
    (("inspect", "--batch", "2"), "batch and host_memory need a memory to fit into: add --memory 80GB"),
    (("inspect", "--shape", "qwen9"), "shape must be one of llama-3.1-8b, "),
    (("inspect", "--shape", "qwen3-8b", "--model", "DIR"), "shape and model exclude each other"),
    (("train", "nonsense", "--data", "a", "--output", "b"), "recipe must be one of"),
    (("train", "adapt", "--data", "a", "--output", "b"), "add --pretrained and --method"),
    (("train", "smoke", "--output", "b", "--sequence-length", "64"), "belong to adapt: --sequence-length"),
    (("train", "demo_model", "--output", "b"), "add --data"),
    (("train", "adapt", "--output", "b", "--sequence-length", "1G"), "sequence_length: wanted a number of tokens >= 1"),
    (("eval", "--task", "a", "--output", "b", "--length", "4K", "--length", "1G"), "length: wanted a number of tokens"),
    (("eval", "--task", "a", "--output", "b", "--max-length", "1"), "max_length: wanted a number of tokens >= 2, such"),
    (("calibrate", "--output", "."), "output: wanted a file, got the folder ."),
    (("calibrate", "--output", "a.json", "--measured", "./a.json"), "measured must be another file than output"),
    (("calibrate", "--output", "a.json", "--measured", "."), "measured: wanted a file, got the folder"),
    (("calibrate", "--output", "a.json", "--plot", "a.txt"), "plot must end in one of"),
    (("calibrate", "--output", "a.json", "--measured", "a.png", "--plot", "a.png"), "another file than plot, got"),
    (("calibrate", "--output", "a.json", "--length", "1K"), "4 texts of 1024 to measure"),
    (("calibrate", "--output", "a.json", "--cache-length", "1G"), "cache_length: wanted a number of tokens >= 1, such"),
    (("compare", "--json", "a.png", "--plot", "./a.png"), "plot: wanted another file than that of --json, got a.png"),
    (("verify", "--json", "a.md", "--page", "a.md"), "page: wanted another file than that of --json, got a.md for"),
    (("verify", "a", "b"), "wanted one model, or result files"),
    (("verify", "none.json"), "no such file"),
    (("verify", "a.json", "--length", "256"), "length: result files are read here, and nothing is measured: leave out"),
    (("verify", "--length", "64"), "must be an integer >= 256, got 64"),
    *((("run", "-m", name, "--tasks", "gsm8k"), NO_MODULE.format(name)) for name in ("lm_evall", "a.b", ".scorer")),
    *((("run", *words), NO_OPTION.format(words[0])) for words in (("scorer", "--help"), ("-x",))),
]


def run_here(*arguments, stdin="", entry=main):
    """The command without a process of its own, which spares the imports; entry: its entry point."""
    out, err = io.StringIO(), io.StringIO()
    verbosity = transformers.logging.get_verbosity()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["condense", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as done:
            entry()
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
    code = 0 if done.value.code is None else int(done.value.code)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ran(*arguments, **options):
    done = run_here(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def refused(message, *arguments, **options):
    done = run_here(*arguments, **options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not done.stdout


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = demo_text().text.splitlines()
    lines = [line for line in lines if not line.startswith("The number of")][:30]
    path.write_text("\n".join([*lines[:10], LINE, *lines[10:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = condense.apply(tiny_llama(num_key_value_heads=1), condense.LCA(group_size=4, window=8), layers=[1])
    model.generation_config.num_beams = 2  # which commands do without
    return saved_with_tokenizer(model, tmp_path_factory.mktemp("model") / "a tiny one")


def test_compare_finds_the_number_dense_and_condensed(story, tmp_path, monkeypatch):
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    question = "Question: What is the number of the quiet bridge?\nAnswer:"
    pooled = "cca:window=256,summary=streaming,key_pooling=select,rep_bias=log_size"
    methods = ("dense", pooled, "streaming_llm:window=40")
    files = ("--text", str(story), "--json", str(results), "--plot", str(picture))
    ran("compare", "--question", question, *(f"--method={m}" for m in methods), *files)
    document = json.loads(results.read_text())
    outcomes = document["results"]["outcomes"]
    assert [each["answers"][0].startswith("4821") for each in outcomes] == [True, True, False]
    dense, condensed, window = (each["cache_bytes"] for each in outcomes)
    assert 0 < window < condensed < dense
    assert document["provenance"]["torch"] == torch.__version__
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = results.read_bytes()
    refused(str(results), "compare", "--text", str(story), "--json", str(results))
    assert results.read_bytes() == kept
    # nor is what was measured lost where it cannot be shown
    monkeypatch.setattr("condense.cli.compare._print", Mock(side_effect=BrokenPipeError))
    few = "--method", "dense", "--max-new-tokens", "1", "--json", str(tmp_path / "few.json")
    assert run_here("compare", "--text", str(story), *few).returncode == 2
    assert json.loads((tmp_path / "few.json").read_text())["results"]["max_new_tokens"] == 1


def test_default_settings_that_the_model_was_not_adapted_to_are_named(saved, story):
    own = ("compare", "--model", str(saved), "--text", str(story), "--max-new-tokens", "1")
    adapted = "the model was adapted to LCA(group_size=4, window=8) in layers 1\n"
    assert run_here(*own, "--method", "cca").stderr.startswith("condense: CCA() is the default; " + adapted)
    for methods in ((), ("--method", "cca:group_size=4", "--method", "recall")):
        assert "default" not in run_here(*own, *methods).stderr
    bundled = run_here("generate", "Once", "--method", "dense@0+lca@rest", "--max-new-tokens", "1")
    assert "condense: LCA() is the default; the model was adapted to CCA(window=256, " in bundled.stderr
    assert "default" not in run_here("generate", "Once", "--max-new-tokens", "1").stderr


@pytest.mark.parametrize(("setting", "cause"), ALL_FOCAL.items())
def test_inspect_says_when_all_tokens_are_focal(tmp_path, setting, cause):
    results = tmp_path / "layers.json"
    done = ran("inspect", "--method", f"dga:selection=prompt,{setting}", "--length", "900", "--json", str(results))
    assert " ".join(done.stdout.split()).count(f"{cause} keeps all 900 tokens exact: this is dense attention") == 1
    for layer in json.loads(results.read_text())["results"]["layers"]:
        assert cause in layer["remark"]
        assert (layer["entries"], layer["flops"]) == (900, layer["dense_flops"])


@pytest.mark.parametrize(("config", "layers"), MIXED)
def test_inspect_names_the_layers_that_have_attention(tmp_path, config, layers):
    config.save_pretrained(tmp_path)
    assert f"{layers}: recall: of 4096 tokens" in ran("inspect", "--model", str(tmp_path), "--length", "4K").stdout


def test_inspect_counts_quantised_weights_as_they_are_stored(tmp_path):
    config, asked = tiny_llama().config, ("--model", str(tmp_path), "--length", "64", "--memory", "1GB")
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    for arguments in (asked, asked[:-2]):
        assert "quantised, but counted in bfloat16: give a folder that" in ran("inspect", *arguments).stdout
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(10**5))
    assert "counted in" not in ran("inspect", *asked, "--json", str(tmp_path / "out.json")).stdout
    assert json.loads((tmp_path / "out.json").read_text())["results"]["weight_bytes"] == 2 * 10**5


@pytest.mark.parametrize(("arguments", "said"), SAID, ids=str)
def test_inspect_says(arguments, said):
    assert " ".join(ran("inspect", *arguments).stdout.split()).count(said) == 1


def test_inspect_says_what_fits_and_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    results = tmp_path / "fits.json"
    asked = ("--memory", "80GB", "--batch", "9", "--host-memory", "64GiB", "--method", "cca:window=64")
    done = ran("inspect", "--shape", "qwen3-8b", "--length", "64K", *asked, "--json", str(results))
    content = json.loads(results.read_text())["results"]
    settings = {row["name"]: row for row in content["settings"]}
    assert [*settings] == ["dense", "dense, FP8", "dense, 4 bits", *NAMED_SETTINGS, "cca:window=64"]
    assert (content["length"], content["memory"], content["host_memory"]) == (65536, 80 * 10**9, 64 * 2**30)
    for name, row in settings.items():
        (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith(f"{name}  "))
        served = [] if row["served"] is None else [f"{row['served']:,}"]
        counts = [f"{row['requests']:,}", *served, "yes" if row["requests"] >= 9 else "no"]
        assert line.split()[-len(counts) :] == counts
        dense = settings["dense"]["device_bytes"]
        assert row["served_bytes"] is None or f"{row['served_bytes'] / dense:.1%}" in line.split()
    on_host = settings["recall-host"]["host_bytes"]
    assert settings["recall-host"]["requests"] == 64 * 2**30 // on_host < settings["pooled"]["requests"]
    yarn = '"factor": 2.0, "original_max_position_embeddings": 32768'
    for said in ("The model has 40,960 positions, fewer than 65,536 tokens need. YaRN", yarn, yarn.replace('"', "'")):
        assert said in done.stdout
    assert "condense serve DIR --max-model-len 65536 (recall-device); with --method recall-host" in done.stdout
    assert "YaRN" not in run_here("inspect", "--shape", "qwen3-8b", "--length", "32K").stdout


def test_help_of_serve_offers_what_works(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = " ".join(run_here("serve", "--help").stdout.split())
    for said in ("Such as recall-device, pooled", "Default: what the model was saved with, or recall-device"):
        assert said in shown
    assert not {"dga", "recall-host"} & set(shown.replace(",", " ").split())
    # and is shown without a command
    done = run_here()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_here("--help").stdout


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: "_".join(x) if isinstance(x, tuple) else "")
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(message, *arguments)
    assert not list(tmp_path.iterdir())


def test_files_of_others_are_refused_in_one_line(saved, story, tmp_path):
    broken = shutil.copytree(saved, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    nameless = shutil.copytree(saved, tmp_path / "nameless")
    (nameless / "config.json").write_text("{")
    foreign = shutil.copytree(saved, tmp_path / "foreign")
    settings = {"methods": [{"method": {"method": "mystery"}, "layers": [0]}]}
    (foreign / "config.json").write_text(
        json.dumps(json.loads((saved / "config.json").read_text()) | {"condense": settings})
    )
    sizes = {"vocab_size": 4096, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    saved_with_tokenizer(GPTJForCausalLM(GPTJConfig(rotary_dim=4, **sizes)), tmp_path / "gptj")
    learned = GPT2Config(vocab_size=4096, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    saved_with_tokenizer(GPT2LMHeadModel(learned), tmp_path / "gpt2")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "blank").write_text(" \n\t")
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "BASE"}')
    is_adapter, adapt = f"{tmp_path} is an adapter of BASE: name that model", ("train", "adapt", "--method", "cca")
    for arguments, message in (
        (("inspect", "--model", str(tmp_path)), is_adapter),
        ((*adapt, "--pretrained", str(tmp_path), "--data", str(story), "--output", "b"), is_adapter),
        (("compare", "--model", str(broken)), "cannot read"),
        (("inspect", "--model", str(nameless)), "cannot read"),
        (("inspect", "--model", str(foreign)), "got 'mystery'; a class of your own must be imported first"),
        (("compare", "--model", str(tmp_path / "gptj")), "cannot be condensed: its attention is written out"),
        (("inspect", "--model", str(tmp_path / "gptj")), "cannot be condensed: its attention is written out"),
        (("compare", "--text", str(tmp_path / "binary")), "is not UTF-8 text"),
        (("compare", "--text", str(tmp_path / "blank")), "is empty\n"),
        (("calibrate", "--text", str(tmp_path / "none.jsonl")), "text: wanted files with texts, got "),
        (("compare", "--text", str(story), "--model", str(tmp_path / "gpt2")), "64 learned positions"),
        (("compare", "--text", str(story), "--question", ""), "questions must hold at least one token each"),
    ):
        refused(message, *arguments)


def test_without_a_network_a_hub_is_asked_once_and_offline_it_is_one_line_too(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1 sets it
        refused("cannot read nobody/nothing as no folder", "generate", "a", "--model", "nobody/nothing")
    unreachable = Mock(side_effect=OSError("Name or service not known"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    message = "nope as no folder of this name is here, from the hub: Name or service not known"
    refused(message, "compare", "--model", "nope")
    assert unreachable.call_count == 1


def test_a_saved_model_keeps_its_layers_and_reads_standard_input_as_it_is(saved, story, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    results, question = tmp_path / "out.json", "Who said [/b] and [red]no[/red] :smile:"
    options = ("--question", question, "--max-new-tokens", "2", "--json", str(results))
    done = ran("compare", "--model", str(saved), "--text", "-", *options, stdin=story.read_text())
    assert question in done.stdout
    assert "LCA(group_size=4, window=8)" in done.stdout
    method = condense.LCA(group_size=4, window=8).to_dict()
    dense, condensed = json.loads(results.read_text())["results"]["outcomes"]
    assert dense["method"] == condense.Dense().to_dict()
    assert condensed["method"] == {"1": method}
    assert dense["cache_bytes"] / 2 < condensed["cache_bytes"] < dense["cache_bytes"]
    layers = tmp_path / "layers.json"
    shown = ran("inspect", "--model", str(saved), "--length", "1000", "--json", str(layers)).stdout
    assert f"condense serve '{saved}' --max-model-len 1000 (as saved)" in shown
    assert [layer["method"] for layer in json.loads(layers.read_text())["results"]["layers"]] == [None, method]


def test_inspect_says_that_a_model_is_not_served_as_it_was_saved(tmp_path):
    condense.apply(tiny_llama(), condense.DGA(group_size=4, window=8)).save_pretrained(tmp_path)
    shown = ran("inspect", "--model", str(tmp_path), "--length", "1000").stdout
    assert "--max-model-len 1000 --method recall-device, or recall-host; not as saved: method must be one of" in shown
    assert "got DGA(group_size=4, window=8): others run with model.generate" in shown


def before(monkeypatch, cls, name, call):
    """From now on ``call`` gets the object whose method is about to run."""
    stock = getattr(cls, name)

    @functools.wraps(stock)
    def run(self, *args, **kwargs):
        call(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, run)


def test_generate_uses_the_layers_of_a_saved_model(saved, monkeypatch):
    used, lca, method = [], "lca:group_size=4,window=8", condense.LCA(group_size=4, window=8)
    before(monkeypatch, LlamaForCausalLM, "forward", lambda model: used.append(condensed_layers(model)))
    given = {(): {1: method}, ("dense",): {}, (lca,): {0: method, 1: method}, (f"{lca}@0",): {0: method}}
    for names, expected in given.items():
        used.clear()
        options = ("--model", str(saved), "--max-new-tokens", "2", *(f"--method={name}" for name in names))
        assert ran("generate", "A walk", *options).stdout.strip()
        assert used == [expected] * 2


def interrupt(monkeypatch, cls, name, number):
    """What Ctrl-C raises, at this call of a method, counted from 0."""
    before(monkeypatch, cls, name, Mock(side_effect=[*[None] * number, KeyboardInterrupt]))


def test_ctrl_c_leaves_no_result_files(story, tmp_path, monkeypatch):
    interrupt(monkeypatch, LlamaForCausalLM, "forward", 10)
    outputs = "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")
    done = run_here("compare", "--text", str(story), *outputs)
    # where this takes longer than ten seconds, progress is said before
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "condense: interrupted")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_adaptation_is_resumed(saved, story, tmp_path, monkeypatch):
    output, recipe = tmp_path / "adapted", story.parent / "recipe.toml"
    recipe.write_text('sequence_length = 4096\nbatch_size = 2\ndtype = "float32"\ndistill = 0.0\ntrain = "all"\n')
    arguments = (
        "train", str(recipe), "--pretrained", str(saved), "--method", "cca:group_size=4,window=16,summary=streaming",
        "--data", str(story), "--output", str(output), "--steps", "8", "--workers", "0",
        "--train", "qkv", "--sequence-length", "128",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        interrupt(patch, MixedTrainer, "training_step", 3)
        assert run_here(*arguments).returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["adapted.work"]
    assert "unfinished run" in run_here(*arguments).stderr
    ran(*arguments, "--resume")
    assert [path.name for path in tmp_path.iterdir()] == ["adapted"]
    report = json.loads((output / "training.json").read_text())["results"]
    assert report["train"] == "qkv"
    assert report["phases"][0]["resumed_from"].startswith("checkpoint-")
    done = ran("compare", "--model", str(output), "--text", str(story), "--max-new-tokens", "2")
    assert "CCA(group_size=4, window=16, summary='streaming')" in done.stdout


def test_the_try_out_needs_no_data(tmp_path):
    ran("train", "smoke", "--output", str(tmp_path / "tiny"), "--steps", "1")
    assert (tmp_path / "tiny" / "model.safetensors").is_file()
