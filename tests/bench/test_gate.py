"""The gate lets through what is right and nothing else."""

from functools import partial

import pytest
import torch
from speed import gate
from speed.budget import judge
from speed.problems import HeadShape, Setting, pooled
from two_sources import attend_to

import condense
from condense.methods import Context
from condense.ops import Source

METHODS = {
    "cca": condense.CCA(group_size=4, window=20),
    "lca": condense.LCA(group_size=4, window=20),
    "log_size": condense.CCA(group_size=4, window=20, summary="streaming", rep_bias="log_size"),
}


@pytest.fixture(params=["whole", "part"])
def length(request, monkeypatch):
    """A problem that is checked at every query, and one that is checked at some."""
    if request.param == "part":
        monkeypatch.setattr(gate, "WHOLE", 64)
        monkeypatch.setattr(gate, "PART", 16)
    return 150


def inputs_of(length, dtype):
    return Setting(HeadShape(4, 2, 32, 32), 2, dtype, torch.device("cpu"), 0).inputs(length)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def inputs(request, length):
    return inputs_of(length, request.param)


def wronged(x):
    x = x.clone()
    x.view(-1)[-1] += x.abs().mean() + 0.5
    return x


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_output(method, inputs):
    sources = pooled(method, inputs)
    out = attend_to(sources, inputs.q, scale=inputs.scale)[0]
    assert gate.check_output(out, inputs.q, sources, scale=inputs.scale, method=method).passed
    assert not gate.check_output(wronged(out), inputs.q, sources, scale=inputs.scale, method=method).passed
    entries = sources.entries._replace(k=sources.entries.k.roll(1, 2))
    without_one = Context((entries, sources.window), sources.spans)
    wrong = attend_to(without_one, inputs.q, scale=inputs.scale)[0]
    assert not gate.check_output(wrong, inputs.q, sources, scale=inputs.scale, method=method).passed


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_gradients(method, inputs):
    sources = pooled(method, inputs)

    def gradients(upstream, wrong=None):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, *sources.entries[:2], *sources.window[:2])]
        parts = Source(leaves[1], leaves[2], sources.entries.bias), Source(*leaves[3:])
        out = attend_to(Context(parts, sources.spans), leaves[0], scale=inputs.scale)[0]
        grads = torch.autograd.grad(out, leaves, upstream)
        return [x * 1.5 if i == wrong else x for i, x in enumerate(grads)]

    assert gate.check_gradients(gradients, inputs.q, sources, scale=inputs.scale, method=method).passed
    for wrong in range(5):
        call = partial(gradients, wrong=wrong)
        assert not gate.check_gradients(call, inputs.q, sources, scale=inputs.scale, method=method).passed


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_entries(method, inputs):
    sources = pooled(method, inputs)
    assert gate.check_entries(method, inputs, sources).passed
    for name in ("k", "v"):
        entries = sources.entries._replace(**{name: wronged(getattr(sources.entries, name))})
        wrong = sources._replace(sources=(entries, sources.window))
        assert not gate.check_entries(method, inputs, wrong).passed


def test_what_is_not_finite_is_wrong():
    want = torch.ones(4, dtype=torch.float64)
    got = torch.tensor([1.0, 1.0, float("nan"), 1.0])
    verdict = judge([got], [want], [want.float()])
    assert not verdict.passed
    assert verdict.to_dict()["passed"] is False
    assert judge([want.float()], [want], [want.float()]).passed


def test_near_ties_are_counted():
    inputs = inputs_of(150, torch.float32)
    method = condense.Recall(group_size=4, window=20, num_recall=5)
    context = pooled(method, inputs)
    out = method.attend(inputs.q, context, scale=inputs.scale)[0]
    check = partial(gate.check_output, q=inputs.q, scale=inputs.scale, method=method)
    # of each head and row, the queries that choose from more than 5 groups
    choosing = 2 * 4 * (150 - 20 - 6 * 4 + 1)
    assert check(out, context=context).to_dict().get("near_ties", 0) < choosing / 50
    signs, steps, *store = context.extra
    signs[:, :, 1:], steps[:, :, 1:] = signs[:, :, :1], steps[:, :, :1]
    tied = context._replace(extra=(signs, steps, *store))
    assert check(out, context=tied).to_dict()["near_ties"] == choosing
