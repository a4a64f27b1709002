"""Pages with figures and programs: docs/start-here.md, the notebook, and Recall on one head in 100 lines."""

import json
import re
import runpy
from pathlib import Path

import matplotlib
import pytest
import torch
from transformers import AutoModelForCausalLM

from condense.methods import Method
from condense.models.fit import cache_fits
from condense.models.shapes import shape_config
from condense.named import NAMED_SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "start-here.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fits():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config("qwen3-8b"))
    choices = {name: Method.parse(name) for name in NAMED_SETTINGS}
    free, limited = (
        {fit.name: fit for fit in cache_fits(model, choices, 131072, memory=80 * 10**9, host_memory=host)}
        for host in (None, 512 * 10**9)
    )
    return free | {"limited": limited["recall-host"]}


def kept(fit):
    return f"{fit.device_bytes / 2**30:.2f} GiB"


@pytest.mark.parametrize(
    ("name", "of_row"),
    [
        ("recall-device", '"recall-device"'),
        ("recall-host", '"recall-host"'),
        ("dense, FP8", "kv-cache-dtype fp8"),
        ("pooled", "condense train adapt"),
    ],
)
def test_a_row_has_the_bytes_and_the_requests(name, of_row, fits):
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and of_row in line)
    bytes_cell, requests_cell = (cell.strip() for cell in row.split("|")[3:5])
    host = f", and {fits[name].host_bytes / 2**30:.2f} GiB in host memory" if fits[name].host_bytes else ""
    assert bytes_cell == kept(fits[name]) + host
    limited = f"; {fits['limited'].requests} with 512 GB there" if host else ""
    assert requests_cell == f"{fits[name].requests}{limited}"


def test_the_prose_has_the_dense_caches(fits):
    text = " ".join(PAGE.split())
    dense, four = fits["dense"], fits["dense, 4 bits"]
    assert f"keeps {kept(dense)} for one of them, so {dense.requests} fit" in text
    assert f"would take {kept(four)}: {four.requests} fit" in text
    assert len(re.findall(r"\d\.\d\d GiB", text)) == 8


def test_the_row_of_vllm_has_its_requests(fits):
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and "`condense serve DIR`, which" in line)
    assert row.split("|")[4].strip() == f"{fits['recall-device'].served}"


NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first_look.ipynb"
CHEAP = "CHARACTERS, STEPS, LENGTH = 5_000, 3, 256"


def test_it_runs_and_shows_what_it_says(capsys):
    matplotlib.use("Agg")
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert "CHARACTERS, STEPS, LENGTH =" in sources[0]
    # a reader sees what it gives without running it
    assert all(
        cell["outputs"] for cell in document["cells"] if cell["cell_type"] == "code" and cell["execution_count"] > 1
    )
    names = {}
    for source in [CHEAP, *sources[1:]]:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    dense, learned, recall, window = names["outcomes"]
    assert dense.correct == recall.correct == len(names["keys"]) > 0
    assert window.correct < learned.correct
    assert learned.cache_bytes < dense.cache_bytes
    assert names["after"] < names["before"]
    assert "entries" in capsys.readouterr().out


RECALL_PAGE = Path(__file__).parents[2] / "docs" / "recall_in_100_lines.py"
# scores and outputs are sums of at most 16 and 100 products of normal numbers, below 5 in size, added in another order
TOLERANCE = 2 * (16 + 100) * 5 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_recall": 0}, {"num_recall": 100}, {"group_size": 6, "window": 0}],
    ids=["some open", "none open", "all open", "no window"],
)
def test_it_is_the_librarys_function(changes):
    page = runpy.run_path(str(RECALL_PAGE))
    assert page["compare"](page["Settings"](**changes)) <= TOLERANCE


def test_it_runs_and_fits_on_a_page(capsys):
    runpy.run_path(str(RECALL_PAGE), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition(" ")[2]) <= TOLERANCE
    assert len(RECALL_PAGE.read_text(encoding="utf-8").splitlines()) <= 100
