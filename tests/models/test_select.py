"""DGA with a prompt's selection in models: prefill, decode, padded batches, beams, crop, refusals, saving."""

import copy

import pytest
import torch
from grids import grid
from models import tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import condense

ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26, 32, 3)]
METHODS = {
    "select": tiny.SELECT,
    "select-random": tiny.SELECT.replace(focal="random", window=0, rep_bias="none"),
    "select-streaming": tiny.SELECT.replace(summary="streaming", complementary=False),
    "select-all": tiny.SELECT.replace(min_focal=1024),
}
PAIRS = {
    **{f"llama-{name}": ("llama", method) for name, method in METHODS.items()},
    # latents are refused: tests/models/test_latent.py
    **{f"{name}-select": (name, tiny.SELECT) for name in tiny.OTHERS if name not in tiny.LATENT},
}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def model(request):
    name, method = request.param
    return condense.apply(tiny.model(name), method)


@pytest.fixture
def llama():
    return condense.apply(tiny.model("llama"), tiny.SELECT)


@grid(6, "model", model=PAIRS)
def test_prefill_with_and_without_a_cache_and_decode_in_any_steps(model):
    ids = tiny.tokens()
    full = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.logits(model, ids, use_cache=True), full, **tiny.EXACT)
    cache = tiny.filled(model, ids[:, :40])
    assert cache.get_seq_length() == 40
    steps = tiny.in_chunks(model, ids[:, 40:], (1,) * 21, copy.deepcopy(cache))
    for sizes in ((21,), (4, 9, 8), (2, 1, 18)):
        got = tiny.in_chunks(model, ids[:, 40:], sizes, copy.deepcopy(cache))
        torch.testing.assert_close(got, steps, **tiny.EXACT)


@grid(6, "model", model=PAIRS)
def test_padded_batch_equals_single_rows(model):
    ids, mask = tiny.left_padded(ROWS)
    batch = tiny.generate(model, ids, attention_mask=mask)
    for row, out in zip(ROWS, batch, strict=True):
        assert torch.equal(out[ids.shape[1] :], tiny.generate(model, row[None])[0, len(row) :])


@grid(6, "model", model=PAIRS)
def test_beams_of_a_padded_batch_equal_single_rows(model):
    ids, mask = tiny.left_padded(ROWS[:3])
    batch = tiny.generate(model, ids, attention_mask=mask, num_beams=3)
    for row, out in zip(ROWS[:3], batch, strict=True):
        assert torch.equal(out[ids.shape[1] :], tiny.generate(model, row[None], num_beams=3)[0, len(row) :])


def test_a_prompt_that_is_all_focal_is_dense_in_its_prefill():
    model = tiny.model("llama")
    ids = tiny.tokens()
    dense = tiny.logits(model, ids)
    condense.apply(model, METHODS["select-all"])
    torch.testing.assert_close(tiny.logits(model, ids), dense, **tiny.EXACT)
    assert (tiny.logits(condense.apply(model, tiny.SELECT), ids) - dense).abs().max() > 1


def test_padding_anywhere(llama):
    ids, mask = tiny.tokens(2), torch.ones(2, tiny.LENGTH, dtype=torch.long)
    mask[0, 10:17] = 0
    mask[1, 50:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = tiny.logits(llama, ids, attention_mask=mask, position_ids=positions)
    for row in range(2):
        real = mask[row].bool()
        want = tiny.logits(llama, ids[row : row + 1, real])
        torch.testing.assert_close(got[row : row + 1, real], want, **tiny.EXACT)


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
    with pytest.raises(ValueError, match="21 tokens reach into the prompt of 30 tokens"):
        cache.crop(-21)
    with pytest.raises(ValueError, match="1 tokens reach into the prompt of 30 tokens"):
        prompt.crop(-1)
    torch.testing.assert_close(tiny.in_chunks(llama, ids[:, 30:50], (20,), prompt), want, **tiny.EXACT)


def _first(*tokens):
    """Entries of prompts of so many tokens, and how many of these are focal tokens."""
    return [[count(n) for n in tokens] for count in (tiny.SELECT.prompt_reader.num_entries, tiny.SELECT.prompt_focal)]


def test_rows_follow_with_prompts_of_different_lengths(llama):
    ids, mask = tiny.left_padded(ROWS)
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


REFUSED = {
    "chunks": ({"prefill_chunk_size": 8}, "unset prefill_chunk_size"),
    "no-cache": ({"use_cache": False}, "leave use_cache on"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "generate without assistant or prompt lookup"),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_prompt_in_parts_is_refused(llama, settings, reason):
    with pytest.raises(
        ValueError, match=rf"whole prompt, alone, in one forward: {reason}, or use selection='streaming'"
    ):
        tiny.generate(llama, ROWS[0][None], **settings)


def test_saved_and_loaded(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(tiny.logits(again, tiny.tokens()), tiny.logits(llama, tiny.tokens()))
    assert condense.models.condensed_layers(again) == dict.fromkeys(range(3), tiny.SELECT)


STATIC_MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three-beams": {"num_beams": 3, "num_return_sequences": 2},
}


@grid(6, "model", model=PAIRS, mode=STATIC_MODES)
def test_a_padded_batch_in_a_static_cache(model, mode):
    ids, mask = tiny.left_padded(ROWS)
    outs = []
    for cache in ({}, {"cache_implementation": "static"}):
        torch.manual_seed(3)
        outs.append(tiny.generate(model, ids, attention_mask=mask, **mode, **cache))
    assert torch.equal(*outs)


def test_a_prompt_of_one_token_in_a_static_cache(llama):
    ids = ROWS[3][None, :1]
    settings = {"max_new_tokens": 40}
    want = tiny.generate(llama, ids, **settings)
    assert torch.equal(tiny.generate(llama, ids, cache_implementation="static", **settings), want)


def test_compiled_static_decode_after_prompts_of_different_lengths(llama):
    torch._dynamo.reset()
    ids, mask = tiny.left_padded(ROWS)
    ids, mask = torch.cat([ids, tiny.tokens(4, 25)], dim=1), torch.cat([mask, torch.ones(4, 25).long()], dim=1)
    want = tiny.in_chunks(llama, ids, (39, *[1] * 25), mask=mask)[:, 39:]
    cache = StaticCache(llama.config, max_cache_len=80)
    tiny.in_chunks(llama, ids[:, :39], (39,), cache, mask=mask[:, :39])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(llama, fullgraph=True, backend=counter, dynamic=False)
    slots = torch.nn.functional.pad(mask, (0, 80 - 64))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts = [
        tiny.logits(
            compiled,
            ids[:, i : i + 1],
            attention_mask=slots,
            position_ids=positions[:, i : i + 1],
            past_key_values=cache,
            use_cache=True,
        )
        for i in range(39, 64)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, **tiny.EXACT)
    assert counter.frame_count == 1
