"""Peak memory of `condense.attention` on the CPU: linear in the number of tokens, forward and backward.

    python benchmarks/memory.py --output benchmarks/results/memory-cpu.json

Each number comes from a process of its own: the peak of its resident memory after the call, less the peak before it,
when the inputs were already there. So it counts the output, representatives, a block's scores and, with gradients,
all that is kept for the backward pass.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import condense
from condense.results import refuse_existing, write_results

LENGTHS = (8192, 16384, 32768, 65536)
HEADS, KV_HEADS, WIDTH = 8, 2, 64
METHODS = {"cca": condense.CCA(), "lca": condense.LCA(rep_bias="log_size")}
MIB = 2**20


def peak() -> float:
    """High-water mark of this process's resident memory, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def measure(method: condense.Method, length: int, backward: bool) -> dict[str, float]:
    """One call in this process; float32, batch 1."""
    shapes = ((1, HEADS, length, WIDTH), (1, KV_HEADS, length, WIDTH), (1, KV_HEADS, length, WIDTH))
    # threads, allocator and kernels come with the first call, whatever its length
    small = [torch.randn(1, heads, 2048, WIDTH, requires_grad=backward) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    out = condense.attention(*small, method=method, backend="torch")
    if backward:
        out.sum().backward()
    q, k, v = (torch.randn(shape, requires_grad=backward) for shape in shapes)
    before = peak()
    out = condense.attention(q, k, v, method=method, backend="torch")
    if backward:
        out.sum().backward()
    return {
        "peak_mib": peak() - before,
        "inputs_mib": sum(x.nbytes for x in (q, k, v)) / MIB,
        "output_mib": out.nbytes / MIB,
    }


def run(output: Path, lengths: tuple[int, ...], overwrite: bool) -> None:
    refuse_existing(output, "output", overwrite=overwrite)
    cases = [(name, backward, length) for name in METHODS for backward in (False, True) for length in lengths]
    rows = []
    for name, backward, length in track(cases, description="Measuring", console=Console(stderr=True)):
        job = json.dumps({"method": METHODS[name].to_dict(), "length": length, "backward": backward})
        done = subprocess.run([sys.executable, __file__, "--job", job], capture_output=True, text=True, check=True)
        rows.append({"method": name, "pass": "training" if backward else "forward", "tokens": length})
        rows[-1] |= json.loads(done.stdout)
    table = Table("method", "pass", "tokens", "peak MiB", "inputs MiB", "output MiB")
    for row in rows:
        table.add_row(*(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)
    shape = {"batch": 1, "heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTH, "dtype": "float32", "backend": "torch"}
    print(write_results(output, {"shape": shape, "methods": METHODS, "rows": rows}, overwrite=overwrite))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/memory-cpu.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is None:
        run(options.output, tuple(options.lengths), options.overwrite)
    else:
        job = json.loads(options.job)
        print(json.dumps(measure(condense.Method.parse(job["method"]), job["length"], job["backward"])))


if __name__ == "__main__":
    main()
