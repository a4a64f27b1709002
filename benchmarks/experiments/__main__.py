"""Ablations and claims on small models; how `docs/studies/experiments.md` was made.

    python benchmarks/experiments run     --train TRAIN... --test TEST... --work WORK --gpus 0,1 --minutes 20
    python benchmarks/experiments bundled --test TEST... --cache CACHE --output RESULTS2.json
    python benchmarks/experiments collect --work WORK --output RESULTS.json
    condense bench model --shape deepseek-v2-lite --lengths 128K --runners condensed_graph --method lca:group_size=4 ...
    condense bench kernel --lengths 32K,128K --ops layer,decode --method dga --method dga:group_size=4 ...
    python benchmarks/experiments report  --results RESULTS.json --times BENCH.json --kernels BENCH2.json --output X.md
    python benchmarks/experiments zero-shot --results RESULTS.json --page docs/recall.md

`run` goes on where an interrupted one stopped. `--only WORD` takes the runs whose names begin with it, and their bases.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from bundled import evaluate_bundled
from execute import Setting, load_tokenizer
from pool import cut_off, start, work
from report import write_report
from studies import SEEDS, Run, all_runs
from zero_shot import zero_shot_runs
from zero_shot_page import fill

from condense.results import refuse_existing, write_results
from condense.tasks import load_corpus


def chosen(only: Sequence[str] | None) -> list[Run]:
    """All runs, or those whose names begin with one of ``only``, in that order, after their bases."""
    runs = {run.name: run for run in (*all_runs(), *(run for seed in SEEDS for run in zero_shot_runs(seed)))}
    if not only:
        return list(runs.values())
    found: dict[str, Run] = {}
    for run in (run for begin in only for run in runs.values() if run.name.startswith(begin)):
        chain = [run]
        while chain[0].base is not None:
            chain.insert(0, runs[chain[0].base])
        found |= {run.name: run for run in chain}
    return list(found.values())


def setting_of(options: argparse.Namespace) -> Setting:
    return Setting(
        tuple(options.train), tuple(options.test), options.work, options.sequences, options.workers, options.trial
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "work"):
        command = commands.add_parser(name)
        command.add_argument("--train", type=Path, nargs="+", required=True, help="text to train on")
        command.add_argument("--test", type=Path, nargs="+", required=True, help="text that is not trained on")
        command.add_argument("--work", type=Path, required=True, help="folder of models and results")
        command.add_argument("--sequences", type=int, default=60, help="held-out sequences per figure")
        command.add_argument("--workers", type=int, default=3, help="processes per run that build sequences")
        command.add_argument("--trial", type=int, help="only so many steps of two sequences, to try out a machine")
        command.add_argument("--only", nargs="+", help="beginnings of names")
        command.add_argument("--gpus", default="0", help="numbers of GPUs, such as 0,1")
        command.add_argument("--slots", type=int, default=3, help="runs at a time on one GPU")
        command.add_argument("--minutes", type=float, default=60, help="no run is begun later")
        command.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    command = commands.add_parser("bundled")
    command.add_argument("--test", type=Path, nargs="+", required=True, help="text that the model was not trained on")
    command.add_argument("--cache", type=Path, required=True, help="folder for the encoded text")
    command.add_argument("--sequences", type=int, default=30, help="per figure")
    command.add_argument("--output", type=Path, required=True)
    command = commands.add_parser("collect")
    command.add_argument("--work", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True)
    command = commands.add_parser("report")
    command.add_argument("--results", type=Path, nargs="+", required=True)
    command.add_argument("--times", type=Path, required=True, help="result of condense bench model: LCA's settings")
    command.add_argument("--kernels", type=Path, nargs="+", required=True, help="of condense bench kernel: DGA's")
    command.add_argument("--output", type=Path, required=True, help="Markdown; pictures go beside it")
    command = commands.add_parser("zero-shot")
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--page", type=Path, required=True, help="Markdown whose tables are written anew")

    options = parser.parse_args()
    if options.command == "run":
        # encoded here once, not in every process
        for paths in (options.train, options.test):
            load_corpus(paths, load_tokenizer(), options.work / "cache")
        deadline = time.time() + 60 * options.minutes
        gpus = [int(gpu) for gpu in options.gpus.split(",")]
        sys.exit(start([*sys.argv[2:], "--deadline", str(deadline)], setting_of(options), gpus, options.slots))
    elif options.command == "work":
        work(chosen(options.only), setting_of(options), options.deadline)
    elif options.command == "bundled":
        refuse_existing(options.output, "output")
        content = evaluate_bundled(tuple(options.test), options.cache, options.sequences)
        write_results(options.output, {"bundled": content}, device=torch.device("cpu"))
    elif options.command == "collect":
        refuse_existing(options.output, "output")
        documents = [json.loads(path.read_text()) for path in sorted((options.work / "results").glob("*.json"))]
        origin = documents[0]["provenance"] if documents else None
        errors = {path.stem: path.read_text()[-2000:] for path in (options.work / "claims").glob("*.error")}
        runs = [document["results"] for document in documents]
        unfinished = cut_off(options.work, {run["run"]["name"] for run in runs})
        content = {"measured": origin, "runs": runs, "failed": errors, "unfinished": unfinished}
        write_results(options.output, content)
    elif options.command == "zero-shot":
        fill(options.page, options.results)
    else:
        write_report(options.results, options.times, options.kernels, options.output)


if __name__ == "__main__":
    main()
