"""What Recall keeps of a model that was not trained for it: the bundled model at 2,048 tokens and a window of 128.

    python benchmarks/recall.py --data corpus-test.jsonl.zst --output benchmarks/results/recall-2048-cpu.json

The bundled model was trained to be condensed at 4,096 tokens with a window of 256. At 2,048 and 128 it finds next to
nothing condensed, so there it is as good as a model that was never adapted; the rows of CCA show how far that holds.
Each row has the same texts and questions. The file is written anew after every row, so that an interrupted run keeps
the rows that are complete.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import condense
from condense.evaluate import TextLossResult, passkey_sequences, retrieval, text_loss, text_sequences
from condense.methods.grouped import REP_BIASES
from condense.results import refuse_existing, write_results
from condense.tasks import SequenceBuilder, encode_corpus, load_words, read_documents

GROUP = 16


def methods(length: int, window: int) -> Mapping[str, condense.Method]:
    """By the names of the rows; the most telling first, dense, which the others are compared to, at the head."""
    sinks = 4
    condensed = condense.CCA(
        group_size=GROUP, window=window, summary="streaming", key_pooling="select", rep_bias="log_size"
    )
    recall = condense.Recall(group_size=GROUP, window=window)
    entries = window + (length - window) // GROUP  # what CCA keeps
    rows: dict[str, condense.Method] = {
        "dense": condense.Dense(),
        "StreamingLLM, as many entries as CCA": condense.StreamingLLM(sink=sinks, window=entries - sinks),
        "CCA, selected keys": condensed,
        "CCA, mean keys and values": condensed.replace(key_pooling="mean", value_pooling="mean"),
    }
    rows |= {f"Recall, r {r}": recall.replace(num_recall=r) for r in (8, 16, 4, 32)}
    rows["Recall, r 8, 4 bits"] = recall.replace(num_recall=8, index_bits=4)
    rows["Recall, r 8, unchosen dropped"] = recall.replace(num_recall=8, unchosen="drop")
    rows |= {f"Recall, r {r}, sub-means": recall.replace(num_recall=r, index="sub_means") for r in (8, 16)}
    rows["Recall, r 16, 4 bits"] = recall.replace(num_recall=16, index_bits=4)
    rows["Recall, r 16, unchosen dropped"] = recall.replace(num_recall=16, unchosen="drop")
    return rows


def entry_methods(length: int, window: int) -> Mapping[str, condense.Method]:
    """As `methods`: how entries are pooled and biased, and indexes of equal bytes."""
    pooled = condense.CCA(group_size=GROUP, window=window, summary="streaming")
    ways = {
        "mean": {"key_pooling": "mean", "value_pooling": "mean"},
        "weighted last": {"summary": "last"},
        "weighted streaming": {},
        "weighted keys, mean values": {"value_pooling": "mean"},
        "select streaming": {"key_pooling": "select"},
    }
    rows: dict[str, condense.Method] = {"dense": condense.Dense()}
    for way, fields in ways.items():
        rows |= {f"cca {way} {bias}": pooled.replace(rep_bias=bias, **fields) for bias in REP_BIASES}
    for r in (8, 16):
        recall = condense.Recall(group_size=GROUP, window=window, num_recall=r)
        weighted = recall.replace(key_pooling="weighted", value_pooling="weighted")
        rows |= {
            f"recall r={r} (8/8)": recall,
            f"recall r={r} size 4 bits 4": recall.replace(index_size=4, index_bits=4),
            f"recall r={r} size 16 bits 16": recall.replace(index_size=16, index_bits=16),
            f"recall r={r} matched": recall.replace(rep_bias="matched"),
            f"recall r={r} weighted log_size": weighted,
            f"recall r={r} weighted matched": weighted.replace(rep_bias="matched"),
        }
    return rows


def losses(
    model: PreTrainedModel, method: condense.Method, texts: Sequence[np.ndarray], edge: int
) -> list[TextLossResult]:
    """One result per text, so that methods can be compared text by text; stretches before and from ``edge`` on."""
    return [text_loss(model, {"": method}, [text], edges=(0, edge))[0] for text in texts]


def paired(differences: Sequence[float]) -> dict[str, float]:
    """Mean difference per token and its standard error, from the spread between texts."""
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return {"mean": float(np.mean(differences)), "standard_error": error}


def run(options: argparse.Namespace) -> None:
    refuse_existing(options.output, "output")
    model, tokenizer = condense.demo_model()
    model.to(options.device, getattr(torch, options.dtype))
    corpus = encode_corpus(read_documents(options.data), tokenizer)
    builder = SequenceBuilder(tokenizer, corpus, load_words().held_out, options.length)
    texts = text_sequences(builder, options.texts, seed=2)
    questions = passkey_sequences(builder, options.sequences, keys=options.keys, form="question", seed=1)
    rows: list[dict[str, Any]] = []
    dense: list[TextLossResult] = []
    rows_of = {"recall": methods, "entries": entry_methods}[options.rows]
    for name, method in rows_of(options.length, options.window).items():
        by_text = losses(model, method, texts, options.length // 2)
        dense = dense or by_text
        rows.append({
            "name": name,
            "method": method,
            "found": retrieval(model, {name: method}, questions)[0].exact,
            "text_loss": float(np.mean([result.loss for result in by_text])),
            "to_dense": paired([a.loss - b.loss for a, b in zip(by_text, dense, strict=True)]),
            "to_dense_second_half": paired([
                a.by_position[1].loss - b.by_position[1].loss for a, b in zip(by_text, dense, strict=True)
            ]),
        })  # fmt: skip
        content = {
            "model": "bundled",
            "dtype": options.dtype,
            "text": [path.name for path in options.data],
            "length": options.length,
            "window": options.window,
            "texts": options.texts,
            "sequences": options.sequences,
            "keys": options.keys,
            "rows": rows,
        }
        write_results(options.output, content, device=model.device, overwrite=True)
    table = Table("method", "found", "text loss over dense", "the same, second half")
    for row in rows:
        found, *to_dense = row["found"], row["to_dense"], row["to_dense_second_half"]
        table.add_row(
            row["name"],
            f"{found.right}/{found.total} [{found.low:.2f}, {found.high:.2f}]",
            *(f"{d['mean']:+.3f} +- {d['standard_error']:.3f}" for d in to_dense),
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text that was not trained on")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rows", choices=("recall", "entries"), default="recall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--length", type=int, default=2048, help="tokens of every text")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--texts", type=int, default=5, help="plain texts, for the loss")
    parser.add_argument("--sequences", type=int, default=3, help="texts with hidden numbers")
    parser.add_argument("--keys", type=int, default=14, help="hidden numbers and questions of each")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
