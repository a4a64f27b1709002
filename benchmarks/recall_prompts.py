"""Long prompts of Llama-3.1-8B's shape, random weights, whole and in chunks, on a GPU: Recall and stock attention.

    python benchmarks/recall_prompts.py OUT.json --cell host:524288:32768 --cell exact:131072:16384

A cell is attention, tokens and tokens per chunk (0: the whole prompt at once). Attention: "dense" (stock), "device" and
"host" (`Recall` with that store), "exact" (`Recall(prompt="exact", store="host")`). Plain `generate`, greedy, random
tokens. Each cell is read by a model of one layer first, which compiles kernels, and the host memory that the whole
model needs is pinned before it is read. The file is written anew after each cell; figures are null where memory did not
suffice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import condense
from condense.bench.model_shapes import random_model
from condense.bench.runners import Reading, read_by_loop
from condense.results import refuse_existing, write_results

METHODS = {
    "dense": None,
    "device": condense.Recall(),
    "host": condense.Recall(store="host"),
    "exact": condense.Recall(store="host", prompt="exact"),
}
MADE: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
STEPS = 10
GIB = 2**30


class Cell(NamedTuple):
    """What is read: attention, tokens, tokens per chunk, 0 for one piece."""

    attention: str
    tokens: int
    chunk: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ValueError for anything but ``attention:tokens:chunk``."""
        attention, *numbers = text.split(":")
        if attention not in METHODS or len(numbers) != 2:
            raise ValueError(f"cell must be ATTENTION:TOKENS:CHUNK with one of {', '.join(METHODS)}, got {text!r}")
        return cls(attention, *map(int, numbers))


def read(model: PreTrainedModel, cell: Cell) -> Reading:
    """The cell's prompt and `STEPS` tokens more, by plain `generate`."""
    method = METHODS[cell.attention]
    condense.restore(model)
    if method is not None:
        condense.apply(model, method)
    ids = torch.randint(0, model.config.vocab_size, (1, cell.tokens), device=model.device)
    return read_by_loop(model, ids, STEPS, cell.chunk or None)


def pin(blocks: int, size: int) -> float:
    """Seconds to pin host memory, which PyTorch keeps for the caches to come."""
    start = time.perf_counter()
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(blocks if size else 0)]
    del held
    return time.perf_counter() - start


def measured(model: PreTrainedModel, cell: Cell) -> dict[str, Any]:
    """Figures of a cell; null where memory does not suffice."""
    names = ("first_s", "step_ms_median", "steps_ms", "device_cache_gib", "host_cache_gib", "peak_gib", "pin_s")
    try:
        of_layer = read(random_model("llama-3.1-8b", num_layers=1, **MADE), cell).host_bytes
        pin_s = pin(model.config.num_hidden_layers, of_layer)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = read(model, cell)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return dict.fromkeys(names) | {"error": str(error)[:300]}
    # the first step compiles what is left, the second is captured
    steps = [1e3 * x for x in found.steps_s]
    figures = (
        round(found.first_s, 3), round(statistics.median(steps[2:]), 3), [round(x, 3) for x in steps],
        *(round(x / GIB, 3) for x in (found.cache_bytes - found.host_bytes, found.host_bytes)),
        round(torch.cuda.max_memory_allocated() / GIB, 3), round(pin_s, 2),
    )  # fmt: skip
    return dict(zip(names, figures, strict=True)) | {"weights_gib": round(before / GIB, 3)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cell", type=Cell.parse, action="append", required=True, help="as host:524288:32768")
    parser.add_argument("--layers", type=int, help="only so many of the shape's 32")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, "OUT.json", overwrite=False)
    if not torch.cuda.is_available():
        sys.exit("recall_prompts: needs a CUDA device")
    model = random_model("llama-3.1-8b", num_layers=arguments.layers, **MADE)
    rows: list[dict[str, Any]] = []
    for cell in arguments.cell:
        rows.append({**cell._asdict(), **measured(model, cell)})
        print(rows[-1], flush=True)
        content = {
            "shape": "llama-3.1-8b", "layers": model.config.num_hidden_layers, "dtype": "bfloat16", "methods": METHODS,
            "rows": rows,
        }  # fmt: skip
        write_results(arguments.out, content, seed=0, device=MADE["device"], overwrite=True)


if __name__ == "__main__":
    main()
