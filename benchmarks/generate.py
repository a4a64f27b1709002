r"""Plain `model.generate` of Llama-3.1-8B's shape, random weights, on a GPU: dense, and under any setting or method.

    python benchmarks/generate.py OUT.json --rounds 3 --seconds 200 --cell 32768=dense --cell 131072=dense \
        --cell 32768=recall-host --cell 131072=recall-host --cell 32768=recall-device --cell 131072=recall-device \
        --cell 32768=pooled --cell 131072=pooled
    python benchmarks/generate.py OUT.json --cell 4096x8=cca --cell 524288/32768=recall:store=host
    python benchmarks/generate.py OUT.json --liger --cell 131072=recall-device  # pip install liger-kernel

The first gives the figures of the README. A cell is tokens, then x and rows if there are several, then / and tokens per
chunk if the prompt is read in chunks, and after "=" the attention: "dense", or what `--method` of the commands takes.
Greedy, random tokens. With ``--liger`` norms, rotations and gates are Liger's kernels (arXiv:2410.10989).

Before anything is timed, each method's logits, read at once, in pieces and by token, must agree (the gate of
`python benchmarks/speed model`): one that fails is not timed. Each cell is read by a model of two layers first, which
compiles kernels, and the host memory that the whole model needs is pinned before it is read. Cells take turns for so
many rounds, or until ``--seconds`` are over; every reading is a row of the file, which is written anew after each.
Figures are null where memory did not suffice.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from speed.model_gate import ModelGate
from speed.model_shapes import random_model
from speed.runners import TimedRun, read_by_loop
from transformers import PreTrainedModel

import condense
from condense.results import refuse_existing, write_results

SHAPE = "llama-3.1-8b"
_CELL = re.compile(r"(\d+)(?:x(\d+))?(?:/(\d+))?=(.+)")


class Cell(NamedTuple):
    """One measurement: tokens, rows, tokens per chunk (0: all at once), and the attention by its text."""

    tokens: int
    rows: int
    chunk: int
    attention: str

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ValueError for anything but ``TOKENS[xROWS][/CHUNK]=ATTENTION``."""
        match = _CELL.fullmatch(text)
        if match is None:
            raise ValueError(f"cell must be TOKENS[xROWS][/CHUNK]=ATTENTION, such as 131072=recall-host, got {text!r}")
        tokens, rows, chunk, attention = match.groups()
        if attention != "dense":
            condense.Method.parse(attention)
        return cls(int(tokens), int(rows or 1), int(chunk or 0), attention)

    @property
    def method(self) -> condense.Method | None:
        """None: stock attention."""
        return None if self.attention == "dense" else condense.Method.parse(self.attention)


def read(model: PreTrainedModel, cell: Cell, steps: int) -> TimedRun:
    """The cell's prompt and ``steps`` tokens more."""
    condense.restore(model)
    if cell.method is not None:
        condense.apply(model, cell.method)
    ids = torch.randint(0, model.config.vocab_size, (cell.rows, cell.tokens), device=model.device)
    try:
        return read_by_loop(model, ids, steps, cell.chunk or None)
    finally:
        condense.restore(model)


def wrong(model: PreTrainedModel, cell: Cell) -> str | None:
    """The reason why a method's results are not what they must be; None if they are."""
    if cell.method is None:
        return None
    with torch.no_grad():
        verdict = ModelGate(model, cell.method, seed=0).check(None)
    if verdict is None or verdict.passed:
        return None
    return f"wrong: logits {verdict.share:.3g} times the bound apart, not timed"


def pin(blocks: int, size: int) -> float:
    """Seconds to pin host memory, which PyTorch keeps for the caches to come."""
    start = time.perf_counter()
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(blocks if size else 0)]
    del held
    return time.perf_counter() - start


def prepare(model: PreTrainedModel, cell: Cell) -> dict[str, Any]:
    """Compile a cell's kernels and pin its host memory."""
    # two, because the first layer of Recall opens all groups and keeps no tokens in host memory
    layers = random_model(SHAPE, num_layers=2, dtype=model.dtype, device=model.device)
    host_bytes = read(layers, cell, 4).host_bytes
    return {"host_bytes_of_a_layer": host_bytes, "pin_s": round(pin(model.config.num_hidden_layers, host_bytes), 2)}


def measured(model: PreTrainedModel, cell: Cell, steps: int) -> dict[str, Any]:
    """Figures of one reading; null where memory does not suffice. The first step compiles what is left, the second is
    recorded as a graph: the median is of the others.
    """
    is_cuda = model.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        found = read(model, cell, steps)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        names = ("first_s", "step_ms_median", "steps_ms", "device_cache_bytes", "host_cache_bytes", "peak_bytes")
        return dict.fromkeys(names) | {"error": str(error)[:300]}
    finally:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    times = [1e3 * x for x in found.steps_s]
    return {
        "first_s": round(found.first_s, 4),
        "step_ms_median": round(statistics.median(times[2:]), 4),
        "steps_ms": [round(x, 3) for x in times],
        "device_cache_bytes": found.cache_bytes - found.host_bytes,
        "host_cache_bytes": found.host_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
    }


def main() -> None:
    """Check, measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cell", type=Cell.parse, action="append", required=True, help="as 131072=recall-host")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="tokens after the first, at least 3")
    parser.add_argument("--seconds", type=float, default=600, help="no reading begins after so long")
    parser.add_argument("--layers", type=int, help="only so many of the shape's 32")
    parser.add_argument("--liger", action="store_true", help="all but attention by liger-kernel, in every cell")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, "OUT.json")
    if not torch.cuda.is_available():
        sys.exit("generate: needs a CUDA device")
    if arguments.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    device, begin = torch.device("cuda"), time.monotonic()
    model = random_model(SHAPE, num_layers=arguments.layers, dtype=torch.bfloat16, device=device)
    cells: list[Cell] = arguments.cell
    checked = {cell.attention: cell for cell in cells}
    errors = {name: error for name, cell in checked.items() if (error := wrong(model, cell)) is not None}
    print(f"checked after {time.monotonic() - begin:.0f} s: {errors or 'all agree'}", flush=True)
    right = [cell for cell in cells if cell.attention not in errors]
    prepared: dict[Cell, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    content = {
        "shape": SHAPE, "layers": model.config.num_hidden_layers, "dtype": "bfloat16", "liger": arguments.liger,
        "not_timed": errors,
        "methods": {name: cell.method for name, cell in checked.items()}, "rows": rows,
    }  # fmt: skip
    for turn in range(arguments.rounds):
        for cell in right:
            if time.monotonic() - begin > arguments.seconds:
                break
            if cell not in prepared:
                prepared[cell] = prepare(model, cell)
            rows.append({"round": turn, **cell._asdict(), **prepared[cell], **measured(model, cell, arguments.steps)})
            print(f"{time.monotonic() - begin:.0f} s: {rows[-1]}", flush=True)
            write_results(arguments.out, content, seed=0, device=device, overwrite=True)
    write_results(arguments.out, content, seed=0, device=device, overwrite=True)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
