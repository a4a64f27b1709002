"""Full forward = without cache = chunks = token by token, in every architecture; and what restore brings back."""

import copy

import pytest
import torch
from grids import grid
from models import tiny
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import condense


@pytest.fixture(params=tiny.PAIRS.values(), ids=tiny.PAIRS)
def pair(request):
    name, method = request.param
    return tiny.model(name), tiny.METHODS[method]


def test_full_forward_chunks_and_steps_agree(pair):
    model, method = pair
    ids = tiny.tokens()
    condense.apply(model, method)
    full = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.logits(model, ids, use_cache=True), full, **tiny.exact(model))
    torch.testing.assert_close(tiny.in_chunks(model, ids, tiny.CHUNKS), full, **tiny.exact(model))
    torch.testing.assert_close(tiny.in_chunks(model, ids, tiny.CHUNKS, DynamicCache()), full, **tiny.exact(model))
    torch.testing.assert_close(tiny.in_chunks(model, ids, (1,) * tiny.LENGTH), full, **tiny.exact(model))


def test_differs_from_dense_only_where_something_is_condensed(pair):
    model, method = pair
    ids = tiny.tokens()
    dense = tiny.logits(model, ids)
    difference = (tiny.logits(condense.apply(model, method), ids) - dense).abs().amax((0, 2))
    first = (
        tiny.LENGTH if isinstance(method, condense.Dense) else method.layout.rule.window + method.layout.rule.chunk - 1
    )
    if method.layout.rule.max_chunks:
        first += method.layout.rule.max_chunks  # the first tokens to close are kept
    assert bool((difference[:first] < 1e-12).all())
    assert first == tiny.LENGTH or difference[first:].max() > 1


@grid(26, "pair", pair=tiny.PAIRS, t=[1, 11, 12, 40, 60])
def test_a_later_token_leaves_earlier_logits_bit_equal(pair, t):
    model, method = pair
    condense.apply(model, method)
    ids = tiny.tokens()
    changed = ids.clone()
    changed[:, t:] = torch.where(changed[:, t:] == 5, 6, 5)
    before, after = (tiny.logits(model, x) for x in (ids, changed))
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@grid(13, "pair", pair=tiny.PAIRS)
def test_restore_brings_the_stock_model_back(pair):
    model, method = pair
    ids = tiny.tokens()
    stock, config = tiny.logits(model, ids), copy.deepcopy(model.config.to_dict())
    classes = [type(module) for module in model.modules()]
    condense.apply(model, method)
    chunked = tiny.in_chunks(model, ids, tiny.CHUNKS)
    assert condense.restore(model) is model
    assert torch.equal(tiny.logits(model, ids), stock)
    assert [type(module) for module in model.modules()] == classes
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert {type(layer) for layer in tiny.filled(model, ids).layers} == {DynamicLayer}
    assert condense.restore(model) is model
    torch.testing.assert_close(
        tiny.in_chunks(condense.apply(model, method), ids, (40, 21)), chunked, **tiny.exact(model)
    )


def test_prompt_summary_prefills_with_and_without_a_cache_and_decodes_as_streaming():
    model = condense.apply(tiny.model("llama"), tiny.CCA.replace(summary="prompt"))
    ids = tiny.tokens()
    full = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.logits(model, ids, use_cache=True), full, **tiny.exact(model))
    cache = tiny.filled(model, ids[:, :40])
    steps = tiny.in_chunks(model, ids[:, 40:], (1,) * 21, copy.deepcopy(cache))
    torch.testing.assert_close(tiny.in_chunks(model, ids[:, 40:], (21,), cache), steps, **tiny.exact(model))
    assert (steps - tiny.logits(condense.apply(model, tiny.CCA), ids)[:, 40:]).abs().max() > 1


def test_float32_parity():
    model = condense.apply(tiny.model("llama", dtype=torch.float32), tiny.STREAMING_6)
    ids = tiny.tokens()
    full = tiny.logits(model, ids)
    parts = [tiny.in_chunks(model, ids, sizes) for sizes in (tiny.CHUNKS, (1,) * tiny.LENGTH)]
    exact = tiny.logits(model.double(), ids)
    assert all(tiny.rounds_alike(part, full, exact) for part in parts)


def test_a_long_text_takes_many_blocks_of_queries():
    model = condense.apply(tiny.model("llama", max_position_embeddings=4096), tiny.STREAMING)
    ids = tiny.tokens(1, 2100)
    full = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.in_chunks(model, ids, (2000, 1, 1, 98)), full, **tiny.exact(model))
