"""Additions of models to attention (soft caps, sink logits), in the PyTorch backends: outputs, gradients and steps."""

import math

import pytest
import torch
from layers import read_request, read_whole
from oracles import oracle

import condense
from condense.caches import StaticCondensedLayer
from condense.ops import Extras, NewToken, Problem, resolve_backend
from condense.ops.hopper import limits
from condense.ops.reference.operations import visible

EXACT = {"rtol": 1e-12, "atol": 1e-12}
B, H, K, L, PROMPT = 2, 6, 2, 28, 22
# on a GPU widths that the kernels have
D, Dv = (64, 80) if torch.cuda.is_available() else (16, 24)
SCALE = 2 * D**-0.5
METHODS = {
    "cca": condense.CCA(group_size=4, window=9, rep_bias="log_size"),
    "matched": condense.CCA(group_size=4, window=9, rep_bias="matched"),
    "dense": condense.Dense(),
    "recall": condense.Recall(group_size=4, window=6, num_recall=2),
    "recall all": condense.Recall(group_size=4, window=6, num_recall=20),
}


def logits(seed=1):
    return torch.randn(H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def every_kind(dtype=torch.float64, device="cpu"):
    """Name -> extras; caps within the range of the scores, which reach 8."""
    z = logits().to(device, dtype)
    return {"sinks": Extras(sink_logits=z), "cap": Extras(softcap=3.0), "both": Extras(softcap=1.5, sink_logits=z)}


def qkv(dtype=torch.float64, device="cpu", length=L):
    return [x.to(device) for x in oracle.random_qkv(B, H, K, length, D, Dv, dtype=dtype)]


def context_of(method, q, k, v, backend="auto"):
    return read_whole(method, q, k, v, scale=SCALE, backend=backend)


def definition(context, q, extras):
    """Attention over sources with a tensor, a number or no bias each, ``[B, H, L, Dv]``."""
    k, v = (torch.cat([getattr(source, name) for source in context.sources], dim=2) for name in ("k", "v"))
    sizes = [source.k.shape[2] for source in context.sources]
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if extras.softcap:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    bias = [torch.as_tensor(0.0 if source.bias is None else source.bias, dtype=q.dtype) for source in context.sources]
    per_head = [x.expand(B, K, n) for n, x in zip(sizes, bias, strict=True)]
    scores = scores + torch.cat(per_head, dim=2).repeat_interleave(H // K, dim=1)[:, :, None]
    mask = visible(context.spans, 0, q.shape[2], sizes, q.device)
    scores = scores.masked_fill(~mask.repeat_interleave(H // mask.shape[1], dim=1), -math.inf)
    if extras.sink_logits is None:
        return scores.softmax(-1) @ v
    added = extras.sink_logits.expand(B, q.shape[2], H).mT[..., None]
    return torch.cat([scores, added], dim=-1).softmax(-1)[..., :-1] @ v


def steps(method, q, k, v, extras):
    layer = StaticCondensedLayer(method, q.shape[2])
    prompt = [x[:, :, :PROMPT] for x in (q, k, v)]
    context = layer.read(*prompt[1:], read_request(prompt[0], scale=SCALE))
    outs = [method.attend(prompt[0], context, scale=SCALE, extras=extras)[0]]
    later = zip(*(x[:, :, PROMPT:].split(1, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([*outs, *(layer.step(NewToken(*new), scale=SCALE, extras=extras) for new in later)], dim=2)


@pytest.fixture(params=every_kind())
def extras(request):
    return every_kind()[request.param]


@pytest.mark.parametrize("name", ["cca", "matched", "dense"])
def test_outputs_and_gradients_are_those_of_the_definition(backend, name, extras):
    inputs = [x.requires_grad_() for x in qkv()]
    leaves = [*inputs, *(x.requires_grad_() for x in extras if isinstance(x, torch.Tensor))]
    context = context_of(METHODS[name], *inputs)
    options = {"scale": SCALE, "backend": backend, "return_lse": True}
    out, lse = METHODS[name].attend(inputs[0], context, extras=extras, **options)
    want = definition(context, inputs[0], extras)
    torch.testing.assert_close(out, want, **EXACT)
    no_sinks = extras._replace(sink_logits=None)
    _, of_keys = METHODS[name].attend(inputs[0], context, extras=no_sinks, **options)
    torch.testing.assert_close(lse, of_keys, rtol=0, atol=0)
    assert (out - METHODS[name].attend(inputs[0], context, scale=SCALE)[0]).abs().max() > 0.1
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    got, wanted = (torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (out, want))
    torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_recall(backend, extras):
    """In a KV head with one query head a cap chooses no other groups; sink logits choose none ever."""
    (q, k, v), options = qkv(), {"scale": SCALE, "backend": backend}
    out = METHODS["recall all"].attend(q, context_of(METHODS["recall all"], q, k, v), extras=extras, **options)[0]
    torch.testing.assert_close(out, definition(context_of(METHODS["dense"], q, k, v), q, extras), **EXACT)
    method = METHODS["recall"]
    context, no_sinks = context_of(method, q, k, v), extras._replace(sink_logits=None)
    out = method.attend(q, context, extras=extras, **options)[0]
    plain, lse = method.attend(q, context, return_lse=True, extras=no_sinks, **options)
    if extras.sink_logits is not None:
        plain = plain * (lse.exp() / (lse.exp() + extras.sink_logits.exp()[:, None]))[..., None]
    torch.testing.assert_close(out, plain, **EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_steps(name, extras):
    inputs = qkv()
    whole = METHODS[name].attend(inputs[0], context_of(METHODS[name], *inputs), scale=SCALE, extras=extras)[0]
    torch.testing.assert_close(steps(METHODS[name], *inputs, extras), whole, **EXACT)


def test_low_precision(extras):
    """In bfloat16 a sink's factor rounds the output once more, after a product in float32."""
    inputs, method = [x.bfloat16() for x in qkv()], METHODS["dense"]
    low = Extras(*(x.bfloat16() if isinstance(x, torch.Tensor) else x for x in extras))
    exact = [x.double() for x in inputs]
    context, wide = context_of(method, *inputs), context_of(method, *exact)
    out = method.attend(inputs[0], context, scale=SCALE, extras=low)[0]
    want = definition(wide, exact[0], Extras(*(x.double() if isinstance(x, torch.Tensor) else x for x in low)))
    plain = method.attend(inputs[0], context, scale=SCALE)[0]
    error = (plain.double() - method.attend(exact[0], wide, scale=SCALE)[0]).abs().max()
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).abs().max() <= 2 * error


def test_hopper_has_no_soft_cap(monkeypatch):
    gpu = type("Gpu", (), {"capability": (9, 0), "multiprocessors": 1})()
    monkeypatch.setattr(limits, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    problem = Problem(torch.device("cuda"), torch.bfloat16, (64, 64))
    assert resolve_backend("hopper", problem) == "hopper"
    with pytest.raises(ValueError, match=r"'hopper' has no soft-capped scores, got a cap of 50.0; use .*'triton'"):
        resolve_backend("hopper", problem._replace(softcap=50.0))
