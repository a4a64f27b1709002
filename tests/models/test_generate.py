"""Every way of generating gives the same tokens with the condensed cache as without any cache."""

import copy

import pytest
import torch
from grids import grid
from models import tiny
from transformers import DynamicCache

import condense
from condense.caches import CondensedLayer

PAIRS = {
    **{f"llama-{name}": ("llama", name) for name in tiny.METHODS},
    **{f"{name}-cca": (name, "cca") for name in tiny.OTHERS},
    **{f"{name}-streaming-6": (name, "streaming-6") for name in tiny.OTHERS},
    **{f"{name}-dga": (name, "dga") for name in tiny.OTHERS},
}
FEW = {
    "llama-cca": ("llama", "cca"),
    "llama-streaming": ("llama", "streaming-select-log"),
    "opt": ("opt", "cca"),
    "dga": ("llama", "dga"),
    "deepseek_v3": ("deepseek_v3", "lca"),
}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three-beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled-beams": {"num_beams": 3, "do_sample": True},
    "three-samples": {"do_sample": True, "num_return_sequences": 3},
}
# chosen so that each prompt is past w + g - 1 and each row closes groups at its own time
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26, 32)]


def _condensed(pair):
    name, method = pair
    return condense.apply(tiny.model(name), tiny.METHODS[method])


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def model(request):
    return _condensed(request.param)


@pytest.fixture(params=FEW.values(), ids=FEW.keys())
def few(request):
    return _condensed(request.param)


def _same_seed(model, *args, **kwargs):
    torch.manual_seed(3)
    return tiny.generate(model, *args, **kwargs)


@grid(5, "model", model=PAIRS)
def test_padded_batch_equals_single_rows_and_no_cache(model):
    ids, mask = tiny.left_padded(ROWS)
    batch = tiny.generate(model, ids, attention_mask=mask)
    assert torch.equal(batch, tiny.generate(model, ids, attention_mask=mask, use_cache=False))
    for row, out in zip(ROWS, batch, strict=True):
        assert torch.equal(out[ids.shape[1] :], tiny.generate(model, row[None])[0, len(row) :])


def test_tokens_are_those_of_the_full_forward(few):
    out = tiny.generate(few, ROWS[0][None])
    best = tiny.logits(few, out[:, :-1]).argmax(-1)
    assert torch.equal(out[0, 39:], best[0, 38:])


def test_condensing_changes_the_tokens(few):
    condensed = tiny.generate(few, ROWS[0][None])
    assert not torch.equal(condensed, tiny.generate(condense.restore(few), ROWS[0][None]))


@grid(6, "few", few=FEW, mode=MODES)
def test_modes_with_cache_equal_without(few, mode):
    ids, mask = tiny.left_padded(ROWS)
    cached = _same_seed(few, ids, attention_mask=mask, **mode)
    assert torch.equal(cached, _same_seed(few, ids, attention_mask=mask, use_cache=False, **mode))


@grid(4, name=tiny.OTHERS)
def test_beams_with_cache_equal_without(name):
    model = _condensed((name, "streaming-6"))
    ids, mask = tiny.left_padded(ROWS)
    mode = MODES["three-beams"]
    cached = tiny.generate(model, ids, attention_mask=mask, **mode)
    assert torch.equal(cached, tiny.generate(model, ids, attention_mask=mask, use_cache=False, **mode))


def test_beams_of_a_batch_without_padding(few):
    ids = torch.stack([row[:26] for row in ROWS])
    cached = tiny.generate(few, ids, num_beams=4)
    assert torch.equal(cached, tiny.generate(few, ids, num_beams=4, use_cache=False))


def test_guidance_keeps_a_second_cache(few):
    settings = {"guidance_scale": 1.5, "negative_prompt_ids": ROWS[1][None]}
    settings["negative_prompt_attention_mask"] = torch.ones(1, 26, dtype=torch.long)
    cached = tiny.generate(few, ROWS[0][None], **settings)
    assert torch.equal(cached, tiny.generate(few, ROWS[0][None], use_cache=False, **settings))


@grid(4, "few", few=FEW, size=[1, 4, 7, 64])
def test_prefill_in_chunks(few, size):
    # 13 pads: with size 4 a row is all padding for three chunks
    ids, mask = tiny.left_padded(ROWS)
    whole = tiny.generate(few, ids, attention_mask=mask)
    assert torch.equal(tiny.generate(few, ids, attention_mask=mask, prefill_chunk_size=size), whole)
    assert torch.equal(tiny.generate(few, ROWS[0][None], prefill_chunk_size=size), tiny.generate(few, ROWS[0][None]))


@pytest.mark.parametrize(
    "make", [lambda m: DynamicCache(config=m.config), lambda m: DynamicCache()], ids=["config", "bare"]
)
def test_a_cache_from_the_user(few, make):
    cache = make(few)
    assert torch.equal(tiny.generate(few, ROWS[0][None], past_key_values=cache), tiny.generate(few, ROWS[0][None]))
    assert {type(layer) for layer in cache.layers} == {CondensedLayer}
    assert cache.get_seq_length() == 39 + tiny.NEW - 1


def test_conversation_goes_on_with_the_returned_cache(few):
    first = tiny.generate(few, ROWS[0][None], return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tiny.tokens(1, 9, seed=7)], dim=1)
    expected = tiny.generate(few, turn)
    cache = first.past_key_values
    assert torch.equal(tiny.generate(few, turn, past_key_values=copy.deepcopy(cache)), expected)
    chunked = tiny.generate(few, turn, past_key_values=cache, use_cache=True)
    assert torch.equal(chunked, expected)


def test_conversation_of_a_batch_with_ragged_second_turns(few):
    ids, mask = tiny.left_padded(ROWS)
    first = tiny.generate(few, ids, attention_mask=mask, return_dict_in_generate=True)
    seconds = [tiny.tokens(1, n, seed=n)[0] for n in (5, 11, 2)]
    more, more_mask = tiny.left_padded(seconds)
    turn = torch.cat([first.sequences, more], dim=1)
    # padding stands inside the rows now
    turn_mask = torch.cat([mask, torch.ones(3, tiny.NEW, dtype=torch.long), more_mask], dim=1)
    batch = tiny.generate(few, turn, attention_mask=turn_mask, past_key_values=first.past_key_values)
    assert torch.equal(batch, tiny.generate(few, turn, attention_mask=turn_mask, use_cache=False))
    for row, second, answer, out in zip(ROWS, seconds, first.sequences[:, 39:], batch, strict=True):
        single = torch.cat([row, answer, second])
        assert torch.equal(out[turn.shape[1] :], tiny.generate(few, single[None])[0, len(single) :])


def test_only_the_new_ids_with_the_whole_mask(few):
    cache = tiny.filled(few, ROWS[0][None, :30])
    out = tiny.generate(few, ROWS[0][None, 30:], past_key_values=cache, attention_mask=torch.ones(1, 39).long())
    assert torch.equal(out[:, 9:], tiny.generate(few, ROWS[0][None])[:, 39:])


def test_a_prefix_cache_is_reused_by_deep_copy(few):
    prefix = tiny.filled(few, ROWS[0][None, :30])
    for seed in (1, 2):
        ids = torch.cat([ROWS[0][:30], tiny.tokens(1, 8, seed=seed)[0]])[None]
        out = tiny.generate(few, ids, past_key_values=copy.deepcopy(prefix))
        assert torch.equal(out, tiny.generate(few, ids))
    assert prefix.get_seq_length() == 30


def test_a_filled_cache_is_initialized_as_a_stock_model_s_is():
    model, ids = tiny.model("llama"), ROWS[0][None]
    assert tiny.filled(model, ids).is_initialized
    assert tiny.filled(condense.apply(model, tiny.CCA), ids).is_initialized


def test_a_reset_cache_starts_anew(few):
    expected = tiny.generate(few, ROWS[1][None])
    cache = tiny.filled(few, torch.stack([row[:26] for row in ROWS]))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(tiny.generate(few, ROWS[1][None], past_key_values=cache), expected)


def test_inputs_embeds(few):
    ids, mask = tiny.left_padded(ROWS)
    embeds = few.get_input_embeddings()(ids)
    expected = tiny.generate(few, ids, attention_mask=mask)[:, 39:]
    settings = {"max_new_tokens": tiny.NEW, "do_sample": False, "pad_token_id": 1, "attention_mask": mask}
    assert torch.equal(few.generate(inputs_embeds=embeds, **settings), expected)


@grid(8, "few", few=FEW, num_tokens=[1, 3, 10, 20])
def test_prompt_lookup_equals_greedy(few, num_tokens):
    # a text that repeats itself, so that candidates are found, and refused after a while
    ids = torch.cat([ROWS[0][:13]] * 3)[None]
    greedy = tiny.generate(few, ids)
    assert torch.equal(tiny.generate(few, ids, prompt_lookup_num_tokens=num_tokens), greedy)


@grid(8, "few", few=FEW, assistant=["dense", "condensed", "itself"])
def test_assistants_equal_greedy(few, assistant):
    helper = copy.deepcopy(few)
    if assistant == "dense":
        condense.restore(helper)
    elif assistant == "condensed":
        condense.apply(helper, tiny.CCA.replace(group_size=2))
    helper.generation_config.num_assistant_tokens = 7
    assert torch.equal(tiny.generate(few, ROWS[0][None], assistant_model=helper), tiny.generate(few, ROWS[0][None]))


@pytest.mark.parametrize("method", [tiny.CCA, tiny.STREAMING_6], ids=["cca", "streaming-6"])
def test_early_exit_equals_greedy(method):
    # llama alone: OPT and GPT-2 run all their layers over the shorter cache, which fails in the stock model too
    model = condense.apply(tiny.model("llama"), method)
    expected = tiny.generate(model, ROWS[0][None])
    assert torch.equal(tiny.generate(model, ROWS[0][None], assistant_early_exit=2), expected)


def test_per_layer_methods_generate_as_without_cache():
    model = condense.apply(tiny.model("qwen3"), tiny.CCA, layers=[1])
    condense.apply(model, tiny.STREAMING_6, layers=[2])
    ids, mask = tiny.left_padded(ROWS)
    for mode in MODES.values():
        cached = _same_seed(model, ids, attention_mask=mask, **mode)
        assert torch.equal(cached, _same_seed(model, ids, attention_mask=mask, use_cache=False, **mode))
    greedy = tiny.generate(model, ROWS[0][None])
    assert torch.equal(tiny.generate(model, ROWS[0][None], prompt_lookup_num_tokens=3), greedy)


def test_generation_in_inference_mode(few):
    expected = tiny.generate(few, ROWS[0][None])
    with torch.inference_mode():
        assert torch.equal(tiny.generate(few, ROWS[0][None]), expected)
        cached = tiny.generate(few, ROWS[0][None], return_dict_in_generate=True)
    # a cache made there can be read outside
    turn = torch.cat([cached.sequences, ROWS[1][None]], dim=1)
    assert torch.equal(tiny.generate(few, turn, past_key_values=cached.past_key_values), tiny.generate(few, turn))
