"""What the README shows works: its Python runs, its commands parse, its files exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import condense
from condense.cli.main import app
from condense.cli.options import parse_layers, parse_method
from condense.models import condensed_layers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [line for language, code in BLOCKS if language != "python" for line in code.splitlines() if line.strip()]
INLINE = re.findall(r"`(condense [a-z][^`]*)`", README)
COMMANDS = [words[1:] for words in (shlex.split(line, comments=True) for line in SHELL) if words[0] == "condense"]


def test_python_runs_as_it_stands(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "stock")
    ids = torch.arange(8, 48)[None]
    names = {
        "name": tmp_path / "stock",
        "path": tmp_path / "condensed",
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "pad_token_id": 0},
    }
    assert len(PYTHON) == 1
    exec(PYTHON[0], names)
    reloaded = AutoModelForCausalLM.from_pretrained(names["path"])
    assert condensed_layers(reloaded) == dict.fromkeys(range(2), condense.CCA(group_size=16, window=1024))


def test_there_are_commands() -> None:
    assert {words[0] for words in COMMANDS} == {"analyze", "bench", "compare", "generate", "inspect", "train"}
    assert INLINE


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    command, rest = typer.main.get_command(app), list(words)
    while hasattr(command, "commands"):  # a group, with the name of one of its commands next
        command = command.commands[rest.pop(0)]
    given = command.make_context(words[0], rest).params
    methods = given.get("method") or []
    for method in [methods] if isinstance(methods, str) else methods:
        parse_method(method)
    if given.get("layers"):
        parse_layers(given["layers"])


def test_what_the_text_names_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {line.split()[1] for line in INLINE} <= set(commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake (\w+) {2,}#", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    paths = re.findall(r"\b(?:benchmarks|docs|src)/[\w./-]*\w", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("expression", sorted(set(re.findall(r"`((?:CCA|DGA|LCA|StreamingLLM)\([^`)]+\))`", README))))
def test_settings_shown_are_accepted(expression: str) -> None:
    assert isinstance(eval(expression, vars(condense)), condense.Method)
