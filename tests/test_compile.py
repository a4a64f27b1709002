"""Whole sequences trace as one graph: `condense.attention`, and a condensed model's training forward."""

import pytest
import torch
from models import tiny

import condense
from condense.models.padding import ALL_REAL

METHODS = {
    "cca": condense.CCA(group_size=4, window=8),
    "lca-log-bias": condense.LCA(group_size=4, window=8, rep_bias="log_size"),
    "dga": condense.DGA(group_size=4, gamma=0.5, rep_bias="log_size"),
    "streaming-llm": condense.StreamingLLM(sink=4, window=8),
}


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request):
    torch._dynamo.reset()
    return request.param


def qkv(L):
    generator = torch.Generator().manual_seed(L)
    sizes = ((2, heads, L, 6) for heads in (4, 2, 2))
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def out_and_gradients(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention(method, return_lse):
    """One compiled function for two lengths; the second is longer than a block of queries and computes blocks again."""

    def attention(q, k, v):
        result = condense.attention(q, k, v, method=method, return_lse=return_lse)
        return torch.cat([result[0], result[1][..., None]], -1) if return_lse else result

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for L in (45, 1100):
        inputs = qkv(L)
        got, want = out_and_gradients(compiled, inputs), out_and_gradients(attention, inputs)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_attention_by_the_default_compiler(method):
    """On a CPU, where it makes other code than for a GPU."""

    def attention(q, k, v):
        return condense.attention(q, k, v, method=method)

    inputs = qkv(61)
    got, want = (out_and_gradients(f, inputs) for f in (torch.compile(attention, fullgraph=True), attention))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_training_forward_of_a_model(method):
    model = condense.apply(tiny.model("llama"), method)
    ids = tiny.tokens()

    def loss(ids):
        return model(input_ids=ids, labels=ids, use_cache=False, **{ALL_REAL: True}).loss

    def loss_and_gradients(function):
        value = function(ids)
        return [value, *torch.autograd.grad(value, list(model.parameters()))]

    got = loss_and_gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    for x, y in zip(got, loss_and_gradients(loss), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
