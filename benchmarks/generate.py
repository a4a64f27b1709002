"""Plain `model.generate` of Llama-3.1-8B's shape, random weights: dense, and condensed with CCA(), on a GPU.

    python benchmarks/generate.py OUT.json [--cell 32768x8 ...]

A cell is prompt tokens and rows; 40 tokens follow, greedy. A short prompt of as many rows is read first, which compiles
kernels. Rows of the result whose figures are null did not fit into the GPU's memory. The file is written anew after
each row.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import condense
from condense.bench.model_shapes import random_model
from condense.results import refuse_existing, write_results

CELLS = [f"{tokens}x{rows}" for rows in (1, 8) for tokens in (4096, 8192, 32768, 65536, 131072)]
NEW, SHORT = 40, 2048
FIGURES = ("first_token_s", "second_step_ms", "third_step_ms", "step_ms_median", "total_s_of_40_tokens", "peak_gib")


def generate(model: PreTrainedModel, tokens: int, rows: int) -> dict[str, float]:
    """Seconds to the first token and from token to token, as a logits processor sees them, and peak memory."""
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens), device="cuda")
    ends: list[float] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return scores

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, logits_processor=[note]
    )
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    figures = (ends[0] - start, steps[0], steps[1], statistics.median(steps), total, peak)
    return dict(zip(FIGURES, (round(x, 4) for x in figures), strict=True))


def measured(model: PreTrainedModel, tokens: int, rows: int) -> dict[str, float | None]:
    """`generate`, or nulls where memory does not suffice."""
    try:
        generate(model, SHORT, rows)
        return generate(model, tokens, rows)
    except torch.OutOfMemoryError:
        return dict.fromkeys(FIGURES)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cell", action="append", help="tokens x rows, such as 32768x8; default: 4K to 128K, 1 and 8")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, "OUT.json", overwrite=False)
    if not torch.cuda.is_available():
        sys.exit("generate: needs a CUDA device")
    device = torch.device("cuda")
    model = random_model("llama-3.1-8b", dtype=torch.bfloat16, device=device)
    results: list[dict[str, Any]] = []
    for cell in arguments.cell or CELLS:
        tokens, rows = map(int, cell.split("x"))
        for name, method in (("dense", None), ("cca", condense.CCA())):
            condense.restore(model)
            if method is not None:
                condense.apply(model, method)
            results.append({"attention": name, "tokens": tokens, "rows": rows, **measured(model, tokens, rows)})
            print(results[-1], flush=True)
            content = {"shape": "llama-3.1-8b", "dtype": "bfloat16", "new_tokens": NEW, "rows": results}
            write_results(arguments.out, content, seed=0, device=device, overwrite=True)


if __name__ == "__main__":
    main()
