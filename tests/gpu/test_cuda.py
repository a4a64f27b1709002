"""On a CUDA device (collected only there): error budgets of whole prompts, on kernels and on PyTorch."""

import pytest
import torch
from oracles import oracle
from oracles.cases import DTYPES, METHODS, SHAPES, inputs_for
from oracles.eager import eager_attention
from speed.budget import judge

import condense


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_output_and_gradients_within_budget(name, shape, dtype):
    method, low = METHODS[name], inputs_for(name, shape, dtype)
    weight = oracle.random_qkv(1, low[0].shape[1], 1, shape[3], shape[5], 1, seed=3)[0].to(dtype)
    exact, eager, got = (
        [x.to(**target).requires_grad_() for x in low]
        for target in ({"dtype": torch.float64}, {"device": "cuda"}, {"device": "cuda"})
    )
    want = oracle.attention(*exact, method=method)[0]
    # on the same device: it has its own exp and order of sums, and PyTorch's fused kernel has them in float32
    yardstick = eager_attention(*eager, method=method, fused=dtype == torch.float32)
    out = condense.attention(*got, method=method)
    want, yardstick, got = (
        [x.detach().cpu() for x in (result, *torch.autograd.grad(result, inputs, weight.to(result)))]
        for result, inputs in ((want, exact), (yardstick, eager), (out, got))
    )
    assert judge(got, want, yardstick).passed
