"""Packed documents in one call beside the same documents otherwise: one layer of Llama-3.1-8B's shape in training.

    python benchmarks/packed.py OUT.json

A row of 32,768 tokens holds documents of equal or of drawn lengths. What a layer computes from q, k and v is timed,
forward alone and with the backward pass, the plan being made once for all layers of a model and timed apart:

    packed         all documents in one call
    one document   the same tokens as one document, which sees more
    rows           the documents as rows of a batch: the same work, where their lengths are equal
    separate       a call per document
    dense rows     PyTorch's dense attention of these rows
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import condense
from condense.bench.timing import Clock, now
from condense.functional import read_whole
from condense.plan import ForwardPlan
from condense.results import write_results

H, K, D, LENGTH = 32, 8, 128, 32768
METHODS = {"cca": condense.CCA(), "lca": condense.LCA(rep_bias="log_size")}
PACKINGS = {"16 of 2,048": [2048] * 16, "4 of 8,192": [8192] * 4, "64 of 512": [512] * 64}


def drawn_lengths(seed):
    """Lengths from 64 to 8,192 tokens, more short ones than long ones, that add up to a row."""
    generator, lengths = torch.Generator().manual_seed(seed), []
    while (rest := LENGTH - sum(lengths)) > 0:
        lengths.append(min(rest, int(64 * 2 ** (7 * torch.rand(1, generator=generator).item()))))
    return lengths


def tensors(rows):
    """Random q, k, v and a gradient of the output, for a batch of rows that hold all tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v, weight = (torch.randn(rows, heads, LENGTH // rows, D, **draw) for heads in (H, K, K, H))
    return [x.requires_grad_() for x in (q, k, v)], weight


def layer(method, plan):
    """What a condensed layer computes."""

    def run(q, k, v):
        context = read_whole(method, q, k, v, scale=D**-0.5, plan=plan)
        return method.attend(q, context, scale=D**-0.5)[0]

    return run


def separate(method, lengths):
    """A call per document."""
    calls = [layer(method, ForwardPlan(n)) for n in lengths]

    def run(q, k, v):
        parts = zip(calls, *(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([call(*part) for call, *part in parts], dim=2)

    return run


def dense(q, k, v):
    """Dense causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def times(clock, run, rows):
    """Forward alone, and forward and backward."""
    inputs, weight = tensors(rows)
    with torch.no_grad():
        forward = clock.time(lambda: run(*inputs))
    both = clock.time(lambda: torch.autograd.grad(run(*inputs), inputs, weight))
    return {"forward": forward, "forward and backward": both}


def keys_per_query(method, plan):
    """How many entries and tokens a query sees, on average."""
    cpu = torch.device("cpu")
    spans = plan.reading(method, None, cpu).spans.at(0, plan.num_tokens, cpu)
    return sum((span.hi - span.lo).double().mean().item() for span in spans)


def plan_time(method, lengths):
    """Milliseconds until the arrays of a plan are on the device, the fastest of ten."""
    device, seconds = torch.device("cuda"), []
    for _ in range(10):
        start = now(device)
        ForwardPlan(LENGTH, documents=lengths).reading(method, None, device)
        seconds.append(now(device) - start)
    return 1e3 * min(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.4, help="time per measurement")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("packed: needs a CUDA device")
    clock, results = Clock(torch.device("cuda"), arguments.seconds), []
    for name, lengths in (PACKINGS | {"drawn": drawn_lengths(0)}).items():
        for method_name, method in METHODS.items() if name == "16 of 2,048" else [("cca", METHODS["cca"])]:
            rows = len(lengths) if len(set(lengths)) == 1 else None
            runs = {
                "packed": (layer(method, ForwardPlan(LENGTH, documents=lengths)), 1),
                "one document": (layer(method, ForwardPlan(LENGTH)), 1),
                "separate": (separate(method, lengths), 1),
            }
            if rows is not None:
                runs["rows"] = layer(method, ForwardPlan(LENGTH // rows)), rows
                runs["dense rows"] = dense, rows
            measured = {kind: times(clock, run, batch) for kind, (run, batch) in runs.items()}
            result = {
                "documents": name, "lengths": lengths, "method": method, "times": measured,
                "plan_ms": plan_time(method, lengths),
                "keys_per_query": {
                    "documents": keys_per_query(method, ForwardPlan(LENGTH, documents=lengths)),
                    "one document": keys_per_query(method, ForwardPlan(LENGTH)),
                },
            }  # fmt: skip
            results.append(result)
            medians = {kind: [round(x.median_ms, 3) for x in both.values()] for kind, both in measured.items()}
            print(name, method_name, medians, f"plan {result['plan_ms']:.2f} ms", flush=True)
    write_results(arguments.out, {"heads": [H, K, D], "length": LENGTH, "packings": results})


if __name__ == "__main__":
    main()
