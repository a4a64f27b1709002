"""Low precision: the torch backend errs at most twice as much as the same formula in plain eager PyTorch, and one unit
in the last place, by which a result that is computed exactly and rounded may differ.
"""

import math

import pytest
import torch
from grids import grid
from oracles import oracle, oracle_dga
from oracles.cases import DTYPES, METHODS, SHAPES, inputs_for
from speed.budget import errors, judge, one_ulp
from two_sources import array_spans, two_sources

import condense
from condense.ops import attend
from condense.ops.torch import attend as torch_attend

LOGITS = {"logits x1": 1.0, "logits x5": 5.0}


def eager_attention(q, k, v, *, method):
    """`oracle.attention` in the inputs' dtype, ``[B, H, L, Dv]``; entries are pooled in float32 and rounded once."""
    (B, H, L, D), K = q.shape, k.shape[1]
    scale = D**-0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    qbar, wide_k, wide_v = q.unflatten(1, (K, H // K)).mean(2).to(wide), k.to(wide), v.to(wide)
    heads = list(zip(*(x.flatten(0, 1) for x in (qbar, wide_k, wide_v)), strict=True))
    if method.name == "dga":  # with focal tokens by lot, the same in all heads
        rows = [oracle_dga.Row(method, mean_q[None], head_k, scale, L) for mean_q, head_k, _ in heads]
        pooled = [
            (weights @ head_k[members], weights @ head_v[members])
            for row, (_, head_k, head_v) in zip(rows, heads, strict=True)
            for members, weights in row.sees(L - 1)[1]
        ]
        # a query's groups are the first ones: they stand in the order in which they become visible
        seen = [(range(len(near)), exact) for exact, near in map(rows[0].sees, range(L))]
    else:
        seen = [oracle.visible(method, t) for t in range(L)]
        pooled = [oracle.entry(method, j, *head, scale)[:2] for head in heads for j in seen[-1][0]]
    keys, values, M = k, v, len(pooled) // (B * K)
    if M:
        entries_k, entries_v = (torch.stack(x).unflatten(0, (B, K, M)) for x in zip(*pooled, strict=True))
        keys, values = torch.cat([entries_k.to(k.dtype), k], 2), torch.cat([entries_v.to(v.dtype), v], 2)
    mask = torch.zeros(L, M + L, dtype=torch.bool)
    for t, (groups, exact) in enumerate(seen):
        mask[t, list(groups)] = True
        mask[t, [M + i for i in exact]] = True
    bias = q.new_zeros(M + L)
    if getattr(method, "rep_bias", "none") == "log_size":
        bias[:M] = math.log(method.group_size)
    keys, values = (x.repeat_interleave(H // K, 1) for x in (keys, values))
    scores = q @ keys.mT * scale + bias
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ values


@grid(24, backend=["torch", "reference"], name=[*METHODS], shape=SHAPES, dtype=DTYPES, logits=LOGITS)
def test_output_within_twice_the_eager_error(backend, name, shape, dtype, logits):
    (q, k, v), method = inputs_for(name, shape, dtype, logits=logits), METHODS[name]
    want, want_lse = oracle.attention(q, k, v, method=method)
    budget = 2 * errors(eager_attention(q, k, v, method=method), want) + one_ulp(want, dtype)
    out, lse = condense.attention(q, k, v, method=method, backend=backend, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert bool((errors(out, want) <= budget).all())
    assert bool((errors(condense.attention(q, k, v, method=method, backend=backend), want) <= budget).all())
    # the log-sum-exp is a scaled dot product of representatives in dtype: one rounding each, averaged by the weights
    largest = q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax()
    wide = torch.finfo(dtype).eps * largest * q.shape[3] ** -0.5
    assert errors(lse, want_lse)[0] <= wide


@grid(6, name=[*METHODS], dtype=DTYPES)
def test_gradients_within_twice_the_eager_error(name, dtype):
    inputs, method = [x.requires_grad_() for x in inputs_for(name, SHAPES["ratio4"], dtype)], METHODS[name]
    weight = oracle.random_qkv(1, inputs[0].shape[1], 1, 190, 48, 1, seed=3)[0].to(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad((oracle.attention(*exact, method=method)[0] * weight.double()).sum(), exact)
    outs = eager_attention(*inputs, method=method), condense.attention(*inputs, method=method, backend="torch")
    eager, got = (torch.autograd.grad(out, inputs, weight) for out in outs)
    assert judge(got, want, eager).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 256])
def test_bias_survives_rounding_in_attention(backend, size, dtype):
    """Entries (value 1) weigh as many tokens (value -1): an error d of the bias tips the output from 0 to d / 2."""
    M, N = 3, 3 * size
    q, keys = torch.zeros(1, 2, 1, 8, dtype=dtype), torch.randn(1, 1, M + N, 8).to(dtype)
    ones, everything = torch.ones_like(keys), array_spans(*(torch.tensor([[[x]]]) for x in (M, 0, N)))
    bias = torch.full((1, 1, M), math.log(size), dtype=torch.float64)
    sources = two_sources(keys[:, :, :M], ones[:, :, :M], keys[:, :, M:], -ones[:, :, M:], bias)
    out = attend(q, sources, everything, scale=1.0, backend=backend)[0]
    assert float(out.abs().max()) <= 1e-4 * math.log(size)
    # entries without bias among those with it (focal tokens) weigh like tokens of the band
    bias = torch.tensor([[[math.log(16), 0.0, math.log(16)]]])
    offsets = torch_attend._key_offsets(bias, 4, torch.bfloat16)[0, 0]
    assert offsets[1] == offsets[3]
    assert offsets[0] == offsets[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["dense", "cca-log_size", "lca-log_size"])
def test_autocast(backend, name, dtype):
    """What the same call gives on inputs in autocast's dtype, or in float64; scores and weights are never rounded."""
    inputs, of = inputs_for(name, SHAPES["ratio4"], dtype), torch.bfloat16 if dtype == torch.float32 else dtype
    inputs, low = ([x.to(to).requires_grad_() for x in inputs] for to in (dtype, of))
    method = METHODS[name]
    want, want_lse = condense.attention(*low, method=method, backend=backend, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = condense.attention(*inputs, method=method, backend=backend, return_lse=True)
        # mixed dtypes, as rotary embeddings and projections leave them
        mixed = condense.attention(inputs[0], inputs[1], low[2], method=method, backend=backend)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    torch.testing.assert_close(mixed, want)
    grads = [torch.autograd.grad(x.to(dtype).square().sum(), leaves) for x, leaves in ((out, inputs), (want, low))]
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(*grads, strict=True))
