"""The figures of docs/start-here.md are those that `condense inspect` gives."""

import re
from pathlib import Path

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
    assert len(re.findall(r"\d\.\d\d GiB", text)) == 7
