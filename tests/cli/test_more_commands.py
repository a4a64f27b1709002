"""The methods' settings, recipes, help, chat templates, progress, and programs of others."""

import dataclasses
import io
import re
import sys
import tomllib

import pytest
import typer
from cli.test_commands import ran, refused, run_here
from models import tiny
from rich.console import Console

import condense
from condense.cli.main import app
from condense.cli.progress import Lines
from condense.config import REGISTRY, method_class
from condense.demo import demo_prompt
from condense.evaluate.compare import Prompt, chat_message, compare
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
NO_MODULE = "-m must name a module, as of python -m, got '{}': there is none of this name here"
NO_OPTION = "run needs -m before the module, as in condense run -m lm_eval, got '{}'"
NO_MODULES = [("-m", name, "--tasks", "gsm8k") for name in ("lm_evall", "lm_evall.main", ".scorer")]
NO_MODULES += [("scorer", "--help"), ("-x",)]


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


def test_a_chat_message_in_two_parts(demo):
    _, tokenizer = demo
    assert chat_message(tokenizer, " a text\n", "Why?") == ("<s>[user] a text", "\n\nWhy? [end][assistant]")
    assert chat_message(tokenizer, "hello") == ("<s>[user] hello", " [end][assistant]")


def test_chat_compares_the_templated_prompt(demo):
    model, tokenizer = demo
    text, question = demo_prompt().text[:600], "What is the number?"
    (got,) = compare(model, tokenizer, [condense.Dense()], Prompt(text, [question], chat=True), max_new_tokens=4)
    before, after = chat_message(tokenizer, text, question)
    ids = tokenizer(before + after, add_special_tokens=False, return_tensors="pt").input_ids
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert got.answers == [tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True).strip()]


def test_eval_without_the_harness_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused("pip install 'lm-eval[", "eval", "--task", "gsm8k", "--output", str(tmp_path / "run"))


def test_recipes_says_what_each_setting_of_adapt_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = run_here("recipes", "adapt").stdout.splitlines()[5:]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown if line.strip()}
    assert {*ADAPT_FIELDS} <= {*lines}
    assert lines["group_sizes"].startswith("4, 8 the method's group sizes at the start")


def test_recipes_lists_all_and_shows_each():
    listed = run_here("recipes").stdout
    for name in (*RECIPES, *PRESETS):
        shown = run_here("recipes", name)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert name in listed
        assert "learning_rate" in shown.stdout
    assert tomllib.loads(run_here("recipes", "cca-paper").stdout)["steps"] == 1000
    assert run_here("recipes", "nonsense").stderr.startswith("condense: recipe must be one of adapt, demo_model, smoke")


def test_a_folder_without_a_tokenizer(demo, tmp_path):
    demo[0].save_pretrained(tmp_path)
    wanted = f"condense: model: no tokenizer in {tmp_path}: tokenizer.save_pretrained('{tmp_path}') adds it\n"
    refused(wanted, "generate", "hello", "--model", str(tmp_path))
    demo[1].save_pretrained(tmp_path)
    ran("generate", "hello", "--model", str(tmp_path), "--max-new-tokens", "1")


def test_progress_without_a_terminal_is_a_line_now_and_then():
    seconds, out = [0.0], io.StringIO()
    with Lines(Console(file=out, get_time=lambda: seconds[0])) as bar:
        task = bar.add_task("verifying", total=None)
        for seconds[0] in (4, 6, 20, 36, 40):
            bar.update(task, total=5, advance=1)
    lines = "verifying: 2/5 0:00:06", "verifying: 4/5 0:00:36", "verifying: 5/5 0:00:40"
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [*lines]


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    (tmp_path / "scorer.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("scorer")
def test_a_program_that_is_run_loads_a_saved_model_condensed(tmp_path):
    condense.apply(tiny.model("llama"), tiny.CCA).save_pretrained(tmp_path / "saved")
    done = ran("run", "-m", "scorer", "--help", str(tmp_path / "saved"))
    assert done.stdout == "--help CondensedLlamaAttention\n"


@pytest.mark.usefixtures("scorer")
def test_failures_of_a_program_that_is_run_are_its_own():
    done = run_here("run", "-m", "scorer", "fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ValueError: the program's own" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_run_without_a_module_says_what_to_give(arguments):
    done = ran("run", *arguments)
    assert "run -m MODULE [ARGUMENTS]..." in " ".join(done.stdout.split())
    assert "ValueError" not in done.stdout


@pytest.mark.parametrize("arguments", NO_MODULES, ids=" ".join)
def test_run_refuses_what_is_no_module(arguments):
    message = NO_MODULE.format(arguments[1]) if arguments[0] == "-m" else NO_OPTION.format(arguments[0])
    refused(f"condense: {message}\n", "run", *arguments)
