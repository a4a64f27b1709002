"""Every causal-LM type that the installed transformers registers: condensed exactly, or refused for a stated reason."""

import re
from pathlib import Path

import pytest
import torch
from models import small, tiny
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import condense
from condense.models.families import FAMILIES, REFUSED, obstacle

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
# type -> what the page says of it
ROWS = re.findall(r"^\| (.+?) \| (`.+?) \|$", PAGE, re.MULTILINE)
STATED = {name: said for said, names in ROWS for name in re.findall(r"`([^`]+)`", names)}
EXACT = "exact"
LENGTH, PROMPT, NUM_PADS = 18, 13, 5
CONDENSED = condense.CCA(group_size=2, window=4)
# methods that change nothing: a window longer than the text, and groups of one token
STOCK = (condense.CCA(group_size=2, window=LENGTH), condense.CCA(group_size=1, window=0))
# some models compute routers, rotations or linear attention in float32, where sums in another order differ by so much
ROUNDED = {"rtol": 0, "atol": 5e-6}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
# Llama 4 scales the queries of layers without rotation by the number of tokens in the cache
BY_POSITION = {"ministral3": {"rope_parameters": SCALED}, "llama4_text": {"floor_scale": 4, "attn_scale": 0.5}}


def test_the_page_knows_every_type():
    missing = set(small.TYPES) - set(STATED)
    assert not missing, f"decide: add to FAMILIES or REFUSED, and to docs/models.md: {sorted(missing)}"
    # the lists name families that exist, and none twice
    assert not set(FAMILIES.values()) & set(REFUSED)
    said = set(STATED.values()) - {EXACT}
    assert said <= {*REFUSED.values(), "its mask lets the tokens of a picture see each other"}


# gpt_bigcode of the oldest transformers compiles a function with it
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in small.TYPES if STATED.get(name) == EXACT])
def test_exact(name):
    model = small.model(name)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 takes SDPA for it, which does not cap scores
    ids = tiny.tokens(2, LENGTH)
    stock = tiny.logits(model, ids)
    for method in STOCK:
        with condense.use(model, method):
            torch.testing.assert_close(tiny.logits(model, ids), stock, **ROUNDED)
    with condense.use(model, CONDENSED):
        rows = [tiny.logits(model, ids[:1])[0], tiny.logits(model, ids[1:, :-NUM_PADS])[0]]
        assert (rows[0] - stock[0]).abs().max() > 1e-3
        padded, mask = tiny.left_padded([ids[0], ids[1, :-NUM_PADS]])
        steps = tiny.in_chunks(model, padded, (PROMPT, *[1] * (LENGTH - PROMPT)), mask=mask)
    torch.testing.assert_close(steps[0], rows[0], **ROUNDED)
    torch.testing.assert_close(steps[1, NUM_PADS:], rows[1], **ROUNDED)
    torch.testing.assert_close(tiny.logits(model, ids), stock, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in small.TYPES if STATED.get(name) != EXACT])
def test_refused(name):
    if name in small.UNBUILT:
        cls = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[name]]
        reason = REFUSED[cls.__module__.split(".")[-2]]
    else:
        model = small.outline(name)
        classes = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=r"has cross-attention|cannot be condensed: "):
            condense.apply(model, CONDENSED)
        assert [type(module) for module in model.modules()] == classes
        reason = obstacle(model)
    assert STATED[name] == reason


@pytest.mark.parametrize(("name", "base"), [("LlamaAttentions", nn.Module), ("Gated", modeling_llama.LlamaAttention)])
def test_an_unknown_class_is_named_with_those_like_it(name, base):
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type(name, (base,), {})
    with pytest.raises(ValueError, match=f"that condense knows, but {name}; it knows LlamaAttention[.,]"):
        condense.apply(model, CONDENSED)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", BY_POSITION)
def test_queries_scaled_by_position(name, static):
    """Scaling makes other queries, of which nothing is cached: a model with it is condensed like any other."""
    model, ids = small.model(name, **BY_POSITION[name]), tiny.tokens(1, LENGTH)
    stock = tiny.logits(model, ids)
    assert (stock - tiny.logits(small.model(name), ids)).abs().max() > 1e-3
    exact = tiny.EXACT if name == "ministral3" else ROUNDED
    for method in (STOCK[1], CONDENSED):
        condense.apply(model, method)
        whole = tiny.logits(model, ids)
        if method is not CONDENSED:
            torch.testing.assert_close(whole, stock, **exact)
        cache = StaticCache(model.config, max_cache_len=40) if static else None
        steps = tiny.in_chunks(model, ids, (PROMPT, *[1] * (LENGTH - PROMPT)), cache)
        torch.testing.assert_close(steps, whole, **exact)


def test_a_layer_that_turns_out_to_have_a_sliding_window():
    """Its configuration names it a full one, its own forward says otherwise."""
    model = small.model("minimax", sliding_window=6)
    with pytest.raises(ValueError, match="layer 0 has a sliding window and cannot be condensed"):
        tiny.logits(condense.apply(model, CONDENSED), tiny.tokens(1, LENGTH))
