"""The tables of docs/serving.md are those of the result files that the page names."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "serving"))

import serving_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving.md"


def test_the_page_is_as_the_results_fill_it(tmp_path):
    copy = Path(shutil.copy(PAGE, tmp_path))
    serving_page.fill(copy)
    assert copy.read_text() == PAGE.read_text()


def test_a_page_without_results_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- paged -->\n<!-- /paged -->\n")
    with pytest.raises(ValueError, match="must name its result files"):
        serving_page.fill(page)


def test_a_table_says_what_rounds_do_not_share():
    def run(*steps):
        rows = zip((1, 2), steps, strict=False)
        return {"decode-4097": [[{"rows": n, "step_ms": {"median": ms}, "preempted": 0} for n, ms in rows]]}

    table = serving_page._decode_table({"dense": [run(4.0)], "condensed": [run(2.0, 2.5), run(2.0, 2.7)]}, 4097)
    assert table.splitlines()[2:] == [
        "| 1 | 4.00, 250 | 2.00, 500 | 2.00x |",
        "| 2 | do not fit | 2.60 (2.50 to 2.70), 769 | 3.1x of its best |",
    ]
