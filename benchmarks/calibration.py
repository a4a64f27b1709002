"""What a calibrated allocation keeps: Recall in the layers that need it, pooling in the others.

    python benchmarks/calibration.py run --data corpus-validation.jsonl.zst --test corpus-test.jsonl.zst --output FILE
    python benchmarks/calibration.py plot --results FILE --output docs/images/calibration.png
    python benchmarks/calibration.py time --data corpus-validation.jsonl.zst --device cuda --output FILE

By default the bundled model at 2,048 tokens with a window of 128, where its own condensing finds next to nothing, so
that it is as good as a model that was never adapted. The calibration reads ``--data`` alone; all rows of the result are
measured on ``--test``: dense attention, each candidate in all layers, and the allocations on the calibrated path with
Recall in 7, 6, ... layers and pooling in the others. ``time`` calibrates a large model of random weights, with default
candidates: it shows how long that takes, and nothing else.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import condense
from condense.bench.model_shapes import random_model
from condense.calibration import Calibration
from condense.evaluate import passkey_sequences, retrieval, text_loss, text_sequences
from condense.models import described
from condense.plots import plot_lines, require_matplotlib
from condense.results import refuse_existing, write_results
from condense.tasks import SequenceBuilder, encode_corpus, load_words, read_documents

GROUP, KEYS = 16, 8


def config_of(options: argparse.Namespace) -> condense.CalibrationConfig:
    """Dense attention, Recall and pooling."""
    recall = condense.Recall(
        group_size=GROUP, window=options.window, num_recall=options.num_recall, store="host", slots=options.num_recall
    )
    pooled = condense.CCA(
        group_size=GROUP, window=options.window, key_pooling="mean", value_pooling="mean", rep_bias="log_size"
    )
    return condense.CalibrationConfig(
        budget_nats=options.budget_nats,
        candidates=(condense.Dense(), recall, pooled),
        length=options.length,
        texts=options.texts,
        hidden_numbers=KEYS,
        cache_length=options.cache_length,
        timed=False,
        seed=options.seed,
    )


def rows(result: Calibration, options: argparse.Namespace) -> dict[str, Any]:
    """By their names: methods, and choices of methods by layer."""
    dense, recall, pooled = result.config.candidates
    entries = options.window + (options.length - options.window) // GROUP  # what CCA keeps
    found: dict[str, Any] = {
        "dense": dense,
        "window": condense.StreamingLLM(sink=4, window=entries - 4),
        "recall": recall,
        "cca": pooled,
    }
    lost = {(loss.layer, loss.method): loss.total for loss in result.layers}
    layers = sorted({layer for layer, _ in lost})
    # the layer that Recall helps most first
    order = sorted(layers, key=lambda i: lost[i, pooled] - lost[i, recall], reverse=True)
    found |= {
        f"recall in {k}": {layer: recall if layer in order[:k] else pooled for layer in layers}
        for k in range(len(order) - 1, 0, -1)
    }
    found["recall in all but the most needed"] = {i: pooled if i == order[0] else recall for i in layers}
    return found | {"chosen": result.allocation}


def run(options: argparse.Namespace) -> None:
    refuse_existing(options.output, "output")
    model, tokenizer = condense.demo_model()
    if options.model is not None:
        model, tokenizer = (c.from_pretrained(options.model) for c in (AutoModelForCausalLM, AutoTokenizer))
    model = model.to(options.device, getattr(torch, options.dtype)).eval()
    result = condense.calibrate(model, tokenizer, list(read_documents(options.data)), config_of(options))
    corpus = encode_corpus(read_documents(options.test), tokenizer)
    builder = SequenceBuilder(tokenizer, corpus, load_words().held_out, options.length)
    choices = rows(result, options)
    texts = text_sequences(builder, options.sequences, seed=2)
    content = {
        "model": str(options.model or "bundled"),
        "dtype": options.dtype,
        "length": options.length,
        "choices": {name: described(choice) for name, choice in choices.items()},
        "layers": [vars(loss) for loss in result.layers],
        **{name: [_point(point) for point in getattr(result, name)] for name in ("uniform", "curve")},
        "chosen": _point(result.chosen),
        "verified": _point(result.verified),
        "text": text_loss(model, choices, texts, edges=(0, options.length // 2)),
        "retrieval": retrieval(
            model, choices, passkey_sequences(builder, options.sequences, keys=KEYS, form="question", seed=1)
        ),
    }
    write_results(options.output, content, seed=options.seed, device=model.device)
    _print(json.loads(options.output.read_text(encoding="utf-8"))["results"])


def _point(point: Any) -> dict[str, Any]:
    return vars(point) | {"methods": described(point.methods)}


def _print(results: dict[str, Any]) -> None:
    table = Table("row", "found", "text loss above dense", "second half", title=f"{results['length']} tokens")
    dense = results["text"][0]
    for text, asked in zip(results["text"], results["retrieval"], strict=True):
        far = text["by_position"][1]["loss"] - dense["by_position"][1]["loss"]
        share = f"{asked['exact']['share']:.3f} of {asked['exact']['total']}"
        table.add_row(text["name"], share, f"{text['loss'] - dense['loss']:+.4f}", f"{far:+.4f}")
    console = Console(width=160)
    console.print(table)
    for name in ("chosen", "verified"):
        console.print(name, {key: results[name][key] for key in ("methods", "cache", "host", "kl", "nats", "found")})


def take_time(options: argparse.Namespace) -> None:
    """Calibrate a shape of random weights for a size of the cache; forwards and seconds, estimated and as they were."""
    refuse_existing(options.output, "output")
    model = random_model(options.shape, dtype=getattr(torch, options.dtype), device=torch.device(options.device))
    tokenizer = condense.demo_model()[1]
    texts = list(read_documents(options.data))
    config = condense.CalibrationConfig(cache=options.cache, length=options.length, texts=options.texts)
    estimates, forwards = [], []
    began = time.perf_counter()
    result = condense.calibrate(
        model, tokenizer, texts, config, on_estimate=estimates.append,
        on_forward=lambda: forwards.append(time.perf_counter()),
    )  # fmt: skip
    content = {
        "shape": options.shape,
        "layers": model.config.num_hidden_layers,
        "dtype": options.dtype,
        "length": options.length,
        "texts": options.texts,
        "candidates": [str(method) for method in result.config.candidates],
        "estimated_forwards": estimates[0].forwards,
        "estimated_seconds": estimates[0].forwards * estimates[0].seconds_each,
        "forwards": len(forwards),
        "seconds": time.perf_counter() - began,
        "times": {
            str(method): point.times for method, point in zip(result.config.candidates, result.uniform, strict=True)
        },
        "chosen": _point(result.chosen),
    }
    write_results(options.output, content, device=model.device)
    Console(width=160).print(content)


def plot(options: argparse.Namespace) -> None:
    """Numbers found and text loss above dense by the number of layers that recall."""
    require_matplotlib(options.output)
    results = json.loads(options.results.read_text(encoding="utf-8"))["results"]
    losses = {text["name"]: text["by_position"][1]["loss"] for text in results["text"]}
    shares = {asked["name"]: asked["exact"]["share"] for asked in results["retrieval"]}
    count = len({loss["layer"] for loss in results["layers"]})
    names = ["cca", *(f"recall in {k}" for k in range(1, count)), "recall"]
    others = {"dense": [0, count], "window of as many entries": [0, count]}
    keys = {"dense": "dense", "window of as many entries": "window"}
    panels = {
        "numbers found": {"calibrated": (range(count + 1), [shares[name] for name in names])}
        | {name: (x, [shares[keys[name]]] * 2) for name, x in others.items()},
        "text loss above dense, second half": {
            "calibrated": (range(count + 1), [losses[name] - losses["dense"] for name in names])
        }
        | {name: (x, [losses[keys[name]] - losses["dense"]] * 2) for name, x in others.items()},
    }
    plot_lines(panels, options.output, x_label=f"layers of {count} that recall", y_label="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="calibrate, and measure what came of it")
    command.add_argument("--data", type=Path, nargs="+", required=True, help="text to calibrate on")
    command.add_argument(
        "--test", type=Path, nargs="+", required=True, help="other text, which the rows are measured on"
    )
    command.add_argument("--output", type=Path, required=True, help="JSON file")
    command.add_argument("--model", type=Path, help="a folder; default: the bundled model")
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--window", type=int, default=128)
    command.add_argument("--num-recall", type=int, default=8)
    command.add_argument("--cache-length", type=int, help="tokens at which the cache is counted")
    command.add_argument("--budget-nats", type=float, default=0.02)
    command.add_argument("--texts", type=int, default=16, help="that are measured, and as many that verify")
    command.add_argument("--sequences", type=int, default=60, help="test texts per figure")
    command.add_argument("--dtype", default="float32")
    command.add_argument("--device", default="cpu")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=run)
    command = commands.add_parser("plot", help="draw a result")
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True, help="picture, .png or .svg")
    command.set_defaults(run=plot)
    command = commands.add_parser("time", help="how long a large model takes")
    command.add_argument("--data", type=Path, nargs="+", required=True, help="text to calibrate on")
    command.add_argument("--output", type=Path, required=True, help="JSON file")
    command.add_argument("--shape", default="llama-3.1-8b")
    command.add_argument("--cache", type=float, default=0.09)
    command.add_argument("--length", type=int, default=4096)
    command.add_argument("--texts", type=int, default=8)
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--device", default="cpu")
    command.set_defaults(run=take_time)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
