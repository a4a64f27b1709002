"""The studies as data: every row of the page has a run, every run a base, and what is claimed equal is equal."""

import sys
from pathlib import Path

import pytest

import condense
from condense.ops import POOLINGS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import costs
import figures
import studies
import tables
import zero_shot

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


def _trained(loss, shares):
    history = [{"step": 100 * i, "condensed_answer_accuracy": share} for i, share in enumerate(shares, 1)]
    text = [{"name": name, "loss": loss + i, "accuracy": 0.5, "method": condense.LCA(window=128).to_dict()}
            for i, name in enumerate(("own", "g=4", "w=512"))]  # fmt: skip
    return {"run": {"phase": {"sequence_length": 2048}}, "history": history, "text": text}


def test_when_a_run_learned_is_told_seed_by_seed():
    runs = {"mla-lca-s0": _trained(3.0, (0.3, 0.9, 1.0)), "mla-lca-s2": _trained(3.5, (0.3, 0.5, 0.89))}
    found = figures.figures_of(runs, "mla-lca", "own")
    assert found.learned == "200; never"
    assert found.loss == "3.250 (3.000 to 3.500)"
    assert figures.figures_of(runs, "mla-lca", "g=4").learned == ""


def test_costs_stand_beside_the_losses_of_the_same_setting():
    methods = (condense.LCA(), condense.LCA(group_size=4), condense.LCA(window=512), condense.LCA(window=128))
    rows = [
        {"method": m.to_dict(), "first": {"median_ms": 1e3 * i}, "step": {"median_ms": i}, "cache_bytes": i}
        for i, m in enumerate(methods, 1)
    ]
    found = costs.setting_costs({"mla-lca-s0": _trained(3.0, ()), "mla-lca-s1": _trained(3.5, ())}, rows)
    assert [(cost.sweep, cost.value, cost.loss, cost.first_s) for cost in found] == [
        ("g", 4, 4.25, 2.0), ("g", 16, 3.25, 1.0), ("w", 128, 3.25, 4.0), ("w", 512, 5.25, 3.0), ("w", 1024, None, 1.0)
    ]  # fmt: skip


def test_times_of_dga_stand_beside_the_losses_of_the_same_setting():
    labels = [label for label, *_ in costs._DGA]
    losses = dict(zip(labels, range(1, 1 + len(labels)), strict=True))
    runs = {f"{prefix}-s0": {"text": [{"name": "own", "loss": losses[label]}]} for label, prefix, _ in costs._DGA}
    sparse = condense.DGA(group_size=64).to_dict()
    rows = [
        {"op": "layer", "length": 32768, "method": sparse, "times": {"median_ms": 2.5}},
        {"op": "decode", "length": 32768, "method": sparse, "times": {"median_ms": 0.0139}},
        {"op": "layer", "length": 32768, "method": None, "times": {"median_ms": 9.0}},
    ]
    lines = costs.dga_costs_table(runs, rows).splitlines()[2:]
    assert lines[labels.index("m 64")] == f"| m 64 | {losses['m 64']:.3f} |  | 2.5 ms |  | 13.9 us |  |"
    assert lines[0] == "| m 4 | 1.000 |  |  |  |  |  |"
    # what was timed is what was trained, but for the window
    for _, prefix, changes in costs._DGA:
        trained = RUNS[f"{prefix}-s0"].methods["own"]
        assert condense.DGA(**changes) == trained.replace(
            window=condense.DGA().window, allow_future=changes.get("allow_future", False)
        )


def test_every_length_is_trained_from_the_shorter_one():
    runs = zero_shot.zero_shot_runs(0)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) == 9
    for before, run in zip([None, *runs], runs, strict=False):
        assert run.base == (None if run.phase.sequence_length == 512 else before.name)
        assert (run.methods == {}) == (run.phase.sequence_length == 512)


def test_the_window_of_the_zero_shot_study_holds_as_much_as_cca():
    rows = zero_shot.methods(4096)
    assert figures.num_seen(rows["window"], 4096) == figures.num_seen(rows["cca"], 4096)
