"""Is the library right, and how fast: against a recurrence in float64, and beside CCA and cuDNN."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from layer import library, library_version, random_inputs, recurrence
from torch import Tensor

from condense import CCA
from condense.bench import HeadShape, KernelPlan, Setting, bench_kernel
from condense.bench.budget import judge
from condense.bench.timing import Clock
from condense.results import write_results

OURS = CCA(window=1024, summary="streaming", key_pooling="select", rep_bias="log_size")
DTYPES = (torch.float64, torch.bfloat16)


def check(options: argparse.Namespace) -> None:
    """Outputs, gradients and a step after a prompt, each within twice the error of the recurrence in bfloat16."""
    rows = [*checked(200, 5, 64, gradients=True), *checked(512, 2, 128, gradients=True)]
    write_results(options.output, {"fla": library_version(), "check": rows}, seed=0)


def checked(L: int, H: int, D: int, *, gradients: bool) -> list[dict[str, Any]]:
    """Verdicts for one row of random inputs. Exits if one is not within the budget."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    inputs, upstream = random_inputs(L, H, D), random_inputs(L, H, D, seed=1)[0]

    def run(call: Callable[[list[Tensor]], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_(gradients) for x in inputs[:5]]
        output = call([*leaves, *inputs[5:]])
        return [output.detach(), *(torch.autograd.grad(output, leaves, upstream.to(dtype)) if gradients else ())]

    wants, plain = (run(lambda x, t=t: recurrence(*x[:5], *(y.to(t) for y in x[5:])), t) for t in DTYPES)
    got = run(lambda x: library(chunk_kda, x)[0], torch.bfloat16)
    with torch.no_grad():
        first, last = ([x[:, part] for x in inputs[:5]] + inputs[5:] for part in (slice(L - 1), slice(L - 1, L)))
        got.append(library(fused_recurrent_kda, last, library(chunk_kda, first)[1])[0])
    wants, plain = ([*x, x[0][:, -1:]] for x in (wants, plain))
    of = ["output", *(f"gradient of {x}" for x in ("q", "k", "v", "decay", "beta") if gradients), "step after a prompt"]
    rows = []
    for name, *one in zip(of, got, wants, plain, strict=True):
        rows.append({"length": L, "heads": H, "width": D, "of": name, **judge(*([x] for x in one)).to_dict()})
        print(rows[-1], flush=True)
    if not all(row["passed"] for row in rows):
        sys.exit("flash-linear-attention is not within the budget")
    return rows


@torch.no_grad()
def times(options: argparse.Namespace) -> None:
    """Rows of `condense bench kernel` for CCA and cuDNN in Llama-3.1-8B's shape, and the same of KDA with 32 heads."""
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    content: dict[str, Any] = {"fla": library_version(), "check": checked(512, 32, 128, gradients=False), "rows": []}
    device = torch.device("cuda")
    setting = Setting(HeadShape(32, 8), 1, torch.bfloat16, device, 0)
    plan = KernelPlan(setting, options.length, {"cca": OURS}, ("cudnn", "cudnn_rows"), ("forward", "layer", "decode"))
    clock = Clock(device, plan.budget_s)

    def keep(row: Mapping[str, Any]) -> None:
        content["rows"].append(row)
        print({name: row.get(name) for name in ("op", "runner", "length", "times", "error")}, flush=True)
        write_results(options.output, content, seed=0, overwrite=True)

    for length in options.length:
        inputs = random_inputs(length, 32, 128)
        prompt = partial(library, chunk_kda, inputs)
        state = prompt()[1]
        keep({"op": "layer", "runner": "kda", "length": length, "times": clock.time(prompt)})
        token = random_inputs(1, 32, 128, seed=1)
        copies = math.ceil(3 * torch.cuda.get_device_properties(device).L2_cache_size / state.nbytes)
        steps = [partial(library, fused_recurrent_kda, token, state.clone()) for _ in range(copies)]
        row = {"op": "decode", "runner": "kda", "length": length, "times": clock.time_rotating(steps)}
        keep(row | {"state_bytes": state.nbytes})
        del inputs, prompt, state, steps
        torch.cuda.empty_cache()
    bench_kernel(plan, on_row=keep)
