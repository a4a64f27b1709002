"""The tables of docs/recall.md are those of the result file that the page names."""

import math
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import needed
import zero_shot_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recall.md"


def test_the_page_is_as_the_results_fill_it(tmp_path):
    results = ROOT / re.search(r"`(benchmarks/results/zero-shot-\S+\.json)`", PAGE.read_text())[1]
    copy = Path(shutil.copy(PAGE, tmp_path))
    zero_shot_page.fill(copy, results)
    assert copy.read_text() == PAGE.read_text()


def test_groups_that_must_be_open_follow_a_power_of_the_length():
    def points(r):  # where the loss comes down to the bound, on a line over logarithms
        return [(n, needed.BOUND - 0.02 * math.log(n / r)) for n in (2, 8, 32, 128, 512)]

    groups = [(length, needed.needed(points(0.25 * length**0.5))) for length in (2048, 8192, 32768)]
    assert [r for _, r in groups] == pytest.approx([0.25 * length**0.5 for length, _ in groups])
    assert needed.predicted([*groups, (1024, None)]) == pytest.approx(0.25 * 131072**0.5)
    assert needed.needed([(2, 0.005), (8, 0.001)]) is None
    assert needed.predicted(groups[:1]) is None


def test_an_unmeasured_row_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- zero-shot llama 4096 -->\n| |\n|---|\n| recall r=5 | |\n<!-- /zero-shot -->\n")
    results = next((ROOT / "benchmarks" / "results").glob("zero-shot-h200-*.json"))
    with pytest.raises(ValueError, match="no run of llama 4096 recall r=5"):
        zero_shot_page.fill(page, results)
