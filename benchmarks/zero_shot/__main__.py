"""What keeps the quality of models that were trained with dense attention only; how `docs/studies/zero-shot.md` was made.

    python benchmarks/adaptation encode --data TRAIN... --characters 9000000 --output train.npz
    python benchmarks/zero_shot run --train train.npz --calibration c.npz --test test.npz --work WORK --seeds 0,1,2
    python benchmarks/zero_shot collect --work WORK --output RESULTS.json
    python benchmarks/zero_shot page --results RESULTS.json --output docs/studies/zero-shot.md

Texts to calibrate and to measure on are encoded likewise. `run` trains one model per seed, side by side on one GPU, and
measures each at every length; ``WORK/results`` gets a file per part as soon as it is there. A seed whose model is in
WORK already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from condense.results import refuse_existing, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "seed"):
        command = commands.add_parser(name)
        command.add_argument("--train", type=Path, required=True, help="encoded text to train on")
        command.add_argument("--calibration", type=Path, required=True, help="encoded text to calibrate on")
        command.add_argument("--test", type=Path, required=True, help="encoded text to measure on")
        command.add_argument("--work", type=Path, required=True, help="folder of models and results")
        command.add_argument("--architecture", default="llama", help="llama, gqa4 or mla")
        command.add_argument("--seeds", default="0", help="numbers such as 0,1,2")
        command.add_argument(
            "--measure",
            default="16384:calibrated,16384:methods,4096:calibrated,4096:methods,4096:heads,4096:adapted",
            help="tokens and part, in this order; parts: calibrated (allocations), methods (in all layers), nearest "
            "(in all layers, what comes nearest to the goals), opened (Recall by open groups), latents (by open groups "
            "and index, on latents), heads (in single KV "
            "heads), adapted (the first two after 300 distilled steps), biases (CCA after as many with each)",
        )
        command.add_argument(
            "--texts", type=int, default=8, help="per figure, and with hidden numbers four times as many"
        )
        command.add_argument("--trial", action="store_true", help="a few steps and texts, to try out a machine")
    command = commands.add_parser("collect")
    command.add_argument("--work", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True)
    command = commands.add_parser("page")
    command.add_argument("--results", type=Path, nargs="+", required=True)
    command.add_argument(
        "--output", type=Path, required=True, help="Markdown; its picture goes into the folder images beside it"
    )
    options = parser.parse_args()
    if options.command == "run":
        sys.exit(run(options))
    elif options.command == "seed":
        from seed import run_seed

        run_seed(options)
    elif options.command == "collect":
        refuse_existing(options.output, "output")
        documents = [json.loads(path.read_text()) for path in sorted((options.work / "results").glob("*.json"))]
        content = {"measured": documents[0]["provenance"], "runs": [document["results"] for document in documents]}
        write_results(options.output, content)
    else:
        from shares_page import write_page

        write_page(options.results, options.output)


def run(options: argparse.Namespace) -> int:
    """One process per seed; returns how many failed."""
    options.work.mkdir(parents=True, exist_ok=True)
    at = sys.argv.index("run")
    processes = []
    for seed in options.seeds.split(","):
        command = [sys.executable, str(Path(__file__).parent), "seed", *sys.argv[at + 1 :], "--seeds", seed]
        with (options.work / f"{options.architecture}-s{seed}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return sum(process.wait() != 0 for process in processes)


if __name__ == "__main__":
    main()
