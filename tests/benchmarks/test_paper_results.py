"""docs/results.md: every table and figure of the papers has a row, and every number is a result file's."""

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
