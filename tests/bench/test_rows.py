"""Ratios and crossovers of rows as result files hold them, and the names of these files."""

import pytest
import torch
from speed.rows import crossover, result_path, speedups


def row(runner, length, ms, *, op="forward", condensed=False, mask=None):
    times = None if ms is None else {"median_ms": ms}
    return {"op": op, "runner": runner, "condensed": condensed, "mask": mask, "length": length, "times": times}


def test_ratios_are_to_baselines_of_the_same_length_and_mask():
    rows = [
        row("cudnn", 8, 10.0),
        row("flash", 8, None),
        row("cudnn", 16, 99.0),
        row("flex_mask", 8, 3.0, mask="a"),
        row("flex_mask", 8, 7.0, mask="b"),
        row("cudnn", 8, 77.0, op="decode"),
        row("ours", 8, 2.0, condensed=True, mask="a"),
        row("ours", 8, 4.0, op="layer", condensed=True, mask="a"),
        row("ours", 16, None, condensed=True, mask="a"),
    ]
    ratios = [speedups(r, rows, "times") for r in rows if r["condensed"]]
    # the layer makes its entries, FlexAttention got them
    assert ratios == [{"cudnn": 5.0, "flex_mask": 1.5}, {"cudnn": 2.5}, {}]


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ({10: 0.5, 100: 2.0, 1000: 12.5}, 100),
        ({10: 2.0, 100: 2.0}, 10),
        ({10: 2.0, 100: 0.9}, None),
        ({10: 2.0, 100: 0.9, 1000: 1.0}, 1000),
        ({}, None),
    ],
)
def test_crossover_is_where_it_stays_faster(ratios, length):
    assert crossover(ratios) == length


def test_a_result_file_says_what_was_measured_where(tmp_path):
    path = result_path(tmp_path / "new", "kernel", "h4-kv2", torch.device("cpu"))
    assert path.parent.is_dir()
    assert path.match("bench-kernel-h4-kv2-cpu-*-20*Z.json")
