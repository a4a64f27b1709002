"""DGA with a prompt's selection in models, beside the laws of `test_laws`: padding, crops, rows, one-token prompts."""

import copy

import pytest
import torch
from layers import tensors_of
from models import tiny
from transformers import DynamicCache

import condense
from condense.models.inspect import inspect


@pytest.fixture
def llama():
    return condense.apply(tiny.model("llama"), tiny.SELECT)


def test_padding_anywhere(llama):
    ids, mask = tiny.tokens(2), torch.ones(2, tiny.LENGTH, dtype=torch.long)
    mask[0, 10:17] = mask[1, 50:] = 0
    got = tiny.logits(llama, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row, real, out in zip(ids, mask.bool(), got, strict=True):
        torch.testing.assert_close(out[real], tiny.logits(llama, row[None, real])[0], **tiny.EXACT)


def test_crop_is_exact_after_the_prompt_and_refused_inside(llama):
    ids = tiny.tokens()
    cache = tiny.filled(llama, ids[:, :30])
    prompt = copy.deepcopy(cache)
    want = tiny.in_chunks(llama, ids[:, 30:50], (1,) * 20, cache)
    for count in (1, 6, 7, 20):
        cropped = copy.deepcopy(cache)
        cropped.crop(-count)
        got = tiny.in_chunks(llama, ids[:, 50 - count : 50], (count,), cropped)
        torch.testing.assert_close(got, want[:, 20 - count :], **tiny.EXACT)
    for full, count in ((cache, 21), (prompt, 1)):
        with pytest.raises(ValueError, match=f"{count} tokens reach into the prompt of 30 tokens"):
            full.crop(-count)
    torch.testing.assert_close(tiny.in_chunks(llama, ids[:, 30:50], (20,), prompt), want, **tiny.EXACT)


def test_bytes_are_those_that_inspect_counts(llama):
    reports = inspect(llama, tiny.SELECT, 30, itemsize=8)
    held = sum(x.nbytes for layer in tiny.filled(llama, tiny.tokens(1, 30)).layers for x in tensors_of(layer.state))
    assert held == sum(report.bytes for report in reports)
    assert all(report.flops < report.dense_flops and report.remark is None for report in reports)


def _first(*tokens):
    """Entries of prompts of so many tokens, and how many of these are focal tokens."""
    return [[count(n) for n in tokens] for count in (tiny.SELECT.num_entries, tiny.SELECT.prompt_focal)]


def test_rows_follow_with_prompts_of_different_lengths(llama):
    ids, mask = tiny.left_padded([*tiny.ROWS, tiny.tokens(1, 3, seed=3)[0]])
    with torch.no_grad():
        cache = llama(ids, attention_mask=mask, past_key_values=DynamicCache(config=llama.config)).past_key_values
    layer = cache.layers[0]
    assert [x.tolist() for x in layer.state.first] == _first(39, 26, 32, 3)
    layer.reorder_cache(torch.tensor([3, 0, 0, 2]))
    assert [x.tolist() for x in layer.state.first] == _first(3, 39, 39, 32)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 7]))
    assert [x.tolist() for x in layer.state.first] == _first(3, 32)
    layer.reset()
    assert layer.state is None
