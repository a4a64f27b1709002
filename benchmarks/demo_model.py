"""Train the bundled model and measure it; how the numbers in the documentation were made.

    python benchmarks/demo_model.py prepare  --data TRAIN... --cache CACHE
    python benchmarks/demo_model.py train    --data TRAIN... --cache CACHE --output MODEL --seed 0
    python benchmarks/demo_model.py evaluate --model MODEL --data TEST... --output RESULTS.json
    python benchmarks/demo_model.py plot     --results RESULTS.json --output PICTURE.png

`train --resume` goes on from the last checkpoint of an interrupted run.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from retrieval import retrieval
from rich.console import Console
from rich.table import Table
from text_loss import text_loss, text_sequences
from transformers import AutoModelForCausalLM, AutoTokenizer

import condense
from condense.evaluate.intervals import Proportion
from condense.evaluate.verify_texts import passkey_sequences
from condense.plots import COLOURS, new_figure, require_matplotlib, save_figure
from condense.results import refuse_existing, write_results
from condense.tasks import FORMS, SequenceBuilder, encode_corpus, load_words, read_documents
from condense.train import RECIPES, prepare, run_training

KEYS = 8
CONDENSED = condense.CCA(group_size=16, window=256, summary="streaming", key_pooling="select", rep_bias="log_size")


def methods(length: int) -> Mapping[str, condense.Method]:
    """The methods compared. "window" keeps as many entries of ``length`` tokens as the condensed model."""
    entries = (length - CONDENSED.window) // CONDENSED.group_size + CONDENSED.window
    return {
        "dense": condense.Dense(),
        "condensed": CONDENSED,
        "condensed, no bias": CONDENSED.replace(rep_bias="none"),
        "condensed, weighted keys": CONDENSED.replace(key_pooling="weighted"),
        "condensed, last query": CONDENSED.replace(summary="last"),
        "recall": condense.Recall(group_size=16, window=256, num_recall=16),
        "window": condense.StreamingLLM(sink=4, window=entries - 4),
    }


def train(options: argparse.Namespace) -> None:
    recipe = RECIPES["demo_model"]
    config = recipe(options.data, options.output, seed=options.seed, cache=options.cache, workers=options.workers)
    if options.steps is not None:
        config = config.with_steps(options.steps)
    print(run_training(config, resume=options.resume))


def prepare_data(options: argparse.Namespace) -> None:
    config = RECIPES["demo_model"](options.data, options.cache / "unused", cache=options.cache)
    tokenizer, corpora = prepare(config)
    tokens = sum(len(corpus.tokens) for corpus in corpora)
    print(f"{len(tokenizer)} tokens in the vocabulary, {tokens} in the corpus")


def evaluate(options: argparse.Namespace) -> None:
    refuse_existing(options.output, "output")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    corpus = encode_corpus(read_documents(options.data), tokenizer)
    words = load_words()
    compared = methods(options.length)
    found = {}
    for kind, choice in (("held-out", words.held_out), ("trained", words.trained)):
        builder = SequenceBuilder(tokenizer, corpus, choice, options.length)
        for form in FORMS:
            sequences = passkey_sequences(builder, options.sequences, keys=KEYS, form=form, seed=1)
            found[f"{form}, {kind} words"] = retrieval(model, compared, sequences)
            varied = passkey_sequences(
                builder, options.sequences, keys=KEYS, form=form, seed=1, shared=True, anywhere=True
            )
            found[f"{form}, {kind} words that names share, anywhere"] = retrieval(model, compared, varied)
    losses = text_loss(model, compared, text_sequences(builder, options.sequences, seed=2))
    content = {
        "model": options.model.name,
        "parameters": model.num_parameters(),
        "dtype": options.dtype,
        "text": [path.name for path in options.data],
        "length": options.length,
        "keys": KEYS,
        "retrieval": found,
        "text_loss": losses,
    }
    write_results(options.output, content, seed=options.seed)
    table = Table("", *compared)
    for kind, results in found.items():
        shares = [result.exact for result in results]
        table.add_row(kind, *(f"{share.share:.3f} [{share.low:.3f}, {share.high:.3f}]" for share in shares))
    table.add_row("text loss", *(f"{loss.loss:.3f}" for loss in losses))
    for parts in zip(*(loss.by_position for loss in losses), strict=True):
        table.add_row(f"at {parts[0].start} to {parts[0].stop - 1}", *(f"{part.loss:.3f}" for part in parts))
    Console(width=200).print(table)


def plot(options: argparse.Namespace) -> None:
    """Numbers found in all sets of questions together, and text loss by position."""
    require_matplotlib(options.output)
    results = json.loads(options.results.read_text(encoding="utf-8"))["results"]
    losses = {entry["name"]: entry["by_position"] for entry in results["text_loss"]}
    runs = {}
    for name in ("dense", "recall", "condensed", "window"):
        entries = [entry for entries in results["retrieval"].values() for entry in entries if entry["name"] == name]
        right, total = (sum(entry["exact"][key] for entry in entries) for key in ("right", "total"))
        share = Proportion.of([True] * right + [False] * (total - right))
        runs[name] = {
            "accuracy": share.share,
            "low": share.low,
            "high": share.high,
            "positions": [(part["start"] + part["stop"]) / 2 for part in losses[name]],
            "loss": [part["loss"] for part in losses[name]],
        }
    draw(runs, options.output)


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The bundled model per method: share of questions answered exactly (95% interval) and text loss by position.

    runs: label -> {"accuracy", "low", "high", "positions": [...], "loss": [...]}.
    """
    figure, (left, right) = new_figure(2, width=4.6)
    for i, (label, run) in enumerate(runs.items()):
        colour = COLOURS[i % len(COLOURS)]
        error = [[run["accuracy"] - run["low"]], [run["high"] - run["accuracy"]]]
        bar = left.bar(label, run["accuracy"], yerr=error, capsize=4, color=colour)
        left.bar_label(bar, labels=[f"{run['accuracy']:.3f}"], fontsize=8, padding=2)
        # the first line is wide, so that it shows where another lies on it
        width = 1.5 if i else 5
        right.plot(run["positions"], run["loss"], "o-", markersize=3, linewidth=width, color=colour, label=label)
    left.set_ylim(0, 1.12)
    left.set_title("hidden numbers recalled exactly", fontsize=10)
    left.tick_params(labelsize=8)
    right.set_title("text loss by position, nats per token", fontsize=10)
    right.set_xlabel("position", fontsize=8)
    right.tick_params(labelsize=8)
    right.legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("prepare", help="train the tokenizer and encode the text")
    command.add_argument("--data", type=Path, nargs="+", required=True)
    command.add_argument("--cache", type=Path, required=True)
    command.set_defaults(run=prepare_data)

    command = commands.add_parser("train", help="train one seed")
    command.add_argument("--data", type=Path, nargs="+", required=True)
    command.add_argument("--output", type=Path, required=True)
    command.add_argument("--cache", type=Path, help="tokenizer and encoded text, shared by seeds")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--steps", type=int, help="steps of every phase, to try out a machine")
    command.add_argument("--workers", type=int, default=8)
    command.add_argument("--resume", action="store_true", help="go on with an unfinished run")
    command.set_defaults(run=train)

    command = commands.add_parser("evaluate", help="retrieval and text loss under several methods")
    command.add_argument("--model", type=Path, required=True)
    command.add_argument("--data", type=Path, nargs="+", required=True, help="text that was not trained on")
    command.add_argument("--output", type=Path, required=True, help="JSON file")
    command.add_argument("--sequences", type=int, default=60, help=f"texts of {KEYS} questions each")
    command.add_argument("--length", type=int, default=4096, help="tokens of a text")
    command.add_argument("--dtype", default="float32")
    command.add_argument("--seed", type=int, help="the model's, for the record")
    command.set_defaults(run=evaluate)

    command = commands.add_parser("plot", help="draw the results of one model")
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True, help="picture, .png or .svg")
    command.set_defaults(run=plot)

    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
