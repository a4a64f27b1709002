"""Decode over pages beside the same step over contiguous buffers: one layer of Llama-3.1-8B's shape, in a CUDA graph.

    python benchmarks/paged_step.py OUT.json

Entries and tokens lie in shuffled pages of 16 slots; every request has read 131,072 tokens. Times are medians of 30
replays of a graph of 20 steps, which read and write other requests' pages in turn so that caches hold none of them.
Steps over pages are timed as they are, and with kernels that start early and that do not, whatever the batch.
"""

import argparse
import random
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import condense
from condense.methods import step_settings
from condense.ops.paged import NewTokens, PagedState, Pages, read_paged
from condense.ops.triton import paged_step
from condense.ops.triton import step as contiguous
from condense.ops.types import NewToken, StepState
from condense.results import write_results
from condense.serving.plan import serving_plan

METHOD = condense.CCA(summary="streaming", key_pooling="select", rep_bias="log_size")
ROWS = (1, 2, 4, 6, 8, 16, 32, 90)
H, K, D, LENGTH, STEPS, REPLAYS = 32, 8, 128, 131072, 20, 30
OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}


def graph_time(steps):
    """Milliseconds per step of a list of steps, run once before they are recorded."""
    for step in steps:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(steps))
    return statistics.median(times)


@contextmanager
def early_below(pairs):
    """Kernels of a step start early with fewer pairs of request and KV head."""
    pairs, paged_step.EARLY_PAIRS = paged_step.EARLY_PAIRS, pairs
    paged_step._launch.cache_clear()
    try:
        yield
    finally:
        paged_step.EARLY_PAIRS = pairs
        paged_step._launch.cache_clear()


def tokens(rows):
    return [torch.randn(rows, heads, D, **OPTIONS) for heads in (H, K, K)]


def paged_steps(rows, copies):
    plan = serving_plan(METHOD)
    blocks = plan.blocks(LENGTH)
    pages = list(range(1, 1 + copies * rows * blocks.total))
    random.Random(0).shuffle(pages)
    cache = torch.randn(len(pages) + 1, K, plan.slots, 2 * D, **OPTIONS)
    # no group is due, as in 15 of 16 steps
    seen = torch.full((rows,), LENGTH - 3, dtype=torch.int32, device="cuda")
    new, steps = NewTokens(list(range(rows + 1)), [LENGTH - 3] * rows, seen, rows), []
    for _ in range(copies):
        kinds = []
        for count, width in zip(blocks, (LENGTH // plan.slots, blocks.entries, 1), strict=True):
            table = torch.zeros(rows, width, dtype=torch.int32)
            for row in table:
                row[width - count :] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
            kinds.append(Pages(cache, table.cuda()))
        qkv = tuple(tokens(rows))
        out, state = torch.empty_like(qkv[0]), PagedState(*kinds)
        steps.append(
            lambda qkv=qkv, out=out, state=state: read_paged(qkv, state, new, plan.settings, scale=D**-0.5, out=out)
        )
    return steps


def contiguous_steps(rows, copies):
    settings, steps = step_settings(METHOD), []
    for _ in range(copies):
        sizes = (LENGTH // 16, LENGTH // 16, 1040, 1040, 16)
        state = StepState(
            *(torch.randn(rows, K, size, D, **OPTIONS) for size in sizes),
            torch.full((rows,), LENGTH - 1, dtype=torch.int64, device="cuda"),
            torch.zeros(rows, 2, dtype=torch.int64, device="cuda"),
            torch.zeros(rows, K + 1, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, K, 0, 1, device="cuda"),
        )
        q, k, v = (x[:, :, None] for x in tokens(rows))
        steps.append(
            lambda q=q, k=k, v=v, state=state: contiguous.step(NewToken(q, k, v), state, settings, scale=D**-0.5)
        )
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("paged_step: needs a CUDA device")
    content = {"method": str(METHOD), "heads": [H, K, D], "length": LENGTH, "rows": []}
    for rows in ROWS:
        copies = max(2, min(STEPS, 180 // rows))
        row = {"rows": rows, "copies": copies}
        row["contiguous"] = graph_time(contiguous_steps(rows, copies))
        torch.cuda.empty_cache()
        steps = paged_steps(rows, copies)
        for name, pairs in (("paged", paged_step.EARLY_PAIRS), ("early", sys.maxsize), ("one_after_another", 0)):
            with early_below(pairs):
                row[name] = graph_time(steps)
        del steps
        torch.cuda.empty_cache()
        row["ratio"] = row["paged"] / row["contiguous"]
        print(row, flush=True)
        content["rows"].append(row)
        write_results(out, content, overwrite=True)


if __name__ == "__main__":
    main()
