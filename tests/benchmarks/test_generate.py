"""`benchmarks/generate.py`: what a cell says, that a wrong method is not timed, and what a reading's figures are."""

import generate
import pytest
from generate import Cell
from models import tiny
from speed.budget import Verdict

import condense


def test_a_cell_is_tokens_rows_chunk_and_attention():
    assert Cell.parse("131072=dense") == (131072, 1, 0, "dense")
    assert Cell.parse("4096x8/1024=recall:store=host") == (4096, 8, 1024, "recall:store=host")
    assert Cell.parse("4096=recall-host").method == condense.Method.parse("recall-host")
    for text in ("dense", "4096", "4096x=dense", "4096=nope"):
        with pytest.raises(ValueError, match="must be"):
            Cell.parse(text)


def test_figures_are_of_the_named_method_and_what_does_not_agree_is_not_timed(monkeypatch):
    model, cells = tiny.model("llama"), [Cell.parse(f"60={name}") for name in ("dense", "cca:group_size=4,window=8")]
    assert [generate.wrong(model, cell) for cell in cells] == [None, None]
    dense, cca = (generate.measured(model, cell, 4) for cell in cells)
    assert len(cca["steps_ms"]) == 4
    assert cca["device_cache_bytes"] < dense["device_cache_bytes"]
    assert not condense.models.condensed_layers(model)
    monkeypatch.setattr(generate.ModelGate, "check", lambda *args: Verdict(3.0))
    assert generate.wrong(model, cells[1]) == "wrong: logits 3 times the bound apart, not timed"
