"""Layers with a sliding window stay as they are, beside condensed ones."""

import logging

import pytest
import torch
from grids import grid
from models import tiny
from transformers import DynamicCache

import condense
from condense.models import condensed_layers
from condense.models.inspect import inspect

METHODS = {"cca": tiny.CCA, "streaming-6": tiny.STREAMING_6, "streaming-llm": tiny.METHODS["streaming-llm"]}


@pytest.fixture(params=METHODS.values(), ids=METHODS.keys())
def model(request):
    return condense.apply(tiny.model("qwen2-mixed"), request.param)


def test_sliding_layers_are_left_out_and_listed(caplog):
    with caplog.at_level(logging.WARNING, logger="condense"):
        model = condense.apply(tiny.model("qwen2-mixed"), tiny.CCA)
    assert condensed_layers(model) == {0: tiny.CCA}
    assert "layers [1, 2] have a sliding window and stay as they are" in caplog.text
    caplog.clear()
    with condense.use(model, tiny.STREAMING):  # every training step
        assert condensed_layers(model) == {0: tiny.STREAMING}
    assert not caplog.text


def test_with_a_dense_method_the_whole_model_is_stock():
    model, ids = tiny.model("qwen2-mixed"), tiny.tokens()
    padded, mask = tiny.left_padded([tiny.tokens(1, 40)[0], tiny.tokens(1, 61)[0]])
    real = mask.bool()

    def outputs():
        return [
            tiny.logits(model, ids),
            tiny.in_chunks(model, ids, tiny.CHUNKS),
            tiny.in_chunks(model, ids, tiny.CHUNKS, DynamicCache()),
            tiny.in_chunks(model, ids, (1,) * tiny.LENGTH),
            tiny.logits(model, padded, attention_mask=mask)[real],
            tiny.in_chunks(model, padded, tiny.CHUNKS, mask=mask)[real],
            tiny.in_chunks(model, padded, (1,) * tiny.LENGTH, mask=mask)[real],
        ]

    stock, stock_tokens = outputs(), tiny.generate(model, padded, attention_mask=mask)
    condense.apply(model, condense.Dense())
    for a, b in zip(outputs(), stock, strict=True):
        torch.testing.assert_close(a, b, **tiny.EXACT)
    assert torch.equal(tiny.generate(model, padded, attention_mask=mask), stock_tokens)


@grid(4, "model", model=METHODS, sizes={"whole": (61,), "chunks": tiny.CHUNKS, "steps": (1,) * 61})
def test_padded_rows_equal_single_ones(model, sizes):
    rows = [tiny.tokens(1, n, seed=n)[0] for n in (40, 61, 44)]
    ids, mask = tiny.left_padded(rows)
    batch = tiny.in_chunks(model, ids, sizes, mask=mask)
    for row, out in zip(rows, batch, strict=True):
        torch.testing.assert_close(out[-len(row) :], tiny.logits(model, row[None])[0], **tiny.EXACT)


def test_generation_with_cache_equals_without(model):
    rows = [tiny.tokens(1, n, seed=n)[0] for n in (40, 31)]
    ids, mask = tiny.left_padded(rows)
    for mode in ({}, {"num_beams": 3}, {"prefill_chunk_size": 7}):
        settings = {"attention_mask": mask} | mode
        free = {k: v for k, v in settings.items() if k != "prefill_chunk_size"}
        assert torch.equal(tiny.generate(model, ids, **settings), tiny.generate(model, ids, use_cache=False, **free))
    greedy = tiny.generate(model, rows[0][None])
    assert torch.equal(tiny.generate(model, rows[0][None], prompt_lookup_num_tokens=3), greedy)


def test_nothing_left_to_condense():
    model, ids = tiny.model("mistral-sliding"), tiny.tokens()
    stock = tiny.logits(model, ids)
    with pytest.raises(ValueError, match="model has sliding windows in all layers"):
        condense.apply(model, tiny.CCA)
    with pytest.raises(ValueError, match="layer 1 has a sliding window and cannot be condensed"):
        condense.apply(model, tiny.CCA, layers=[1])
    with pytest.raises(ValueError, match="model has sliding windows in all layers"):
        inspect(model, tiny.CCA, 100)
    with pytest.raises(ValueError, match="layer 1 has a sliding window and cannot be condensed"):
        inspect(model, {1: tiny.CCA}, 100)
    assert torch.equal(tiny.logits(model, ids), stock)
    assert not hasattr(model.config, "condense")


def test_a_named_sliding_layer_is_refused():
    model = condense.apply(tiny.model("qwen2-mixed"), tiny.CCA)
    before = tiny.logits(model, tiny.tokens())
    with pytest.raises(ValueError, match=r"layer 2 has a sliding window and cannot be condensed; full are \[0\]"):
        condense.apply(model, tiny.STREAMING, layers=[0, 2])
    assert condensed_layers(model) == {0: tiny.CCA}
    assert torch.equal(tiny.logits(model, tiny.tokens()), before)


def test_training_and_restore(model):
    ids = tiny.tokens()
    model.train()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert all(bool(p.grad.any()) for p in model.parameters())
    assert torch.equal(tiny.logits(condense.restore(model).eval(), ids), tiny.logits(tiny.model("qwen2-mixed"), ids))
