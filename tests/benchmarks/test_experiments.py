"""The studies as data: every row of the page has a run, every run a base, and what is claimed equal is equal."""

import sys
from pathlib import Path

import pytest

import condense
from condense.ops import POOLINGS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import figures
import studies
import tables

RUNS = {run.name: run for run in studies.all_runs()}


def test_names_are_unique_and_bases_come_first():
    names = [run.name for run in studies.all_runs()]
    assert len(set(names)) == len(names)
    for run in studies.all_runs():
        assert run.base is None or names.index(run.base) < names.index(run.name)


@pytest.mark.parametrize("row", [row for rows in tables.TABLES.values() for row in rows], ids=str)
def test_every_row_of_the_page_is_measured(row):
    _, prefix, method = row
    assert method in RUNS[f"{prefix}-s0"].methods


def test_the_grid_is_whole():
    pairs = {(key, value) for key in POOLINGS for value in POOLINGS}
    measured = {tuple(n[len("mla-pooling=") : -len("-s0")].split("-")) for n in RUNS if n.startswith("mla-pooling=")}
    assert {pair for pair in measured if len(pair) == 2} >= pairs - {("select", "weighted")}


@pytest.mark.parametrize(("labels", "spread"), [(("lca", "dga-sparse", "anchored-sparse", "window"), 0.02)])
def test_equal_caches_are_equal(labels, spread):
    sizes = [figures.num_seen(RUNS[f"llama-{label}-s0"].methods["own"], studies.LENGTH) for label in labels]
    assert max(sizes) - min(sizes) <= spread * max(sizes)


def test_more_entries_are_equal_too():
    six = figures.num_seen(RUNS["llama-lca-g=6-s0"].methods["own"], studies.LENGTH)
    assert six == pytest.approx(figures.num_seen(RUNS["llama-dga-s0"].methods["own"], studies.LENGTH), rel=0.03)


@pytest.mark.parametrize(
    ("method", "seen"),
    [
        (condense.Dense(), 2048),
        (condense.LCA(window=128), 248),
        (condense.StreamingLLM(sink=4, window=244), 248),
        (condense.DGA(selection="prompt", gamma=0.5, min_focal=0, group_size=16), 1024 + 64),
    ],
)
def test_what_a_cache_holds(method, seen):
    assert figures.num_seen(method, 2048) == seen
