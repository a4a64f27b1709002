"""Models compiled by inductor, which hands numbers to kernels in other types than a plain call does."""

import copy

import pytest
import torch
from gpu.running import agree
from models import tiny

import condense

METHODS = {
    "last": condense.CCA(group_size=16, window=32),
    "streaming": condense.CCA(group_size=16, window=32, summary="streaming", key_pooling="select", rep_bias="matched"),
    "mean": condense.CCA(group_size=16, window=32, key_pooling="mean", value_pooling="max"),
}
PROMPTS = {"cca": METHODS["last"], "recall": condense.Recall(group_size=16, window=32, num_recall=2)}
pytestmark = [
    # advice of inductor (on TensorFloat32, for one), and Dynamo's warning that it traces into cached functions
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # PyTorch 2.11's Dynamo makes instances of autograd functions
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_training(method):
    stock, tokens = tiny.model("llama", torch.float32, num_hidden_layers=1), tiny.tokens(2, 150, seed=0)

    def read(dtype, device, compiled):
        model = condense.apply(copy.deepcopy(stock).to(device, dtype), method)
        ids = tokens.to(device)

        def loss():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True)() if compiled else loss()
        return [x.double().cpu() for x in (value, *torch.autograd.grad(value, [*model.parameters()]))]

    exact, plain, compiled = read(torch.float64, "cpu", False), *(read(torch.float32, "cuda", x) for x in (False, True))
    for want, eager, got in zip(exact, plain, compiled, strict=True):
        budget = 2 * float((eager - want).norm()) + torch.finfo(torch.float32).eps * float(want.norm())
        assert float((got - want).norm()) <= budget


@pytest.mark.parametrize("method", PROMPTS.values(), ids=PROMPTS)
def test_prompts_and_steps_of_generate(method):
    """Transformers' recipe: a compiled forward, generate over a static cache; the second graph is for any length."""
    torch._dynamo.reset()
    model = condense.apply(tiny.model("llama", torch.float32, num_hidden_layers=1).to("cuda"), method)
    prompts = [tiny.tokens(2, n, seed=n).cuda() for n in (150, 101)]
    want = [tiny.generate(model, ids, cache_implementation="dynamic") for ids in prompts]
    stock, model.forward = model.forward, torch.compile(model.forward, fullgraph=True)
    got = [tiny.generate(model, ids, cache_implementation="static") for ids in prompts]
    model.forward = stock
    for ids, mine, theirs in zip(prompts, got, want, strict=True):
        agree(mine, theirs, model, torch.ones_like(ids))


@pytest.mark.parametrize("method", PROMPTS.values(), ids=PROMPTS)
def test_prompts_in_bfloat16(method):
    """Heads of 128, which Hopper's kernels take: logits at most twice as far from float64 as those not compiled."""
    if isinstance(method, condense.Recall):
        method = method.replace(num_recall=9)  # as many as there are, so that rounding cannot choose others
    torch._dynamo.reset()
    stock, tokens = tiny.model("llama", num_hidden_layers=1, head_dim=128), tiny.tokens(2, 150, seed=0)

    def read(dtype, device, compiled=False):
        model = condense.apply(copy.deepcopy(stock).to(device, dtype), method)
        if compiled:
            model.forward = torch.compile(model.forward, fullgraph=True)
        settings = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        result = tiny.generate(model, tokens.to(device), cache_implementation="static", **settings)
        return result.logits[0].double().cpu()

    want, *got = read(torch.float64, "cpu"), *(read(torch.bfloat16, "cuda", compiled) for compiled in (False, True))
    eager, compiled = (float((x - want).norm()) for x in got)
    assert compiled <= 2 * eager + torch.finfo(torch.bfloat16).eps * float(want.norm())
