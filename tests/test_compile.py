"""Whole sequences trace as one graph: `condense.attention`, and a condensed model's training forward."""

import importlib
import pkgutil
from dataclasses import fields, is_dataclass

import pytest
import torch
from models import tiny
from oracles import oracle

import condense
from condense.ops.torch import attend

LCA, DGA = (method.replace(rep_bias="log_size") for method in (tiny.METHODS["lca"], tiny.DGA))
LENGTHS = (45, 61, 13)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def qkv(L):
    return [x.requires_grad_() for x in oracle.random_qkv(2, 4, 2, L, 6, 6, seed=L)]


def out_and_gradients(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize(
    ("method", "return_lse", "lengths"),
    [(tiny.CCA, True, LENGTHS), (LCA, False, (61,)), pytest.param(LCA, False, LENGTHS, marks=pytest.mark.slow)],
    ids=str,
)
def test_attention(method, return_lse, lengths, monkeypatch):
    """One compiled function for all lengths. The second is longer than a block of queries and computes blocks again; of
    the last one group is made, a number that no other length may stand for.
    """
    monkeypatch.setattr(attend, "_block_size", lambda device, ratio: 48)

    def attention(q, k, v):
        result = condense.attention(q, k, v, method=method, return_lse=return_lse)
        return torch.cat([result[0], result[1][..., None]], -1) if return_lse else result

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for L in lengths:
        inputs = qkv(L)
        got, want = out_and_gradients(compiled, inputs), out_and_gradients(attention, inputs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # it compiles C++, of a graph that the others trace too
def test_attention_by_the_default_compiler():
    """At most twice as far from float64 as what is not compiled, in float32: PyTorch 2.11 compiles no float64 here."""

    def attention(q, k, v):
        return condense.attention(q, k, v, method=DGA)

    inputs = [x.detach().float().requires_grad_() for x in qkv(61)]
    exact = out_and_gradients(attention, [x.detach().double().requires_grad_() for x in inputs])
    eager, compiled = (out_and_gradients(f, inputs) for f in (attention, torch.compile(attention, fullgraph=True)))
    for want, plain, got in zip(exact, eager, compiled, strict=True):
        budget = 2 * (plain - want).norm() + torch.finfo(torch.float32).eps * want.norm()
        assert bool((got - want).norm() <= budget)


def _compiled_loss(model):
    def loss(ids, labels, mask=None, **kwargs):
        return model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False, **kwargs).loss

    return loss, torch.compile(loss, fullgraph=True, backend="aot_eager")


def test_training_forward_of_a_model():
    """As one graph, beside a stock layer, with what a data collator gives: labels, and padding on the right."""
    model, ids = condense.apply(tiny.model("llama", num_hidden_layers=2), DGA, layers=[1]), tiny.tokens()
    mask = torch.ones_like(ids)
    mask[0, 40:] = 0
    values = [loss(ids, ids.masked_fill(mask == 0, -100), mask) for loss in _compiled_loss(model)]
    results = ((value, *torch.autograd.grad(value, [*model.parameters()])) for value in values)
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.fixture
def one_layer():
    return condense.apply(tiny.model("llama", num_hidden_layers=1), tiny.CCA)


@torch.no_grad()
def test_a_compiled_forward_fails_on_what_it_cannot_look_at(one_layer):
    ids, (_, compiled) = tiny.tokens(), _compiled_loss(one_layer)
    positions = torch.arange(ids.shape[1])[None]
    for least, places, said in ((5, positions, "padding on the left"), (0, positions % 20, "several documents")):
        with pytest.raises(RuntimeError, match=said):
            compiled(ids, ids, (positions >= least).expand_as(ids).long(), position_ids=places)


def test_a_compiled_forward_without_a_mask_and_a_compiled_layer(one_layer):
    """With transformers' mask function, a closure, not read: rows as without compilation, and no documents."""
    ids = tiny.tokens()

    def logits(**kwargs):
        return one_layer(input_ids=ids, use_cache=False, **kwargs).logits

    compiled = torch.compile(logits, fullgraph=True, backend="eager")
    positions = torch.arange(ids.shape[1])[None]
    torch.testing.assert_close(compiled(position_ids=positions), logits(), rtol=1e-12, atol=1e-12)
    for places in (positions % 20, positions + 5 * (positions > 20)):
        with pytest.raises(RuntimeError, match="several documents"):
            compiled(position_ids=places)
    # a layer compiled alone gets a mask that was made outside of the graph
    layer = one_layer.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="several documents"):
        one_layer(input_ids=ids[:1], position_ids=positions % 20, use_cache=False)


@pytest.mark.parametrize("lengths", [(30,), pytest.param((30, 9), marks=pytest.mark.slow)], ids=str)
def test_prompts_and_steps_of_generate(one_layer, lengths):
    """Transformers' recipe: a compiled forward, generate over a static cache. The second prompt is not pooled."""
    prompts = [tiny.tokens(2, n, seed=n) for n in lengths]
    want = [tiny.generate(one_layer, ids) for ids in prompts]
    one_layer.forward = torch.compile(one_layer.forward, fullgraph=True, backend="eager")
    for ids, tokens in zip(prompts, want, strict=True):
        assert torch.equal(tiny.generate(one_layer, ids, cache_implementation="static"), tokens)


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prompt_that_needs_counts_is_not_compiled(one_layer, whole):
    ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (19, 12)])
    settings = {"attention_mask": mask, "cache_implementation": "static", "max_new_tokens": 1}
    want = tiny.generate(one_layer, ids, **settings)
    one_layer.forward = torch.compile(one_layer.forward, fullgraph=whole, backend="eager")
    if whole:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile single steps instead"):
            tiny.generate(one_layer, ids, **settings)
    else:
        assert torch.equal(tiny.generate(one_layer, ids, **settings), want)


def test_an_exported_length_is_fixed(one_layer):
    """A dynamic one is refused by PyTorch, with the way out; without a word, or either way, it is exported."""
    given = {"input_ids": tiny.tokens(), "use_cache": False}

    def export(dim):
        shapes = {"input_ids": {1: dim}, "use_cache": None}
        return torch.export.export(one_layer, (), given, dynamic_shapes=shapes, strict=False)

    for dim in (None, torch.export.Dim.AUTO):
        with torch.no_grad():
            torch.testing.assert_close(export(dim).module()(**given).logits, one_layer(**given).logits)
    with pytest.raises(torch._dynamo.exc.UserError, match=r"specialized it to be a constant .*Dim\.STATIC"):
        export(torch.export.Dim("L", min=4, max=100))


def test_fields_that_take_no_argument_come_after_positional_ones():
    """Dynamo of PyTorch 2.11 gives positional arguments of frozen dataclasses to these fields too."""
    names = [module.name for module in pkgutil.walk_packages(condense.ops.__path__, "condense.ops.")]
    modules = [importlib.import_module(name) for name in names if ".triton" not in name and ".hopper" not in name]
    kinds = {x for module in modules for x in vars(module).values() if isinstance(x, type) and is_dataclass(x)}
    assert {"RuleSpans", "NewTokens"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        given = [field.init for field in fields(kind) if not field.kw_only]
        assert given == sorted(given, reverse=True), kind
