"""Measure whether Recall's settings transfer to models that nobody tuned them for, and what other forms of it lose.

    python benchmarks/transfer pack --data FOLDER --output CORPUS
    python benchmarks/transfer lease --corpus CORPUS --out OUT \\
        --plan 0:llama-77m:245:540:7 --plan 1:qwen3-83m:265:540
    python benchmarks/transfer table OUT/*.jsonl
    python benchmarks/transfer reduce OUT --device "NVIDIA H200" --commit COMMIT --output RESULTS/transfer.json

`pack` encodes text with the bundled tokenizer; `lease` trains and measures models, several per GPU one after another
(GPU, make, seconds of training, the second after the start by which measuring ends and, if the weights are to be kept
beside the results, their bits), and writes every result as soon as it is there: above, nine minutes on two H200. With
``--weights FOLDER`` models whose weights lie there are measured and not trained. With ``--adapt SECONDS`` the model is
adapted to pooled layers, form after form, or with ``--study calibrated`` to the allocations found for it, and this is
measured. `run` and `warm` are what it starts.
`reduce` adds a run to the file of `benchmarks/results` that the study's page is written from.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

_WARMING, _WORKERS = 5, 6
_STUDIES = ("transfer", "reread", "calibrated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("pack")
    command.add_argument("--data", type=Path, required=True, help="folder of the compressed JSON lines")
    command.add_argument("--output", type=Path, required=True)
    command.add_argument("--part-tokens", type=int, default=24_000_000)
    command.add_argument("--parts", type=int, default=1)
    command = commands.add_parser("lease")
    command.add_argument("--plan", action="append", required=True, help="GPU:MAKE:TRAIN_SECONDS:END_SECOND[:BITS]")
    _common(command)
    for name in ("run", "warm"):
        command = commands.add_parser(name)
        command.add_argument("--make", required=True)
        command.add_argument("--train-seconds", type=float, default=300)
        command.add_argument("--until", type=float, default=0, help="Unix time at which measuring ends")
        command.add_argument("--part", default="0/1")
        command.add_argument("--save-bits", type=int, default=0)
        _common(command)
    command = commands.add_parser("table")
    command.add_argument("results", type=Path, nargs="+")
    command.add_argument("--output", type=Path)
    command = commands.add_parser("reduce")
    command.add_argument("out", type=Path, help="folder that `lease` has written")
    command.add_argument("--study", default="transfer", choices=(*_STUDIES, "adapted"))
    command.add_argument("--device", required=True)
    command.add_argument("--commit", required=True)
    command.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "pack":
        from pack import pack

        pack(options.data, options.output, options.part_tokens, options.parts)
    elif options.command == "lease":
        lease(options)
    elif options.command == "table":
        from cells import page

        text = page(options.results)
        options.output.write_text(text) if options.output else print(text)
    elif options.command == "reduce":
        from reduced import add

        add(options.output, options.out, study=options.study, device=options.device, commit=options.commit)
    else:
        import one_model

        one_model.run(options) if options.command == "run" else one_model.warm(options)


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--corpus", type=Path, required=True, help="folder that `pack` has written")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--weights", type=Path, help="folder of weights that an earlier run has kept")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--workers", type=int, default=_WORKERS)
    command.add_argument("--adapt", type=float, default=0, help="adapt for so many seconds per form, and measure that")
    command.add_argument("--form", action="append", help="a form to adapt to; more by repeating; all if there is none")
    command.add_argument("--rate", type=float, action="append", help="a rate to adapt with; more by repeating")
    command.add_argument("--study", default="transfer", choices=_STUDIES, help="the arms to measure")
    command.add_argument("--tiny", action="store_true", help="four layers and short texts, to try everything out")


def lease(options: argparse.Namespace) -> None:
    """Per GPU one model after another; beside the training, processes that compile the kernels of all arms."""
    options.out.mkdir(parents=True, exist_ok=True)
    began, chains = time.time(), dict[str, list[list[str]]]()
    for entry in options.plan:
        gpu, make, seconds, end, *bits = entry.split(":")
        chains.setdefault(gpu, []).append([make, seconds, str(began + float(end)), *(bits or ["0"])])
    processes = []
    for gpu, chain in chains.items():
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "TOKENIZERS_PARALLELISM": "false"}
        script = Path(__file__).parent
        shared = ["--corpus", str(options.corpus), "--out", str(options.out), "--seed", str(options.seed)]
        shared += ["--workers", str(options.workers), "--study", options.study] + ["--tiny"] * options.tiny
        shared += ["--weights", str(options.weights)] if options.weights else []
        shared += ["--adapt", str(options.adapt)] + [x for form in options.form or [] for x in ("--form", form)]
        shared += [x for rate in options.rate or [] for x in ("--rate", str(rate))]
        lines, warming = [], []
        for make, seconds, until, bits in chain:
            given = ["--make", make, "--train-seconds", seconds, "--until", until, "--save-bits", bits, *shared]
            log = options.out / f"{make}.log"
            lines.append(_shell([sys.executable, str(script), "run", *given], log))
            warming.append(
                [[sys.executable, str(script), "warm", *given, "--part", f"{i}/{_WARMING}"] for i in range(_WARMING)]
            )
        processes.append(subprocess.Popen(["bash", "-c", "; ".join(lines)], env=environment))
        waits = [
            " & ".join(_shell(["nice", *one], options.out / "warm.log") for one in of_make) + " & wait"
            for of_make in warming
        ]
        if not options.tiny:
            processes.append(
                subprocess.Popen(["bash", "-c", "; ".join(waits)], env={**environment, "OMP_NUM_THREADS": "1"})
            )
    for process in processes:
        process.wait()
    (options.out / "done").write_text(json.dumps({"seconds": time.time() - began}))


def _shell(command: list[str], log: Path) -> str:
    return f"{shlex.join(command)} >> {log} 2>&1"


if __name__ == "__main__":
    main()
