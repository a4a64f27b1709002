"""Models that add to attention: a logit per head in their softmax (GPT-OSS), a cap on their scores (Gemma 2)."""

import pytest
import torch
from models import small, tiny
from transformers import AutoModelForCausalLM, StaticCache

import condense

LENGTH, PROMPT = 22, 13
SIZES = (PROMPT, *[1] * (LENGTH - PROMPT))
FULL = {"layer_types": ["full_attention"] * 2}
CCA, SAME = condense.CCA(group_size=2, window=4), condense.CCA(group_size=1, window=0)
ALL_OPEN = condense.Recall(group_size=2, window=4, num_recall=20)


def capped(**changes):
    """A stock model; "sdpa" of the oldest transformers would leave the cap out."""
    made = small.model("gemma2", **FULL, **{"attn_logit_softcapping": 0.5} | changes)
    made.set_attn_implementation("eager")
    return made


MODELS = {"sinks": lambda: small.model("gpt_oss", **FULL), "soft caps": capped}


def test_the_cap_matters_here():
    ids = tiny.tokens(1, LENGTH)
    uncapped = capped(attn_logit_softcapping=None)
    assert (tiny.logits(capped(), ids) - tiny.logits(uncapped, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("method", [SAME, ALL_OPEN], ids=["groups of one", "all groups open"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_is_the_stock_model(make, method, static):
    model, ids = make(), tiny.tokens(2, LENGTH)
    expected = tiny.logits(model, ids)
    condense.apply(model, method)
    torch.testing.assert_close(tiny.logits(model, ids), expected, rtol=0, atol=1e-6)
    cache = StaticCache(model.config, max_cache_len=40) if static else None
    torch.testing.assert_close(tiny.in_chunks(model, ids, SIZES, cache), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "name", "rtol", "atol"),
    [(MODELS["sinks"], "sinks", 1e-6, 1e-9), (capped, "q_proj.weight", 1e-5, 1e-8)],
    ids=MODELS,
)
def test_gradients_are_those_of_the_stock_model(make, name, rtol, atol):
    model, ids, grads = make(), tiny.tokens(2, LENGTH), []
    for method in (None, SAME):
        model.zero_grad()
        if method is not None:
            condense.apply(model, method)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.get_parameter(name).grad.clone() for layer in model.model.layers])
    for stock, condensed in zip(*grads, strict=True):
        assert stock.abs().max() > 0
        torch.testing.assert_close(condensed, stock, rtol=rtol, atol=atol)


def test_a_sparse_prompt_has_no_cap():
    model = condense.apply(capped(), "vertical_slash")
    with pytest.raises(ValueError, match=r"VerticalSlash\(\) has no soft-capped scores, got a cap of 0.5: use another"):
        tiny.logits(model, tiny.tokens(1, LENGTH))


@pytest.mark.parametrize("layers", [[0], None], ids=["one stays stock", "all condensed"])
@pytest.mark.parametrize("method", [CCA, condense.Recall(group_size=2, window=4, num_recall=2)], ids=["cca", "recall"])
def test_static_caches(method, layers):
    model = condense.apply(MODELS["sinks"](), method, layers)
    ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (LENGTH, LENGTH - 5)])
    out = tiny.in_chunks(model, ids, SIZES, StaticCache(model.config, max_cache_len=40), mask)
    growing = tiny.in_chunks(model, ids, SIZES, mask=mask)
    torch.testing.assert_close(out[mask.bool()], growing[mask.bool()], rtol=0, atol=1e-6)
    alone = tiny.logits(model, ids[:1])
    torch.testing.assert_close(out[:1], alone, rtol=0, atol=1e-6)


def test_saved_and_loaded(tmp_path):
    model, ids = condense.apply(small.model("gpt_oss"), CCA), tiny.tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager").eval()
    torch.testing.assert_close(tiny.logits(loaded, ids), tiny.logits(model, ids), rtol=0, atol=1e-6)
    assert torch.equal(tiny.generate(loaded, ids), tiny.generate(model, ids))
