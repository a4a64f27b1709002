"""Compare the losses of Reread, windows of its bytes, SnapKV and Recall, also over what Reread keeps, on text after
prompts in their caches.

    python benchmarks/reread.py OUT.json TEXT [TEXT ...] [--length 4096] [--texts 4]

Each text file is one document. A prompt is read under every method; over a copy of its cache, in one forward, the text
that follows it, a copy of a stretch of its first half, or questions after hidden numbers whose names share words. The
prompt does not know which.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import condense
from condense.caches import CACHE
from condense.evaluate.compare import attention_of
from condense.evaluate.intervals import Cell
from condense.models.inspect import inspect
from condense.results import refuse_existing, write_results
from condense.tasks import SequenceBuilder, encode_corpus, load_words

FOLLOWING, COPIED, LEAD, KEYS = 512, 256, 32, 16
KINDS = ("following", "copy", "found")


def arms(length: int) -> dict[str, condense.Method]:
    """By label, dense attention first; windows and SnapKV keep as much as Reread."""
    kept = {share: condense.Reread(share=share).num_kept(length) for share in (0.05, 0.1, 0.25)}
    recall = condense.Recall.parse("recall-device")
    return {
        "dense": condense.Dense(),
        **{f"reread {share:.0%}": condense.Reread(share=share) for share in kept},
        **{f"window {share:.0%}": condense.StreamingLLM(sink=4, window=kept[share] - 4) for share in (0.1, 0.25)},
        "snapkv 10%": condense.SnapKV(budget=kept[0.1]),
        **{f"keep {share:.0%}": recall.replace(prompt="exact", keep=share) for share in (0.25, 0.5, 0.75)},
        "recall-device": recall,
    }


@torch.no_grad()
def over(model: PreTrainedModel, prompt: Tensor, parts: list[Tensor]) -> list[tuple[list[float], list[bool]]]:
    """For each part ``[n]`` after a prompt ``[L]``: the losses of its tokens but the first, and which were the best."""
    cache = model(prompt[None], use_cache=True, logits_to_keep=1)[CACHE]
    results = []
    for part in parts:
        logits = model(part[None], **{CACHE: copy.deepcopy(cache)}, use_cache=True).logits[0, :-1]
        losses = F.cross_entropy(logits.float(), part[1:], reduction="none")
        results.append((losses.tolist(), (logits.argmax(-1) == part[1:]).tolist()))
    return results


def measured(model: PreTrainedModel, builder: SequenceBuilder, seed: int) -> dict[str, Any]:
    """One text of each kind under the attention that the model has: losses by kind, and answers found."""
    rng = np.random.default_rng([seed, 0])
    plain = torch.from_numpy(builder.plain(rng))
    prompt, following = plain[:-FOLLOWING], plain[-FOLLOWING:]
    start = int(rng.integers(1, len(prompt) // 2 - COPIED))
    text, copied = over(model, prompt, [following, plain[start : start + COPIED]])
    asked = builder.passkeys(np.random.default_rng([seed, 1]), KEYS, "question", shared=True, anywhere=True)
    ids, begin = torch.from_numpy(asked.input_ids), asked.answers[0][0] - LEAD
    ((_, right),) = over(model, ids[:begin], [ids[begin:]])
    found = [all(right[a - begin - 1 : b - begin - 1]) for a, b in asked.answers]
    losses = {"following": text[0], "copy": copied[0][LEAD:]}
    return {name: [sum(x), len(x)] for name, x in losses.items()} | {"found": [sum(found), len(found)]}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=4)
    options = parser.parse_args()
    refuse_existing(options.out, "OUT.json")
    model, tokenizer = condense.demo_model()
    corpus = encode_corpus([path.read_text(encoding="utf-8") for path in options.text], tokenizer)
    builder = SequenceBuilder(tokenizer, corpus, load_words().held_out, options.length)
    dense: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for name, method in arms(options.length).items():
        with attention_of(model, method):
            texts = [measured(model, builder, seed) for seed in range(options.texts)]
        dense = dense or texts
        # of a cache in bfloat16, as one is used
        layers = inspect(model, method, options.length, 2)
        share = sum(layer.bytes for layer in layers) / sum(layer.dense_bytes for layer in layers)
        cells = {}
        for kind in KINDS:
            of_text = [(a[kind][0], b[kind][0], a[kind][1]) for a, b in zip(texts, dense, strict=True)]
            cells[kind] = Cell.of(*np.array(of_text, float).T, relative=kind == "found")
        print(name, f"{share:.1%}", {kind: round(cell.value, 4) for kind, cell in cells.items()}, flush=True)
        rows.append({"arm": name, "method": method, "device": share, "cells": cells})
    about = {"length": options.length, "text": [path.name for path in options.text], "dtype": "float32"}
    write_results(options.out, about | {"rows": rows}, seed=0, device=model.device, overwrite=False)


if __name__ == "__main__":
    main()
