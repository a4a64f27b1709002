"""The methods' settings, recipes, help, chat templates, progress, and what is missing where."""

import dataclasses
import io
import re
import sys
import tomllib

import pytest
import typer
from cli.test_commands import refused, run_here
from rich.console import Console

import condense
from condense.cli.main import app
from condense.cli.progress import Lines
from condense.config import method_class, method_names
from condense.demo import demo_prompt
from condense.evaluate.compare import Prompt, chat_message, compare
from condense.train import PRESETS, RECIPES
from condense.train.recipes import ADAPT_FIELDS


@pytest.fixture(scope="module")
def demo():
    model, tokenizer = condense.demo_model()
    tokenizer.chat_template = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}[assistant]"
    return model, tokenizer


@pytest.mark.parametrize("name", method_names())
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
    shown = run_here("eval", "--task", "gsm8k", "--output", str(tmp_path / "run"))
    assert shown.returncode == 2
    assert "pip install 'lm-eval[" in shown.stderr


def test_recipes_says_what_each_setting_of_adapt_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shown = run_here("recipes", "adapt").stdout.splitlines()[5:]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown if line.strip()}
    assert {*ADAPT_FIELDS} <= {*lines}
    assert lines["steps"] == "1000 optimizer steps."
    assert lines["group_sizes"].startswith("4, 8 the method's group sizes at the start")
    assert lines["report_to"].startswith('none "tensorboard": the log is written for it too')


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
    assert run_here("generate", "hello", "--model", str(tmp_path), "--max-new-tokens", "1").returncode == 0


def test_progress_without_a_terminal_is_a_line_now_and_then():
    seconds, out = [0.0], io.StringIO()
    with Lines(Console(file=out, get_time=lambda: seconds[0])) as bar:
        task = bar.add_task("verifying", total=None)
        for seconds[0] in (4, 6, 20, 36, 40):
            bar.update(task, total=5, advance=1)
    lines = "verifying: 2/5 0:00:06", "verifying: 4/5 0:00:36", "verifying: 5/5 0:00:40"
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [*lines]
