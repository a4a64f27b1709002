"""Models compiled by inductor, which hands numbers to kernels in other types than a plain call does."""

import copy

import pytest
import torch
from models import tiny

import condense

METHODS = {
    "last": condense.CCA(group_size=16, window=32),
    "streaming": condense.CCA(group_size=16, window=32, summary="streaming", key_pooling="select", rep_bias="matched"),
    "mean": condense.CCA(group_size=16, window=32, key_pooling="mean", value_pooling="max"),
}


# inductor has advice to give, on TensorFloat32 for one, and Dynamo looks into functions that are cached
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_training(method):
    """Loss and gradients in float32, at most twice as far from float64 as those that are not compiled."""
    stock = tiny.model("llama", torch.float32, num_hidden_layers=1)
    tokens = tiny.tokens(2, 150, seed=0)

    def read(dtype, device, compiled):
        model = condense.apply(copy.deepcopy(stock).to(device, dtype), method)
        ids = tokens.to(device)

        def loss():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True)() if compiled else loss()
        return [x.double().cpu() for x in (value, *torch.autograd.grad(value, [*model.parameters()]))]

    exact, plain, compiled = read(torch.float64, "cpu", False), *(read(torch.float32, "cuda", x) for x in (False, True))
    for want, eager, got in zip(exact, plain, compiled, strict=True):
        budget = 2 * float((eager - want).norm()) + torch.finfo(torch.float32).eps * float(want.norm())
        assert float((got - want).norm()) <= budget
