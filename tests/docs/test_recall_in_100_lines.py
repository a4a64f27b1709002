"""The page that shows Recall on one head is the library's function, and runs as it stands."""

import runpy
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "recall_in_100_lines.py"
# scores and outputs are sums of at most 16 and 100 products of normal numbers, below 5 in size, added in another order
TOLERANCE = 2 * (16 + 100) * 5 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_recall": 0}, {"num_recall": 100}, {"group_size": 6, "window": 0, "index_size": 3}],
    ids=["some open", "none open", "all open", "no window"],
)
def test_it_is_the_librarys_function(changes):
    page = runpy.run_path(str(PAGE))
    assert page["compare"](page["Settings"](**changes)) <= TOLERANCE


def test_it_runs_and_fits_on_a_page(capsys):
    runpy.run_path(str(PAGE), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) <= TOLERANCE
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 100
