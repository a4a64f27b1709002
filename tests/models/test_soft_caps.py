"""Models with soft-capped scores (Gemma 2): a cap within the range of the scores; prompts, steps, Recall, training."""

import pytest
import torch
from models import small, tiny
from transformers import StaticCache

import condense

LENGTH, PROMPT = 22, 13
CAP = {"attn_logit_softcapping": 0.5, "layer_types": ["full_attention"] * 2}


def stock(**changes):
    """A stock model; "sdpa" of the oldest transformers would leave the cap out."""
    made = small.model("gemma2", **CAP | changes)
    made.set_attn_implementation("eager")
    return made


@pytest.fixture
def model():
    return stock()


def test_the_cap_matters_here(model):
    ids = tiny.tokens(1, LENGTH)
    uncapped = stock(attn_logit_softcapping=None)
    assert (tiny.logits(model, ids) - tiny.logits(uncapped, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    "method",
    [condense.CCA(group_size=1, window=0), condense.Recall(group_size=2, window=4, num_recall=20)],
    ids=["groups of one", "all groups open"],
)
def test_is_the_stock_model(model, method, cache):
    ids = tiny.tokens(2, LENGTH)
    expected = tiny.logits(model, ids)
    condense.apply(model, method)
    torch.testing.assert_close(tiny.logits(model, ids), expected, rtol=0, atol=1e-6)
    static = None if cache is None else StaticCache(model.config, max_cache_len=40)
    steps = tiny.in_chunks(model, ids, (PROMPT, *[1] * (LENGTH - PROMPT)), static)
    torch.testing.assert_close(steps, expected, rtol=0, atol=1e-6)


def test_gradients_are_those_of_the_stock_model(model):
    ids, grads = tiny.tokens(2, LENGTH), []
    for method in (None, condense.CCA(group_size=1, window=0)):
        model.zero_grad()
        if method is not None:
            condense.apply(model, method)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.q_proj.weight.grad.clone() for layer in model.model.layers])
    for dense, condensed in zip(*grads, strict=True):
        torch.testing.assert_close(condensed, dense, rtol=1e-5, atol=1e-8)


def test_a_sparse_prompt_has_none(model):
    condense.apply(model, "vertical_slash")
    with pytest.raises(ValueError, match=r"VerticalSlash\(\) has no soft-capped scores, got a cap of 0.5: use another"):
        tiny.logits(model, tiny.tokens(1, LENGTH))
