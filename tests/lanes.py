"""The kernels held to float64 by definition, by twice the error of the torch backend in the same dtype."""

import torch
from speed.budget import judge

from condense.ops.triton import limits

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = limits.DTYPES if CUDA else [torch.float32]


def check(call, low, weights, backend="triton"):
    """Results and gradients of ``call(backend, *low)`` are within the budget. weights: the gradients of its first
    results. Returns all results that are not empty, by definition and of the kernels.
    """
    lanes = {"reference": {"dtype": torch.float64}, "torch": {"device": DEVICE}, backend: {"device": DEVICE}}
    results, found = [], []
    for name, target in lanes.items():
        inputs = [x.detach().to(**target).requires_grad_() for x in low]
        results.append([x for x in call(name, *inputs) if x.numel()])
        outs = results[-1][: len(weights)]
        back = [weight.to(x) for x, weight in zip(outs, weights, strict=True)]
        grads = torch.autograd.grad(outs, inputs, back, allow_unused=True, materialize_grads=True)
        found.append([x.detach().cpu() for x in (*outs, *grads)])
    want, yardstick, got = found
    assert all(x.dtype == y.dtype for x, y in zip(got, yardstick, strict=True))
    assert judge(got, want, yardstick).passed
    return [[x.detach().cpu() for x in of] for of in (results[0], results[2])]
