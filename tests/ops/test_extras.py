"""What models add to attention (sink logits), in the PyTorch backends: outputs, gradients and steps."""

import pytest
import torch
from extras_cases import METHODS, SCALE, context_of, definition, logits, qkv, steps

from condense.ops import Extras, RuleSpans, Source, UniformRule, attend

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("name", ["cca", "dense"])
def test_outputs_and_gradients_are_those_of_the_definition(backend, name):
    """A loss over the log-sum-exp, too, which the sink logits are no part of."""
    inputs, extras = [x.requires_grad_() for x in qkv()], Extras(logits().requires_grad_())
    context = context_of(METHODS[name], *inputs)
    out, lse = METHODS[name].attend(inputs[0], context, scale=SCALE, backend=backend, return_lse=True, extras=extras)
    want = definition(context, inputs[0], extras)
    torch.testing.assert_close(out, want, **EXACT)
    plain, of_keys = METHODS[name].attend(inputs[0], context, scale=SCALE, backend=backend, return_lse=True)
    torch.testing.assert_close(lse, of_keys, rtol=0, atol=0)
    assert (out - plain).abs().max() > 0.1
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    leaves = (*inputs, extras.sink_logits)
    got, wanted = (torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (out, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_recall(backend):
    """Sink logits choose no group: the output is that without them, and each key weighs less."""
    method, (q, k, v) = METHODS["recall"], qkv()
    context, z = context_of(method, q, k, v), logits()
    out = method.attend(q, context, scale=SCALE, backend=backend, extras=Extras(z))[0]
    plain, lse = method.attend(q, context, scale=SCALE, backend=backend, return_lse=True)
    share = lse.exp() / (lse.exp() + z.exp()[:, None])
    torch.testing.assert_close(out, plain * share[..., None], **EXACT)
    everything = context_of(METHODS["recall all"], q, k, v)
    out = METHODS["recall all"].attend(q, everything, scale=SCALE, backend=backend, extras=Extras(z))[0]
    torch.testing.assert_close(out, definition(context_of(METHODS["dense"], q, k, v), q, Extras(z)), **EXACT)


@pytest.mark.parametrize("name", METHODS)
def test_steps(name):
    inputs, extras = qkv(), Extras(logits())
    whole = METHODS[name].attend(inputs[0], context_of(METHODS[name], *inputs), scale=SCALE, extras=extras)[0]
    torch.testing.assert_close(steps(METHODS[name], *inputs, extras), whole, **EXACT)


def test_a_query_that_sees_nothing_gives_0_and_gradients_of_0(backend):
    q, k, v = qkv(length=3)
    q[0, :, 0] = torch.nan
    z, q = logits().requires_grad_(), q.requires_grad_()
    # row 0 begins with one token of padding
    spans = RuleSpans(UniformRule(1, None, max_chunks=0), torch.tensor([-1, 0]), torch.tensor([-1, 0]))
    none = Source(k[:, :, :0], v[:, :, :0])
    out, lse = attend(q, (none, Source(k, v)), spans, scale=SCALE, backend=backend, return_lse=True, extras=Extras(z))
    assert bool((out[0, :, 0] == 0).all())
    assert bool((lse[0, :, 0] == -torch.inf).all())
    out.sum().backward()
    assert bool((q.grad[0, :, 0] == 0).all())
    assert bool(z.grad.isfinite().all())


def test_low_precision_rounds_the_output_once_more():
    """In bfloat16: the error of a product with a number in float32, rounded, beside that of the output."""
    inputs, z = [x.bfloat16() for x in qkv()], logits()
    method = METHODS["dense"]
    exact = [x.double() for x in inputs]
    context, wide = context_of(method, *inputs), context_of(method, *exact)
    out = method.attend(inputs[0], context, scale=SCALE, extras=Extras(z.bfloat16()))[0]
    want = definition(wide, exact[0], Extras(z.bfloat16().double()))
    plain = method.attend(inputs[0], context, scale=SCALE)[0]
    error = (plain.double() - method.attend(exact[0], wide, scale=SCALE)[0]).abs().max()
    assert out.dtype == torch.bfloat16
    assert (out.double() - want).abs().max() <= 2 * error
