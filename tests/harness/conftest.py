"""`condense eval` with lm-evaluation-harness itself, offline.

`make test-eval` runs this folder, in an environment of its own; without lm_eval installed it is not collected.
"""

import contextlib
import functools
import importlib.util
import io
import os
import sys

import pytest

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
collect_ignore_glob = [] if HAS_LM_EVAL else ["test_*.py"]

if HAS_LM_EVAL:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


@pytest.fixture(scope="session", autouse=True)
def one_index():
    """The harness reads its 14,000 tasks' files once for all tests."""
    from lm_eval.tasks import manager as module

    build = module.TaskIndex.build
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(lambda paths: build(list(paths)))
        patch.setattr(module.TaskIndex, "build", lambda self, paths: dict(cached(tuple(paths))))
        yield


@pytest.fixture
def command(monkeypatch):
    """`condense eval ARGUMENTS` in this process: its exit code, its output and its messages."""
    from condense.cli.main import main

    def run(*arguments):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["condense", "eval", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0, out.getvalue(), err.getvalue()

    return run
