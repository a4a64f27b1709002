"""Additions of models to attention (soft caps, sink logits), in the PyTorch backends: outputs, gradients and steps."""

import pytest
import torch
from extras_cases import METHODS, SCALE, context_of, definition, every_kind, qkv, steps

from condense.ops import Extras, Problem, resolve_backend

EXACT = {"rtol": 1e-12, "atol": 1e-12}


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
    method, (q, k, v) = METHODS["recall all"], qkv()
    out = method.attend(q, context_of(method, q, k, v), scale=SCALE, backend=backend, extras=extras)[0]
    torch.testing.assert_close(out, definition(context_of(METHODS["dense"], q, k, v), q, extras), **EXACT)
    method = METHODS["recall"]
    context, no_sinks = context_of(method, q, k, v), extras._replace(sink_logits=None)
    out = method.attend(q, context, scale=SCALE, backend=backend, extras=extras)[0]
    plain, lse = method.attend(q, context, scale=SCALE, backend=backend, return_lse=True, extras=no_sinks)
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
    from condense.ops.hopper import limits

    gpu = type("Gpu", (), {"capability": (9, 0), "multiprocessors": 1})()
    monkeypatch.setattr(limits, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    problem = Problem(torch.device("cuda"), torch.bfloat16, (64, 64))
    assert resolve_backend("hopper", problem) == "hopper"
    with pytest.raises(ValueError, match=r"'hopper' has no soft-capped scores, got a cap of 50.0; use .*'triton'"):
        resolve_backend("hopper", problem._replace(softcap=50.0))
