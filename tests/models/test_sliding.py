"""Layers with a sliding window stay as they are, beside condensed ones."""

import pytest
import torch
from grids import grid
from models import tiny
from transformers import DynamicCache

import condense
from condense.models.inspect import inspect


def test_with_a_dense_method_the_whole_model_is_stock():
    model, ids = tiny.model("qwen2-mixed"), tiny.tokens()
    padded, mask = tiny.left_padded([tiny.tokens(1, 40)[0], tiny.tokens(1, 61)[0]])
    real, steps = mask.bool(), (1,) * tiny.LENGTH

    def outputs():
        return [
            tiny.logits(model, ids),
            *(tiny.in_chunks(model, ids, sizes) for sizes in (tiny.CHUNKS, steps)),
            tiny.in_chunks(model, ids, tiny.CHUNKS, DynamicCache()),
            tiny.logits(model, padded, attention_mask=mask)[real],
            *(tiny.in_chunks(model, padded, sizes, mask=mask)[real] for sizes in (tiny.CHUNKS, steps)),
        ]

    stock, stock_tokens = outputs(), tiny.generate(model, padded, attention_mask=mask)
    condense.apply(model, condense.Dense())
    for a, b in zip(outputs(), stock, strict=True):
        torch.testing.assert_close(a, b, **tiny.EXACT)
    assert torch.equal(tiny.generate(model, padded, attention_mask=mask), stock_tokens)


CASES = {name: ("qwen2-mixed", tiny.METHODS[name]) for name in ("cca", "streaming-6", "streaming-llm")}


@grid(4, "model", model=CASES, sizes={"whole": (61,), "chunks": tiny.CHUNKS, "steps": (1,) * 61})
def test_padded_rows_equal_single_ones(model, sizes):
    rows = [tiny.tokens(1, n, seed=n)[0] for n in (40, 61, 44)]
    ids, mask = tiny.left_padded(rows)
    for row, out in zip(rows, tiny.in_chunks(model, ids, sizes, mask=mask), strict=True):
        torch.testing.assert_close(out[-len(row) :], tiny.logits(model, row[None])[0], **tiny.EXACT)


@pytest.mark.parametrize("choice", [tiny.CCA, {1: tiny.CCA}], ids=["all", "one"])
def test_nothing_left_to_condense(choice):
    model, ids = tiny.model("mistral-sliding"), tiny.tokens()
    stock, message = tiny.logits(model, ids), "model has sliding windows in all layers"
    message = "layer 1 has a sliding window and cannot be condensed" if isinstance(choice, dict) else message
    for call in (condense.apply, lambda *args: inspect(*args, 100)):
        with pytest.raises(ValueError, match=message):
            call(model, choice)
    assert torch.equal(tiny.logits(model, ids), stock)
    assert not hasattr(model.config, "condense")
