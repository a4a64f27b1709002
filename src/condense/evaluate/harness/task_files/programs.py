"""MBPP: which problems stand in the prompt, and whether a program passes its tests.

The harness imports this file by the names in the YAML.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

SECONDS = 3.0  # most seconds that a program may take, as with the metric code_eval


def examples(problems: Any) -> list[dict[str, Any]]:
    """The three problems of the prompt in the paper and the harness: numbers 2, 3 and 4."""
    return [{**problem, "is_fewshot": True} for problem in problems if problem["task_id"] in (2, 3, 4)]


def pass_at_1(references: Sequence[str], predictions: Sequence[str]) -> float:
    """Share of programs that run to the end with their tests behind them.

    Raises ValueError unless the environment has ``HF_ALLOW_CODE_EVAL=1``, which the metric code_eval asks for too.
    """
    if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
        raise ValueError("mbpp runs the programs that the model writes: allow it by HF_ALLOW_CODE_EVAL=1")
    return sum(map(_passes, predictions, references)) / len(references)


def _passes(program: str, tests: str) -> bool:
    """True if a process of its own, in an empty folder, gets past the tests in time."""
    end = secrets.token_hex(16)  # printed last, so that a program that leaves early does not pass
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", f"{program}\n{tests}\nprint({end!r})"],
                cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a program with a null byte
            return False
    return done.returncode == 0 and done.stdout.endswith(f"{end}\n".encode())
