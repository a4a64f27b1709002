"""`benchmarks/generate.py`: what a cell says, that a wrong method is not timed, and what a reading's figures are."""

import sys
from pathlib import Path

import pytest
from models import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generate
from generate import Cell
from speed.budget import Verdict

import condense


def test_a_cell_is_tokens_rows_chunk_and_attention():
    assert Cell.parse("131072=dense") == (131072, 1, 0, "dense")
    assert Cell.parse("4096x8/1024=recall:store=host") == (4096, 8, 1024, "recall:store=host")
    assert Cell.parse("4096=recall-host").method == condense.Method.parse("recall-host")


@pytest.mark.parametrize("text", ["dense", "4096", "4096x=dense", "4096=nope"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        Cell.parse(text)


def test_what_does_not_agree_is_not_timed(monkeypatch):
    model, cell = tiny.model("llama"), Cell.parse("40=cca:group_size=4,window=8")
    assert generate.wrong(model, cell) is None
    assert generate.wrong(model, cell._replace(attention="dense")) is None
    monkeypatch.setattr(generate.ModelGate, "check", lambda *args: Verdict(3.0))
    assert generate.wrong(model, cell) == "wrong: logits 3 times the bound apart, not timed"


def test_figures_are_of_the_named_method_and_the_model_is_stock_again():
    model = tiny.model("llama")
    dense, cca = (generate.measured(model, Cell.parse(f"60={x}"), 4) for x in ("dense", "cca:group_size=4,window=8"))
    assert len(cca["steps_ms"]) == 4
    assert cca["device_cache_bytes"] < dense["device_cache_bytes"]
    assert not condense.models.condensed_layers(model)
