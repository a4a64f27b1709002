"""Time of a token in Hugging Face's loop over a growing cache, Llama-3.1-8B's shape, random weights, on a GPU.

    python benchmarks/eager_loop.py OUT.json [--profile OUT.txt] [--seconds 60]

4,096 tokens are read, 20 tokens follow that do not count, then 60. Dense, CCA(), Recall() and Recall with its store in
host memory take turns, without a mask in inference mode, and with the mask of all tokens under no_grad, as `generate`
calls a model. ``queued`` is the time in which the host queues a token's kernels. ``--profile`` writes where the host
spends it (cProfile, which slows Python). The file is written anew after each row.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import condense
from condense.bench.model_shapes import random_model
from condense.results import refuse_existing, write_results

TOKENS, SKIPPED, TIMED, TURNS = 4096, 20, 60, 3
METHODS = {
    "dense": None,
    "cca": condense.CCA(),
    "recall": condense.Recall(),
    "recall, store in host memory": condense.Recall(store="host"),
}
MODES = {"inference mode, no mask": False, "no_grad, mask": True}


def times(model: PreTrainedModel, *, masked: bool, profile: cProfile.Profile | None = None) -> dict[str, list[float]]:
    """Milliseconds a token, until the GPU is done and until its kernels are queued: median, 20th, 80th percentile."""
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), device=model.device)
    cache, done, queued = DynamicCache(config=model.config), [], []
    model(ids, past_key_values=cache, logits_to_keep=1)
    for i in range(SKIPPED + TIMED):
        mask = torch.ones(1, TOKENS + i + 1, dtype=torch.long, device=model.device) if masked else None
        torch.cuda.synchronize()
        with profile if profile is not None and i >= SKIPPED else nullcontext():
            start = time.perf_counter()
            model(ids[:, :1], past_key_values=cache, attention_mask=mask)
            queued.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        done.append(1e3 * (time.perf_counter() - start))
    return {"ms": _quantiles(done[SKIPPED:]), "queued_ms": _quantiles(queued[SKIPPED:])}


def _quantiles(x: list[float]) -> list[float]:
    fifths = statistics.quantiles(x, n=5)
    return [round(value, 3) for value in (statistics.median(x), fifths[0], fifths[3])]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="no turn begins after so long")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, "OUT.json", overwrite=False)
    if not torch.cuda.is_available():
        sys.exit("eager_loop: needs a CUDA device")
    device, begin = torch.device("cuda"), time.monotonic()
    model = random_model("llama-3.1-8b", dtype=torch.bfloat16, device=device)
    rows: list[dict[str, Any]] = []
    for turn, (mode, masked), (name, method) in itertools.product(range(TURNS), MODES.items(), METHODS.items()):
        if name == "dense" and time.monotonic() - begin > arguments.seconds:
            break
        attention = nullcontext() if method is None else condense.use(model, method)
        with torch.no_grad() if masked else torch.inference_mode(), attention:
            rows.append({"turn": turn, "mode": mode, "attention": name, **times(model, masked=masked)})
        print(rows[-1], flush=True)
        content = {"shape": "llama-3.1-8b", "dtype": "bfloat16", "tokens": TOKENS, "rows": rows}
        write_results(arguments.out, content, seed=0, device=device, overwrite=True)
    if arguments.profile is not None:
        with arguments.profile.open("w") as file, torch.inference_mode():
            for name, method in METHODS.items():
                profile = cProfile.Profile()
                with nullcontext() if method is None else condense.use(model, method):
                    times(model, masked=False, profile=profile)
                stats = pstats.Stats(profile, stream=file)
                print(f"{name}, {TIMED} tokens of {model.config.num_hidden_layers} layers", file=file)
                stats.sort_stats("tottime").print_stats(60).sort_stats("cumtime").print_stats(60)


if __name__ == "__main__":
    main()
