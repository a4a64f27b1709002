"""What the README shows works: its Python runs, its commands exist, its files are there, and it stays short."""

import re
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import condense
from condense.cli.main import app
from condense.models import condensed_layers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


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
    assert condensed_layers(reloaded) == dict.fromkeys(range(2), condense.Method.parse("recall-host"))


def test_commands_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"`condense ([a-z]+)", README)) <= set(commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake (\w+) {2,}#|`make (\w+)`", README)
    assert len(targets) >= 3
    for target in map("".join, targets):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_named_exist() -> None:
    paths = re.findall(r"\b(?:benchmarks|docs|src)/[\w./-]*\w", README) + re.findall(r"\]\((\w+\.md)\)", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("expression", sorted(set(re.findall(r"`((?:[A-Z]\w+)\([^`)]*\))`", README))))
def test_settings_shown_are_accepted(expression: str) -> None:
    assert isinstance(eval(expression, vars(condense)), condense.Method)
