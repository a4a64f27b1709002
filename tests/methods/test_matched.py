"""`rep_bias="matched"`: by definition, in all modes and on latents; its limits and gradients."""

import math

import pytest
import torch
from oracles import latent_oracle, oracle

import condense
from condense.caches import CondensedLayer, StaticCondensedLayer, read_request
from condense.functional import extend
from condense.latent import latent_attention
from condense.plan import ForwardPlan

EXACT = {"rtol": 1e-10, "atol": 1e-10}
H, K, D, DV = 4, 2, 6, 5
SCALE = 0.7
METHODS = {
    "cca": condense.CCA(group_size=4, window=5, rep_bias="matched"),
    "cca-mean": condense.CCA(group_size=4, window=0, key_pooling="mean", value_pooling="mean", rep_bias="matched"),
    "cca-g1": condense.CCA(group_size=1, window=3, rep_bias="matched"),
    "lca": condense.LCA(group_size=3, window=4, rep_bias="matched"),
    "lca-9-queries": condense.LCA(group_size=4, window=3, num_summary_queries=9, rep_bias="matched"),
    "prompt": condense.CCA(group_size=4, window=6, summary="prompt", rep_bias="matched", allow_future=True),
    "dga": condense.DGA(group_size=4, gamma=0.3, rep_bias="matched"),
    "dga-streaming": condense.DGA(group_size=3, window=4, gamma=0.5, summary="streaming", rep_bias="matched"),
    "dga-no-focal": condense.DGA(group_size=5, window=2, gamma=0, rep_bias="matched"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_output_and_gradients_are_the_definition_s(name, backend):
    method, inputs = METHODS[name], oracle.random_qkv(2, H, K, 30, D, DV)
    results = []
    for function in (condense.attention, oracle.attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        options = {"backend": backend, "return_lse": True} if function is condense.attention else {}
        out, lse = function(*leaves, method=method, scale=SCALE, **options)
        seen = lse.isfinite()
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + lse[seen].square().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "prompt"])
def test_all_chunkings_agree(name):
    method, (q, k, v) = METHODS[name], oracle.random_qkv(2, H, K, 29, D, DV)
    whole = condense.attention(q, k, v, method=method, scale=SCALE, backend="torch")
    state, outs, start = None, [], 0
    for n in (7, 1, 1, 9, 1, 10):
        now = [x[:, :, start : start + n] for x in (q, k, v)]
        context, state = extend(method, state, *now, scale=SCALE, backend="torch")
        outs.append(method.attend(now[0], context, scale=SCALE, backend="torch")[0])
        start += n
    torch.testing.assert_close(torch.cat(outs, 2), whole, **EXACT)
    if state.entries[0].shape[2]:
        assert state.entries[2].shape == (2, K, state.entries[0].shape[2], 1)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "prompt"])
def test_padded_rows_and_static_buffers_read_the_same(name):
    method, counts = METHODS[name], torch.tensor([11, 17])
    q, k, v = oracle.random_qkv(2, H, K, 29, D, DV)
    padding = [6, 0]
    want = oracle.attention(q, k, v, method=method, scale=SCALE, padding=padding)[0]
    layers = CondensedLayer(method), StaticCondensedLayer(method, 29)
    for layer in layers:
        request = read_request(q[:, :, :17], scale=SCALE, counts=counts)
        context = layer.read(k[:, :, :17], v[:, :, :17], request)
        outs = [method.attend(q[:, :, :17], context, scale=SCALE)[0]]
        for t in range(17, 29):
            now = [x[:, :, t : t + 1] for x in (q, k, v)]
            if layer is layers[1]:
                outs.append(layer.step(*now, scale=SCALE))
            else:
                context = layer.read(*now[1:], read_request(now[0], scale=SCALE))
                outs.append(method.attend(now[0], context, scale=SCALE)[0])
        torch.testing.assert_close(torch.cat(outs, 2), want, **EXACT)


@pytest.mark.parametrize("name", ["cca", "lca", "dga"])
def test_latents(name):
    inputs = latent_oracle.random(2, 3, 22, (4, 2, 5, 3))
    got = latent_attention(*inputs, method=METHODS[name], return_lse=True)
    want = latent_oracle.attention(inputs, method=METHODS[name])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def biases(method, q, k, v):
    _, state = extend(method, None, q, k, v, scale=SCALE, plan=ForwardPlan(k.shape[2]))
    return state.entries[2][..., 0]


def test_equal_scores_count_as_many_as_there_are_tokens():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    bias = biases(METHODS["cca"], 0 * q, k, v)
    torch.testing.assert_close(bias, torch.full_like(bias, math.log(4)), **EXACT)


def test_one_dominant_token_counts_once():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    q[...] = k[:, :, ::4] = 40.0
    bias = biases(METHODS["cca"], q, k, v)
    torch.testing.assert_close(bias, torch.zeros_like(bias), **EXACT)


def test_weighted_keys_have_the_entropy_of_their_weights():
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    scores = SCALE * (q[:, :, 3::4, None] * k.unflatten(2, (6, 4))).sum(-1)
    entropy = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(biases(METHODS["cca"], q, k, v), entropy, **EXACT)


@pytest.mark.parametrize("pooling", ["weighted", "mean", "select", "max"])
def test_groups_of_equal_keys_give_dense_attention_s_weights(pooling):
    q, k, v = oracle.random_qkv(1, H, K, 24, D, DV)
    k, v = (x[:, :, ::4].repeat_interleave(4, 2) for x in (k, v))
    method = condense.CCA(group_size=4, window=4, key_pooling=pooling, value_pooling=pooling, rep_bias="matched")
    dense = condense.attention(q, k, v, method=condense.Dense(), scale=SCALE)
    torch.testing.assert_close(condense.attention(q, k, v, method=method, scale=SCALE), dense, **EXACT)


@pytest.mark.parametrize("pooling", ["weighted", "mean", "select", "max"])
def test_the_summary_query_sees_the_mass_of_all_tokens(pooling):
    # all queries are the summary query, and the last one sees the same sum of weights as dense attention does
    q, k, v = oracle.random_qkv(1, 1, 1, 24, D, DV)
    q = q[:, :, :1].expand(-1, -1, 24, -1)
    method = condense.CCA(group_size=4, window=0, key_pooling=pooling, rep_bias="matched")
    _, lse = condense.attention(q, k, v, method=method, scale=SCALE, return_lse=True)
    _, dense = condense.attention(q, k, v, method=condense.Dense(), scale=SCALE, return_lse=True)
    torch.testing.assert_close(lse[..., 23], dense[..., 23], **EXACT)


def test_dga_refuses_what_it_cannot_match():
    with pytest.raises(ValueError, match="rep_bias='matched' needs selection='streaming', got 'prompt'"):
        condense.DGA(rep_bias="matched", selection="prompt")
