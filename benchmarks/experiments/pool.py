"""Many runs on many GPUs: processes that take the next run whose base is there, until none is left or time is up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

from execute import Setting, execute
from studies import Run

_WAIT_S = 2.0
# a line of `condense.train` for a phase of one kind of steps
_POINT = re.compile(r"step (\d+)/(\d+) .*(?:dense|condensed)_loss (\S+)  (?:dense|condensed)_answer_accuracy (\S+)")


def work(runs: Sequence[Run], setting: Setting, deadline: float) -> None:
    """What one process does. deadline: ``time.time()`` after which no run is begun.

    A run is claimed by a file that only one process can create. A run that fails says why in a file beside it, and
    the process goes on with the next; nobody waits for a base that failed.
    """
    bases = {run.base for run in runs}
    while time.time() < deadline:
        open_runs = [run for run in runs if not (_claim(setting, run.name).exists() or _is_over(setting, run))]
        ready = [run for run in open_runs if run.base is None or setting.model_of(run.base).exists()]
        claimed = next((run for run in ready if _take(_claim(setting, run.name))), None)
        if claimed is None:
            if not open_runs:
                return
            time.sleep(_WAIT_S)
            continue
        began = time.monotonic()
        print(f"{claimed.name}: begun", flush=True)
        try:
            execute(claimed, setting, keep_model=claimed.name in bases)
            print(f"{claimed.name}: done in {time.monotonic() - began:.0f} s", flush=True)
        except Exception:
            _error(setting, claimed.name).write_text(traceback.format_exc())
            print(f"{claimed.name}: failed\n{traceback.format_exc()}", flush=True)


def start(arguments: Sequence[str], setting: Setting, gpus: Sequence[int], slots: int) -> int:
    """Start ``slots`` processes per GPU, each of which runs this program's ``work``; wait for all of them."""
    for folder in ("claims", "results", "models", "logs"):
        (setting.work / folder).mkdir(parents=True, exist_ok=True)
    for stale in (setting.work / "claims").glob("*.claim"):
        stale.with_suffix(".error").unlink(missing_ok=True)
        stale.unlink()
    processes = []
    for slot in range(slots):
        for gpu in gpus:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
            log = (setting.work / "logs" / f"gpu{gpu}-{slot}.txt").open("w")
            command = [sys.executable, str(Path(__file__).parent), "work", *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    # a process that was killed has the signal's number, negative
    return max((abs(process.wait()) for process in processes), default=0)


def cut_off(work: Path, finished: Collection[str]) -> dict[str, list[dict[str, float]]]:
    """Of runs that were begun and are not ``finished``: step, steps, loss and answers right, as logged in training."""
    found: dict[str, list[dict[str, float]]] = {}
    for log in sorted((work / "logs").glob("*.txt")):
        name = None
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if begun := re.match(r"(\S+): begun", line):
                name = begun[1]
            elif name is not None and name not in finished and (point := _POINT.search(line)):
                step, steps, loss, answers = point.groups()
                entry = {"step": int(step), "of": int(steps), "loss": float(loss), "answers": float(answers)}
                found.setdefault(name, []).append(entry)
    return found


def _claim(setting: Setting, name: str) -> Path:
    return setting.work / "claims" / f"{name}.claim"


def _error(setting: Setting, name: str) -> Path:
    return _claim(setting, name).with_suffix(".error")


def _is_over(setting: Setting, run: Run) -> bool:
    """True if there is nothing left to do, or nothing to begin with."""
    base = run.base
    lost = base is not None and _error(setting, base).exists() and not setting.model_of(base).exists()
    return lost or setting.result_of(run.name).exists()


def _take(claim: Path) -> bool:
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
