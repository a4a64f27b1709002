"""The parts of `condense eval` that need no harness: intervals, local files, the page."""

import math
import statistics
import sys

import numpy as np
import pytest

from condense.cli.main import main
from condense.evaluate.bootstrap import Interval, bootstrap
from condense.evaluate.harness import Score, write_report
from condense.evaluate.harness.local import find
from condense.tasks import read_json_lines


def test_the_interval_of_a_mean_is_that_of_a_normal_distribution():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400).tolist()
    found = bootstrap(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert found.value == pytest.approx(statistics.fmean(values))
    # 1,000 resamples place the ends to about 0.06 standard errors (2 standard errors of a 2.5 % quantile are 0.13)
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.25 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.25 * error)
    assert bootstrap(values) == found
    assert bootstrap(values, statistics.fmean).low == pytest.approx(found.low, abs=0.25 * error)


def test_one_value_has_no_interval():
    found = bootstrap([1.0])
    assert (found.value, found.n) == (1.0, 1)
    assert math.isnan(found.low)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


def test_missing_files_are_named_with_their_source(tmp_path):
    with pytest.raises(ValueError, match="lost-in-the-middle"):
        find(tmp_path, "multidoc_em", "nq-open-*")
    (tmp_path / "nq-open-20docs.jsonl").write_text("{}\n")
    assert find(tmp_path, "multidoc_em", "nq-open-*") == [tmp_path / "nq-open-20docs.jsonl"]


def test_lines_that_are_no_objects_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    with pytest.raises(ValueError, match="line 3"):
        list(read_json_lines(path))


def test_the_page_stands_alone_and_shows_every_score(tmp_path):
    def score(method, by, value):
        return Score(method, "task<1>", "acc,none", by, Interval(value, value - 0.1, value + 0.1, 7), None)

    scores = [score(m, by, 0.123 * n) for n, m in ((1, "dense"), (5, "cca")) for by in ({}, {"depth": 0}, {"depth": 1})]
    page = write_report(tmp_path / "report.html", "Title & more", scores, {"device": "<cpu>"}).read_text()
    assert page.count("<svg") == 2
    for text in ("task&lt;1&gt;", "Title &amp; more", "&lt;cpu&gt;", "0.123", "0.615", "[0.515, 0.715]"):
        assert text in page
    assert "src=" not in page
    assert "href=" not in page
    with pytest.raises(FileExistsError):
        write_report(tmp_path / "report.html", "again", scores, {})


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["condense", "eval", "--task", "gsm8k", "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert "pip install 'lm-eval[longbench]>=0.4.13,<0.5' wonderwords" in capsys.readouterr().err
