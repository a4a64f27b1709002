"""Recall's entries by any pooling and with matched biases: by definition, with gradients, on latents."""

import pytest
import torch

import condense
from condense import Recall
from condense.caches import StaticRecallLayer, read_request
from condense.testing import oracle

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {"group_size": 4, "window": 5, "num_recall": 2, "index_bits": 16}
METHODS = {
    "weighted": Recall(**SMALL, key_pooling="weighted", value_pooling="weighted"),
    "select-max": Recall(**SMALL, key_pooling="select", value_pooling="max", rep_bias="none"),
    "matched": Recall(**SMALL, rep_bias="matched"),
    "matched-weighted": Recall(**SMALL, key_pooling="weighted", value_pooling="weighted", rep_bias="matched"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_output_and_gradients_are_the_definition_s(name, backend):
    method, inputs = METHODS[name], oracle.random_qkv(1, 4, 2, 34, 6, 5)
    results = []
    for function in (condense.attention, oracle.attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        options = {"backend": backend, "return_lse": True} if function is condense.attention else {}
        out, lse = function(*leaves, method=method, scale=0.7, **options)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_no_group_open_is_pooled_attention(name):
    method, inputs = METHODS[name].replace(num_recall=0), oracle.random_qkv(1, 4, 2, 34, 6, 5)
    fields = ("group_size", "window", "key_pooling", "value_pooling", "rep_bias")
    pooled = condense.CCA(summary="streaming", **{field: getattr(method, field) for field in fields})
    got, want = (condense.attention(*inputs, method=each) for each in (method, pooled))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_stored_bits_are_those_of_the_open_groups(bits, backend):
    """As whole rows would be read whose tokens, where a group is open, are the stored ones."""
    q, k, v = oracle.random_qkv(1, 4, 2, 34, 6, 4)
    method = Recall(**SMALL, store_bits=bits)
    out = condense.attention(q, k, v, method=method, scale=0.7, backend=backend)
    exact = condense.attention(q, k, v, method=method.replace(store_bits=16), scale=0.7, backend=backend)
    assert not torch.equal(out, exact)
    # a softmax of scores that differ by d at most weighs values by weights whose ratio differs by exp(2 d) at most
    step_k, step_v = ((x.amax() - x.amin()) / (2**bits - 1) for x in (k, v))
    d = 0.7 * float(q.abs().sum(-1).max()) * float(step_k) / 2
    allowed = (torch.e ** (2 * d) - 1) * float(v.abs().max()) + float(step_v) / 2
    assert float((out - exact).abs().max()) <= allowed * (1 + 1e-6)


def test_stored_bits_have_no_gradient():
    inputs = [x.requires_grad_() for x in oracle.random_qkv(1, 4, 2, 34, 6, 4)]
    with pytest.raises(ValueError, match="keeps no gradients of stored tokens: train with store_bits=16"):
        condense.attention(*inputs, method=Recall(**SMALL, store_bits=8))


def test_a_static_cache_without_room_for_a_group_is_read_in_pieces():
    method, (q, k, v) = METHODS["matched"], oracle.random_qkv(1, 4, 2, 8, 6, 5)
    layer, outs = StaticRecallLayer(method, 8), []
    for now in zip(*(x.split([3, 5], dim=2) for x in (q, k, v)), strict=True):
        context = layer.read(*now[1:], read_request(now[0], scale=0.7))
        outs.append(method.attend(now[0], context, scale=0.7)[0])
    want = condense.attention(q, k, v, method=condense.Dense(), scale=0.7)
    torch.testing.assert_close(torch.cat(outs, dim=2), want, **EXACT)
