"""docs/studies/results.md: every table and figure of the papers has a row, and every number is a result file's."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import paper_results

INVENTORY = [f"{paper}{n}" for paper, count in (("C", 12), ("D", 15), ("L", 17)) for n in range(1, count + 1)]


def test_the_page_is_what_the_files_say():
    assert paper_results.page() == paper_results.PAGE.read_text(encoding="utf-8")


def test_every_table_and_figure_has_a_row():
    rows = re.findall(r"^\| ([CDL]\d+) \|(.*)\|$", paper_results.TEMPLATE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == INVENTORY
    for name, row in rows:
        cells = [cell.strip() for cell in row.split(" | ")]
        assert len(cells) == 4, name
        assert all(cells[:3]), name


def test_a_number_that_no_file_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no result file"):
        paper_results.Figures(tmp_path).figure("model llama-3.1-8b first 4096 dense")


def test_models_that_were_adapted_to_kda_have_a_table_once_there_is_a_file(tmp_path):
    figures = paper_results.Figures(tmp_path)
    assert "not measured" in figures.figure("kda adapted")
    figure = {"found": {"share": 0.5, "low": 0.4, "high": 0.6, "total": 320}, "text_loss": 2.5, "standard_error": 0.01}
    phase = {"steps": 350, "batch_size": 8, "sequence_length": 4096}
    runs = {
        "base": {"model": "trained", "dense": figure, "condensed": figure},
        "kda": {"title": "KDA in all layers", "phase": phase, "after": figure | {"text_loss": 3.25}},
    }
    (tmp_path / "kda-adapted-h200-20260101T000000Z.json").write_text(json.dumps({"results": runs}))
    text = figures.figure("kda adapted")
    assert "11.5 million tokens in 350 steps" in text
    assert text.splitlines()[-1] == "| KDA in all layers | 0.500 [0.400, 0.600] | 3.250 ± 0.010 |"
