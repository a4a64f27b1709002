"""Recall's entries by any pooling and with matched biases: by definition, with gradients, on latents."""

import pytest
import torch
from oracles import oracle

import condense
from condense import Recall
from condense.caches import StaticCondensedLayer, read_request
from condense.functional import read_whole

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {"group_size": 4, "window": 5, "num_recall": 2}
METHODS = {
    "weighted": Recall(**SMALL, key_pooling="weighted", value_pooling="weighted"),
    "select-max": Recall(**SMALL, key_pooling="select", value_pooling="max", rep_bias="none"),
    "matched": Recall(**SMALL, rep_bias="matched"),
    "matched-weighted": Recall(**SMALL, key_pooling="weighted", value_pooling="weighted", rep_bias="matched"),
    "matched-8-bits": Recall(**SMALL, rep_bias="matched", entry_bits=8),
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


@pytest.mark.parametrize("method", [*METHODS.values(), Recall(**SMALL)], ids=str)
def test_no_group_open_is_pooled_attention(backend, method):
    method, inputs = method.replace(num_recall=0), oracle.random_qkv(1, 4, 2, 34, 6, 5)
    fields = ("group_size", "window", "key_pooling", "value_pooling", "rep_bias", "entry_bits")
    pooled = condense.CCA(summary="streaming", **{field: getattr(method, field) for field in fields})
    got, want = (condense.attention(*inputs, method=each, backend=backend) for each in (method, pooled))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_stored_bits_are_those_of_the_open_groups(bits, backend):
    """What is read of an open group are the stored tokens; entries and window are those of the exact ones."""
    q, k, v = oracle.random_qkv(1, 4, 2, 34, 6, 4)
    method, exact = (Recall(**SMALL, store_bits=n) for n in (bits, 16))
    context = read_whole(method, q, k, v, scale=0.7)
    *index, store = context.extra
    tokens = torch.cat(method.store_format.unpack(store, 6, 4, k.dtype), dim=3)
    out = condense.attention(q, k, v, method=method, scale=0.7, backend=backend)
    want = exact.attend(q, context._replace(extra=(*index, tokens)), scale=0.7, backend=backend)[0]
    torch.testing.assert_close(out, want, **EXACT)
    assert not torch.equal(out, condense.attention(q, k, v, method=exact, scale=0.7, backend=backend))


def test_stored_bits_have_no_gradient():
    inputs = [x.requires_grad_() for x in oracle.random_qkv(1, 4, 2, 34, 6, 4)]
    with pytest.raises(ValueError, match="keeps no gradients of stored tokens: train with store_bits=16"):
        condense.attention(*inputs, method=Recall(**SMALL, store_bits=8))


def test_a_static_cache_without_room_for_a_group_is_read_in_pieces():
    method, (q, k, v) = METHODS["matched"], oracle.random_qkv(1, 4, 2, 8, 6, 5)
    layer, outs = StaticCondensedLayer(method, 8), []
    for now in zip(*(x.split([3, 5], dim=2) for x in (q, k, v)), strict=True):
        context = layer.read(*now[1:], read_request(now[0], scale=0.7))
        outs.append(method.attend(now[0], context, scale=0.7)[0])
    want = condense.attention(q, k, v, method=condense.Dense(), scale=0.7)
    torch.testing.assert_close(torch.cat(outs, dim=2), want, **EXACT)
