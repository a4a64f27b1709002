"""The methods' settings, recipes, help, chat templates, progress, programs of others, and `condense calibrate`."""

import dataclasses
import io
import json
import re
import sys
import tomllib
from unittest.mock import Mock

import pytest
import torch
import typer
from cli.test_commands import ran, refused, run_here
from models import tiny
from rich.console import Console
from small_models import saved_with_tokenizer, tiny_llama

import condense
from condense.cli.main import app
from condense.cli.progress import Lines
from condense.config import REGISTRY, method_class
from condense.demo import demo_prompt
from condense.evaluate.compare import Prompt, chat_message, compare
from condense.files import sole_writer
from condense.train import PRESETS, RECIPES
from condense.train.recipes import ADAPT_FIELDS

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM

if sys.argv[1:] == ["fail"]:
    raise ValueError("the program's own")
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
sys.stdout.write(f"{sys.argv[1]} {type(model.model.layers[0].self_attn).__name__}\\n")
"""


@pytest.fixture(scope="module")
def demo():
    model, tokenizer = condense.demo_model()
    tokenizer.chat_template = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}[assistant]"
    return model, tokenizer


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_setting_of_a_method_is_explained_and_listed(name):
    explained, *table = re.split(r"^ setting +values", run_here("methods", name).stdout, flags=re.MULTILINE)
    for field in dataclasses.fields(method_class(name)):
        assert re.search(rf"\b{field.name}\b", explained)
        assert f"\n {field.name} " in table[0]
    assert name in run_here("methods").stdout


def _commands(group, path=()):
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


# "run" is left out: it hands --help on to its program. Dots after a comma mean more values, not text cut off.
@pytest.mark.parametrize("command", [x for x in _commands(typer.main.get_command(app)) if x != ("run",)], ids=str)
def test_help_is_whole_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_here(*command, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    cut_off = [line for line in lines if "…" in line or line.endswith("...")]
    assert [line for line in cut_off if not line.endswith(("]...", ", ..."))] == []


def test_chat_compares_the_templated_prompt_in_two_parts(demo):
    model, tokenizer = demo
    assert chat_message(tokenizer, " a text\n", "Why?") == ("<s>[user] a text", "\n\nWhy? [end][assistant]")
    assert chat_message(tokenizer, "hello") == ("<s>[user] hello", " [end][assistant]")
    text, question = demo_prompt().text[:600], "What is the number?"
    (got,) = compare(model, tokenizer, [condense.Dense()], Prompt(text, [question], chat=True), max_new_tokens=4)
    before, after = chat_message(tokenizer, text, question)
    ids = tokenizer(before + after, add_special_tokens=False, return_tensors="pt").input_ids
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert got.answers == [tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True).strip()]


def test_recipes_lists_all_and_shows_each_and_what_each_setting_of_adapt_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = run_here("recipes", "adapt").stdout.splitlines()[5:]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown if line.strip()}
    assert {*ADAPT_FIELDS} <= {*lines}
    assert lines["group_sizes"].startswith("4, 8 the method's group sizes at the start")
    listed = run_here("recipes").stdout
    for name in (*RECIPES, *PRESETS):
        shown = run_here("recipes", name)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert name in listed
        assert "learning_rate" in shown.stdout
    assert tomllib.loads(run_here("recipes", "cca-paper").stdout)["steps"] == 1000
    assert run_here("recipes", "nonsense").stderr.startswith("condense: recipe must be one of adapt, demo_model, smoke")


def test_a_folder_without_a_tokenizer_and_an_environment_without_the_harness(demo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused("pip install 'lm-eval[", "eval", "--task", "gsm8k", "--output", str(tmp_path / "run"))
    demo[0].save_pretrained(tmp_path)
    wanted = f"condense: model: no tokenizer in {tmp_path}: tokenizer.save_pretrained('{tmp_path}') adds it\n"
    refused(wanted, "generate", "hello", "--model", str(tmp_path))
    refused(wanted, "train", "adapt", "--pretrained", str(tmp_path), "--method", "cca", "--data", "a", "--output", "b")
    demo[1].save_pretrained(tmp_path)
    ran("generate", "hello", "--model", str(tmp_path), "--max-new-tokens", "1")


def test_devices_without_float64_are_not_proposed(monkeypatch):
    monkeypatch.setattr("torch.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    refused("device must be one that can be used here (cpu, cuda), got 'abacus'", "compare", "--device", "abacus")


def test_lengths_in_k_for_eval_and_train(demo, tmp_path, monkeypatch):
    scored, trained = Mock(return_value=[]), Mock()
    monkeypatch.setattr("condense.evaluate.harness.check_names", Mock())  # which needs the harness
    monkeypatch.setattr("condense.evaluate.harness.evaluate", scored)
    monkeypatch.setattr("condense.train.run_training", trained)
    lengths = "--length", "1K", "--length", "1024", "--length", "512", "--max-length", "2k"
    ran("eval", "--task", "text_loss", *lengths, "--output", str(tmp_path / "run"))
    assert (scored.call_args.args[3].lengths, scored.call_args.args[3].max_length) == ((1024, 512), 2048)
    for part in demo:
        part.save_pretrained(tmp_path)
    arguments = "--pretrained", str(tmp_path), "--method", "cca", "--data", "a", "--output", "b"
    ran("train", "adapt", *arguments, "--sequence-length", "2K")
    assert trained.call_args.args[0].phases[0].sequence_length == 2048


def test_progress_without_a_terminal_is_a_line_now_and_then():
    seconds, out = [0.0], io.StringIO()
    with Lines(Console(file=out, get_time=lambda: seconds[0])) as bar:
        task = bar.add_task("verifying", total=None)
        for seconds[0] in (4, 6, 20, 36, 40):
            bar.update(task, total=5, advance=1)
    lines = "2/5 0:00:06 left: 0:00:06", "4/5 0:00:36 left: 0:00:11", "5/5 0:00:40 left: 0:00:00"
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [f"verifying: {line}" for line in lines]


def test_a_program_that_is_run_loads_a_saved_model_condensed_and_its_failures_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "scorer.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    condense.apply(tiny.model("llama"), tiny.CCA).save_pretrained(tmp_path / "saved")
    done = ran("run", "-m", "scorer", "--help", str(tmp_path / "saved"))
    assert done.stdout == "--help CondensedLlamaAttention\n"
    done = run_here("run", "-m", "scorer", "fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ValueError: the program's own" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_run_without_a_module_says_what_to_give(arguments):
    done = ran("run", *arguments)
    assert "run -m MODULE [ARGUMENTS]..." in " ".join(done.stdout.split())
    assert "ValueError" not in done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = condense.apply(tiny_llama(num_hidden_layers=3), condense.CCA(group_size=4, window=8))
    return saved_with_tokenizer(model, tmp_path_factory.mktemp("model") / "tiny")


def test_what_a_calibration_says_and_its_files(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    path, results = tmp_path / "a.json", tmp_path / "layers.json"
    words = ["--budget-nats", "1", "--length", "160", "--texts", "2", "--hidden-numbers", "1", "--min-found", "0"]
    words += ["--candidate=dense", "--candidate=cca:window=16"]
    words += ["--candidate=recall:window=16,num_recall=2,store=host,slots=2"]
    files = ("--output", str(path), "--plot", str(path.with_suffix(".png")))
    done, content = ran("calibrate", "--model", str(saved), *words, *files), json.loads(path.read_text())
    assert "forwards of 160 tokens" in done.stderr
    assert f"{path.with_suffix('.measured.json')} keeps what is measured\n" in done.stderr
    assert f"written: {path}" in done.stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout  # no figure is cut off
    assert f"chosen, {content['calibration']['chosen']['cache']:.1%} of the dense cache: " in done.stdout
    for said in ("each layer alone", "quality against cache at 160 tokens", "found", "on held-out text: loses"):
        assert said in done.stdout
    assert "±" not in done.stdout.split("quality against cache")[0]  # no room for errors in a column per candidate
    assert "fewer than" not in done.stdout
    assert "dense attention itself finds only 0 of " in done.stdout
    assert content["calibration"]["provenance"]["torch"] == torch.__version__
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.with_suffix(".measured.json").read_text())["readings"]
    # other commands read the allocation
    options = ("--model", str(saved), "--method", f"@{path}")
    methods = sorted((i, part["method"]) for part in content["methods"] for i in part["layers"])
    ran("inspect", *options, "--length", "1000", "--json", str(results))
    layers = json.loads(results.read_text())["results"]["layers"]
    assert [*enumerate(layer["method"] for layer in layers)] == methods
    ran("generate", "A walk", *options, "--max-new-tokens", "2")


def test_too_few_numbers_in_a_size_are_said(saved, tmp_path, monkeypatch):
    """As if this random model found some of them with dense attention."""
    monkeypatch.setattr("condense.calibration.curve.found_of", lambda *_: (0, 3, 4))
    words = ["calibrate", "--model", str(saved), "--cache", "0.3", "--length", "160", "--texts", "2"]
    words += ["--hidden-numbers", "2", "--candidate=dense", "--candidate=streaming_llm:window=16"]
    done = ran(*words, "--output", str(tmp_path / "a.json"))
    assert "fewer than 99% of the numbers that dense attention finds: 0 of" in done.stdout


def test_a_copy_of_a_text_is_not_held_out(saved, tmp_path):
    lines = condense.demo.demo_text().text.splitlines()[:40]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "\n".join(lines) + "\n"}))
    texts = [word for name in ("a.txt", "b.txt", "c.jsonl") for word in ("--text", str(tmp_path / name))]
    done = run_here("calibrate", "--model", str(saved), *texts, "--output", str(tmp_path / "a.json"))
    once = run_here("calibrate", "--model", str(saved), *texts[:2], "--output", str(tmp_path / "a.json"))
    assert "text must have" in done.stderr
    assert done.stderr == once.stderr
    with sole_writer(tmp_path / "a.json"):
        done = run_here("calibrate", "--model", str(saved), *texts, "--output", str(tmp_path / "a.json"))
    assert f"output: wanted one that no other run writes, got {tmp_path / 'a.json'}" in done.stderr
