"""The pages: their Python runs, their commands parse, and what they name exists."""

import importlib.util
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

import condense
from condense import config
from condense.cli.main import app
from condense.models import choice_from_text, parse_layers

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINERS = "docs/guides/other-trainers.md"
# a page whose code needs a package that `make test-eval` installs runs there
NEEDS = {TRAINERS: "trl"}
WITH_PYTHON = [
    page
    for page, text in PAGES.items()
    if BLOCK.search(text) and (page not in NEEDS or importlib.util.find_spec(NEEDS[page]))
]
# names of result files, and of the documents in those that hold several
RESULTS = {
    name
    for path in ROOT.glob("benchmarks/results/*.json")
    for name in (path.stem, *json.loads(path.read_text(encoding="utf-8")))
}
COMMANDS = sorted({line for text in PAGES.values() for line in re.findall(r"^condense [a-z].*", text, re.MULTILINE)})

# of which page the code names a model that is not here, and what it names it
ELSEWHERE = "docs/start-here.md"
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "_REGISTRY", dict(config._REGISTRY))  # a guide's method is known to its guide alone
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)  # which takes minutes on a CPU
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "guide"}
    if page == TRAINERS:
        store = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        for key, value in store.items():  # the variables that torchrun sets
            monkeypatch.setenv(key, value)
    if page == ELSEWHERE:
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained("model")
        names |= {"name": "model", "path": "here", "inputs": {"input_ids": torch.randint(2, 64, (1, 40))}}
    for block in BLOCK.finditer(PAGES[page]):
        line = PAGES[page].count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), ROOT / page, "exec"), names)


def parsed(words):
    """The parameters that a command line means; raises what a user would see if it means none."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group of commands: the next word names one
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words).params


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    given = parsed(shlex.split(line, comments=True)[1:])
    methods = given.get("method") or []
    for method in [methods] if isinstance(methods, str) else methods:
        if not method.startswith("@"):  # names a file, which these tests do not have
            choice_from_text(method)
    if given.get("layers"):
        parse_layers(given["layers"])


def test_every_command_is_shown():
    assert {line.split()[1] for line in COMMANDS} == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGES[page]):
        if not target.startswith("https://"):
            assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page):
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(?:\.{3})?([\w.-]*\d{8}T\d{6}Z)(?:\.json)?`", PAGES[page]):
        assert [found for found in RESULTS if found.endswith(name)], name


def test_the_reference_holds_every_public_name():
    shown = [name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)]
    for name in shown:
        assert pkgutil.resolve_name(name).__doc__, name
    missing = set(condense.__all__) - {name.split(".")[-1] for name in shown} - {"__version__"}
    assert not missing, f"add ::: condense.{missing} to a page of docs/api"
