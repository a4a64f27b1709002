"""Models with a learned logit per head in their softmax (attention sinks): gradients, stock layers, Recall, saving."""

import pytest
import torch
from models import small, tiny
from transformers import AutoModelForCausalLM, StaticCache

import condense

FULL = ["full_attention"] * 2
LENGTH, PROMPT = 22, 13
CCA = condense.CCA(group_size=2, window=4)


def test_gradients_reach_the_sinks_as_in_the_stock_model():
    model, ids = small.model("gpt_oss"), tiny.tokens(2, LENGTH)
    grads = []
    for method in (None, condense.CCA(group_size=1, window=0)):
        model.zero_grad()
        if method is not None:
            condense.apply(model, method)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.sinks.grad.clone() for layer in model.model.layers])
    for stock, condensed in zip(*grads, strict=True):
        assert stock.abs().min() > 0
        torch.testing.assert_close(condensed, stock, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layers", [[0], None], ids=["one stays stock", "all condensed"])
@pytest.mark.parametrize("method", [CCA, condense.Recall(group_size=2, window=4, num_recall=2)], ids=["cca", "recall"])
def test_static_caches(method, layers):
    model = condense.apply(small.model("gpt_oss", layer_types=FULL), method, layers)
    ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (LENGTH, LENGTH - 5)])
    sizes = (PROMPT, *[1] * (LENGTH - PROMPT))
    out = tiny.in_chunks(model, ids, sizes, StaticCache(model.config, max_cache_len=40), mask)
    growing = tiny.in_chunks(model, ids, sizes, mask=mask)
    torch.testing.assert_close(out[mask.bool()], growing[mask.bool()], rtol=0, atol=1e-6)
    alone = tiny.logits(model, ids[:1])
    torch.testing.assert_close(out[:1], alone, rtol=0, atol=1e-6)


def test_recall_that_opens_every_group_is_the_stock_model():
    model, ids = small.model("gpt_oss"), tiny.tokens(2, LENGTH)
    stock = tiny.logits(model, ids)
    condense.apply(model, condense.Recall(group_size=2, window=4, num_recall=20))
    out = tiny.in_chunks(model, ids, (PROMPT, *[1] * (LENGTH - PROMPT)))
    torch.testing.assert_close(out, stock, rtol=0, atol=1e-6)


def test_saved_and_loaded(tmp_path):
    model, ids = condense.apply(small.model("gpt_oss"), CCA), tiny.tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager").eval()
    torch.testing.assert_close(tiny.logits(loaded, ids), tiny.logits(model, ids), rtol=0, atol=1e-6)
    assert torch.equal(tiny.generate(loaded, ids), tiny.generate(model, ids))
