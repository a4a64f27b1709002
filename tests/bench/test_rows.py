"""Ratios, crossovers, changes: arithmetic on rows as result files hold them."""

import math

import pytest

from condense.bench.history import with_changes
from condense.bench.rows import crossover, medians, with_ratios


def row(runner, length, ms, *, op="forward", condensed=False, mask=None):
    times = None if ms is None else {"median_ms": ms}
    return {
        "op": op,
        "runner": runner,
        "condensed": condensed,
        "mask": mask,
        "method": {"method": "lca"} if condensed else None,
        "length": length,
        "times": times,
    }


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
        row("ours", 8, 1.0, op="pooling", condensed=True, mask="a"),
        row("ours", 16, None, condensed=True, mask="a"),
    ]
    ratios = [r["speedup"] for r in with_ratios(rows) if r["condensed"]]
    # the layer makes its representatives, FlexAttention got them
    assert ratios == [{"cudnn": 5.0, "flex_mask": 1.5}, {"cudnn": 2.5}, {}, {}]


def test_crossover_lies_between_measured_points():
    theirs = {10: 1.0, 100: 10.0, 1000: 100.0}
    assert crossover({10: 2.0, 100: 5.0, 1000: 8.0}, theirs) == pytest.approx(math.sqrt(10 * 100))
    assert crossover({10: 0.5, 100: 5.0}, theirs) == 10
    assert crossover({10: 0.5, 100: 11.0}, theirs) is None
    assert crossover({10: 0.5, 100: 11.0, 1000: 90.0}, theirs) > 100
    assert crossover({7: 1.0}, theirs) is None


def test_medians_take_the_fastest():
    rows = [row("a", 8, 3.0), row("b", 8, 2.0), row("b", 16, 9.0), row("a", 16, None), row("c", 8, 1.0)]
    assert medians(rows, ["a", "b"], op="forward") == {8: 2.0, 16: 9.0}


def test_changes_are_of_the_same_row():
    now = [row("a", 8, 3.0), row("a", 16, 3.0), row("b", 8, None)]
    before = [row("a", 8, 2.0), row("a", 16, 1.0, op="decode"), row("b", 8, 2.0)]
    assert [r["change"] for r in with_changes(now, before, ("times",))] == [{"times": 1.5}, {}, {}]
