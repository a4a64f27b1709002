"""How a model is best adapted: equal steps of different recipes, and what an adaptation costs.

    python benchmarks/adaptation encode --data TRAIN... --characters 9000000 --output train.npz
    python benchmarks/adaptation study --train train.npz --test test.npz --work WORK --seeds 0,1 --gpus 0,1
    python benchmarks/adaptation gather --work WORK --output STUDY.json
    python benchmarks/adaptation shape --shape llama-3.1-8b --train lora --length 32768 --output SHAPE.json
    python benchmarks/adaptation longest --shape llama-3.2-1b --train all --output LONGEST.json
    python benchmarks/adaptation page --results RESULTS... --output docs/studies/adaptation.md

`study` trains one base per seed, then its arms side by side on the seed's GPU. ``WORK/results`` has one file per arm,
``WORK/bases`` one per base; `gather` makes one of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from arms import ARMS, BASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    encode = commands.add_parser("encode")
    encode.add_argument("--data", type=Path, nargs="+", required=True)
    encode.add_argument("--characters", type=int, required=True, help="of each file, at most")
    encode.add_argument("--output", type=Path, required=True)
    for name in ("study", "base", "arm"):
        command = commands.add_parser(name)
        command.add_argument("--train", type=Path, required=True)
        command.add_argument("--test", type=Path, required=True)
        command.add_argument("--work", type=Path, required=True)
        command.add_argument("--steps", type=int, default=1000, help="of an arm")
        command.add_argument("--base-steps", type=int, default=2400, help="of a base's first phase, at most")
        command.add_argument("--sequences", type=int, default=30, help="held-out texts per figure")
        command.add_argument("--seeds", default="0", help="numbers such as 0,1")
        command.add_argument("--gpus", default="0", help="numbers of GPUs; seeds are dealt out to them")
        command.add_argument("--arms", default=",".join(ARMS))
        command.add_argument("--slots", type=int, default=4, help="arms at a time on one GPU")
        command.add_argument("--seconds", type=float, default=3600, help="no arm is begun later")
    gather = commands.add_parser("gather")
    gather.add_argument("--work", type=Path, required=True)
    gather.add_argument("--output", type=Path, required=True)
    for name in ("shape", "longest"):
        command = commands.add_parser(name)
        command.add_argument("--shape", default="llama-3.1-8b")
        command.add_argument("--train", default="lora", help="all or lora, of rank 16")
        command.add_argument("--ways", nargs="+", default=["condensed, distilled", "condensed", "dense"])
        command.add_argument("--length", type=int, default=32768)
        command.add_argument("--steps", type=int, default=3, help="of which the first warms up")
        command.add_argument("--output", type=Path, required=True)
    page = commands.add_parser("page")
    page.add_argument("--results", type=Path, nargs="+", required=True)
    page.add_argument("--shapes", type=Path, nargs="*", default=[])
    page.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "study":
        sys.exit(study(options))
    elif options.command == "gather":
        files = [path for folder in ("bases", "results") for path in sorted((options.work / folder).glob("*.json"))]
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        options.output.write_text(json.dumps(documents) + "\n", encoding="utf-8")
    elif options.command == "page":
        from page import write_page

        write_page(options.results, options.shapes, options.output)
    elif options.command in ("shape", "longest"):
        import shape

        {"shape": shape.measure, "longest": shape.longest}[options.command](options)
    else:
        import work

        getattr(work, options.command)(options)


def study(options: argparse.Namespace) -> int:
    """Deal the seeds out to the GPUs and wait; returns the number of processes that failed."""
    gpus, began, failed = options.gpus.split(","), time.monotonic(), 0
    arms = options.arms.split(",")
    # bases, then arms: (seed, name) waiting on each GPU
    waiting: dict[str, list[tuple[str, str]]] = {gpu: [] for gpu in gpus}
    for index, seed in enumerate(options.seeds.split(",")):
        waiting[gpus[index % len(gpus)]] += [(seed, base) for base in dict.fromkeys(ARMS[arm].base for arm in arms)]
    running: dict[subprocess.Popen, tuple[str, str, str]] = {}
    while running or any(waiting.values()):
        for gpu, jobs in waiting.items():
            while jobs and sum(place == gpu for place, _, _ in running.values()) < options.slots:
                seed, name = jobs.pop(0)
                if name not in BASES and time.monotonic() - began > options.seconds:
                    continue
                running[_start(options, gpu, seed, name)] = gpu, seed, name
        for process in [process for process in running if process.poll() is not None]:
            gpu, seed, name = running.pop(process)
            failed += process.returncode != 0
            if process.returncode == 0:
                waiting[gpu] += [(seed, arm) for arm in arms if ARMS[arm].base == name]
        time.sleep(0.2)
    return failed


def _start(options: argparse.Namespace, gpu: str, seed: str, name: str) -> subprocess.Popen:
    command = [sys.executable, __file__.rpartition("/")[0], "base" if name in BASES else "arm"]
    for option in ("train", "test", "work", "steps", "base_steps", "sequences"):
        command += ["--" + option.replace("_", "-"), str(getattr(options, option))]
    command += ["--seeds", seed, "--arms", name]
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.work / f"{name}-s{seed}.log").open("w") as log:
        return subprocess.Popen(
            command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, stdout=log, stderr=subprocess.STDOUT
        )


if __name__ == "__main__":
    main()
