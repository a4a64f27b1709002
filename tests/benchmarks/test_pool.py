"""Processes that share runs: what a failed run leaves behind, and who waits for it."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import pool
from execute import Setting
from studies import adapted, base_run, lca

BASE, AFTER = base_run("llama", 0), adapted("llama", "lca", lca())


@pytest.fixture
def setting(tmp_path):
    setting = Setting((), (), tmp_path)
    pool.start([], setting, gpus=[], slots=1)
    return setting


def _failing(run, setting, *, keep_model):
    raise RuntimeError("out of memory")


def _leave_files(run, setting, *, keep_model):
    for path in (setting.model_of(run.name), setting.result_of(run.name)):
        path.touch()


def test_nobody_waits_for_a_base_that_failed(setting, monkeypatch):
    monkeypatch.setattr(pool, "execute", _failing)
    monkeypatch.setattr(pool, "_WAIT_S", 0.01)
    deadline = time.time() + 30
    pool.work([BASE, AFTER], setting, deadline)
    assert time.time() < deadline
    assert [path.name for path in (setting.work / "claims").glob("*.error")] == [f"{BASE.name}.error"]


def test_what_failed_is_tried_again_and_forgotten(setting, monkeypatch):
    monkeypatch.setattr(pool, "execute", _failing)
    pool.work([BASE], setting, time.time() + 30)
    monkeypatch.setattr(pool, "execute", _leave_files)
    pool.start([], setting, gpus=[], slots=1)
    pool.work([BASE, AFTER], setting, time.time() + 30)
    assert all(setting.result_of(run.name).exists() for run in (BASE, AFTER))
    assert not list((setting.work / "claims").glob("*.error"))


def test_runs_that_were_cut_off_say_how_far_they_came(setting):
    line = "adapt step {}/1500  4K tokens/s  grad_norm 0.5  condensed_loss 1.9  condensed_answer_accuracy {}\n"
    (setting.work / "logs" / "gpu0-0.txt").write_text(
        "first: begun\n" + line.format(1500, 0.9) + "first: done in 9 s\nsecond: begun\n"
        "Writing model shards\n" + line.format(100, 0.25) + line.format(200, 0.5)
    )  # fmt: skip
    points = [{"step": 100 * n, "of": 1500, "loss": 1.9, "answers": 0.25 * n} for n in (1, 2)]
    assert pool.cut_off(setting.work, {"first"}) == {"second": points}
