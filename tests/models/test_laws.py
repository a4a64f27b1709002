"""Every way of reading a text is the same function, for every architecture, method, and choice of methods per layer."""

import copy

import pytest
import torch
from grids import grid
from models import tiny
from models.tiny import IDS, MASK, ROWS
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import local_torch_dtype

import condense
from condense import Recall
from condense.caches import StaticCondensedLayer
from condense.models import condensed_layers
from condense.models.inspect import inspect
from condense.models.modules import all_methods

L = tiny.LENGTH
# steps past several ends of windows and groups, from the first token on and from a prompt on, and a chunk behind them
FROM_THE_FIRST, FROM_A_PROMPT = (*[1] * 19, 42), (17, 1, 1, 1, 12, *[1] * 9, 20)
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "three-beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled-beams": {"num_beams": 3, "do_sample": True},
    "three-samples": {"do_sample": True, "num_return_sequences": 3},
    "chunks": {"prefill_chunk_size": 7},
    "chunks-of-padding": {"prefill_chunk_size": 4},  # the row with 13 pads is all padding for three chunks
    "token-by-token": {"prefill_chunk_size": 1},
}


def _slots(*gaps):
    """A mask row: 1 but for the gaps ``(start, stop)``."""
    row = torch.ones(L, dtype=torch.long)
    for start, stop in gaps:
        row[start:stop] = 0
    return row


MASKS = {
    "left": [_slots((0, 13)), _slots((0, 1)), _slots()],
    "right": [_slots((48, L)), _slots((60, L)), _slots()],
    "holes": [_slots((5, 9), (30, 31)), _slots((16, 29)), _slots((0, 2), (59, L))],
    "everything": [_slots((0, 7), (20, 40), (55, L)), _slots(), _slots((0, 60))],
    "one-row-all-padding": [_slots((0, L)), _slots(), _slots((0, 20))],
}


def _of_case(cases):
    return pytest.mark.parametrize("model", cases.values(), ids=cases, indirect=True)


def _static(model):
    return StaticCache(model.config, max_cache_len=L)


def _cannot_move_rows(model):
    return any(isinstance(m, Recall) and m.store == "host" for m in condensed_layers(model).values())


def _generate(model, ids=IDS, mask=MASK, **kwargs):
    torch.manual_seed(3)
    return tiny.generate(model, ids, attention_mask=mask, **kwargs)


@_of_case(tiny.CASES)
def test_full_forward_chunks_and_steps_agree(model):
    ids = tiny.tokens()
    full = tiny.logits(model, ids)
    torch.testing.assert_close(tiny.logits(model, ids, use_cache=True), full, **tiny.exact(model))
    chunked = [(cache, tiny.CHUNKS) for cache in (None, DynamicCache(), _static(model))]
    for cache, sizes in (*chunked, (None, FROM_THE_FIRST), (_static(model), FROM_A_PROMPT)):
        torch.testing.assert_close(tiny.in_chunks(model, ids, sizes, cache), full, **tiny.exact(model))


@_of_case(tiny.WHOLE | tiny.REREADS)
def test_whole_prompts_with_and_without_a_cache_are_followed_by_steps_of_any_size(model):
    ids, static = tiny.tokens(), _static(model)
    torch.testing.assert_close(tiny.logits(model, ids, use_cache=True), tiny.logits(model, ids), **tiny.EXACT)
    cache = tiny.filled(model, ids[:, :40])
    assert cache.get_seq_length() == 40
    steps = tiny.in_chunks(model, ids[:, 40:], (1,) * 21, copy.deepcopy(cache))
    for sizes in ((21,), (4, 9, 8), (2, 1, 18)):
        got = tiny.in_chunks(model, ids[:, 40:], sizes, copy.deepcopy(cache))
        torch.testing.assert_close(got, steps, **tiny.EXACT)
    for sizes in ((40, 4, 1, 8, 8), (9, 1, 1, 50)):
        want = tiny.in_chunks(model, ids, (sizes[0], L - sizes[0]))
        torch.testing.assert_close(tiny.in_chunks(model, ids, sizes, static), want, **tiny.EXACT)
        static.reset()


@_of_case(tiny.CHOICES)
def test_every_layer_counts_every_token_and_inspect_reports_each_by_its_method(model):
    length, held = 50, condensed_layers(model)
    cache = tiny.filled(model, tiny.tokens(1, length))
    assert [layer.get_seq_length() for layer in cache.layers] == [length] * tiny.NUM_LAYERS
    assert {i: layer.method for i, layer in enumerate(cache.layers)} == all_methods(model)
    for i, report in enumerate(inspect(model, held, length)):
        assert report.method == held.get(i)
        others = {j: method for j, method in held.items() if j != i}
        assert not others or (report in inspect(model, others, length)) == (i not in held)
        assert i not in held or report == inspect(model, {i: held[i]}, length)[i]


@grid(24, "model", model=tiny.CASES, mask=MASKS)
def test_rows_equal_their_compacted_sequences(model, mask):
    mask, ids = torch.stack(mask), tiny.tokens(3)
    full = tiny.logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert bool(full.isfinite().all())
    chunks = tiny.in_chunks(model, ids, tiny.CHUNKS, mask=mask)
    outs = full, chunks, *(tiny.in_chunks(model, ids, FROM_A_PROMPT, cache, mask) for cache in (None, _static(model)))
    for b, real in enumerate(mask.bool()):
        if bool(real.any()):
            alone = tiny.logits(model, ids[b, real][None])[0]
            for out in outs:
                torch.testing.assert_close(out[b, real], alone, **tiny.exact(model))


@grid(30, "model", model=tiny.CASES, mode=MODES)
def test_static_and_growing_caches_give_the_tokens_of_none(model, mode):
    if "num_beams" in mode and _cannot_move_rows(model):
        tiny.refused(r"beams.*store='device'", _generate, model, **mode)
        return
    want = _generate(model, use_cache=False, **{key: x for key, x in mode.items() if key != "prefill_chunk_size"})
    assert torch.equal(_generate(model, **mode), want)
    out = _generate(model, cache_implementation="static", return_dict_in_generate=True, **mode)
    assert torch.equal(out.sequences, want)
    cache = out.past_key_values
    assert type(cache) is StaticCache
    assert {i for i, la in enumerate(cache.layers) if type(la) is StaticCondensedLayer} >= {*condensed_layers(model)}
    assert int(cache.get_seq_length()) == IDS.shape[1] + tiny.NEW - 1 == cache.get_max_length()


@grid(16, "model", model=tiny.CASES | tiny.WHOLE, cache_implementation=["dynamic", "static"])
def test_defaults_of_device_and_dtype_change_nothing(model, cache_implementation):
    """Some scripts call ``torch.set_default_device("cuda")``; on "meta" numbers of the host would lose their values."""
    packed = tiny.packed((20, 19), "positions")
    want, separate = _generate(model, max_new_tokens=9), tiny.logits(model, IDS[:1], **packed)
    with torch.device("meta"), local_torch_dtype(torch.bfloat16):
        assert torch.equal(_generate(model, max_new_tokens=9, cache_implementation=cache_implementation), want)
        assert torch.equal(tiny.logits(model, IDS[:1], **packed), separate)


@grid(16, "model", model=tiny.CASES | tiny.WHOLE, beams=[1, 3], cache_implementation=["dynamic", "static"])
def test_each_row_of_a_padded_batch_gets_its_own_tokens(model, beams, cache_implementation):
    if beams > 1 and _cannot_move_rows(model):
        pytest.fail("choose cells without beams over stores in host memory")
    rows = [*ROWS, tiny.tokens(1, 3, seed=3)[0]]
    settings = {"num_beams": beams, "cache_implementation": cache_implementation}
    for row, out in zip(rows, _generate(model, *tiny.left_padded(rows), **settings), strict=True):
        alone = _generate(model, row[None], torch.ones_like(row)[None], num_beams=beams)
        assert torch.equal(out[IDS.shape[1] :], alone[0, len(row) :])


@grid(9, "model", model=tiny.CASES, num_tokens=[1, 3, 10, 20])
def test_prompt_lookup_takes_tokens_back(model, num_tokens):
    # a text that repeats itself, so that candidates are found, and refused after a while
    ids = torch.cat([ROWS[0][:13]] * 3)[None]
    assert torch.equal(tiny.generate(model, ids, prompt_lookup_num_tokens=num_tokens), tiny.generate(model, ids))


# the loaded embeddings of gemma are scaled by a number that is rounded to float32
@grid(20, "model", model={name: x for name, x in (tiny.CASES | tiny.WHOLE).items() if x[0] != "gemma"})
def test_restored_applied_again_saved_and_loaded(model, tmp_path, request):
    ids, (name, choice), held = tiny.tokens(), request.node.callspec.params["model"], condensed_layers(model)
    stock = tiny.model(name, num_hidden_layers=model.config.num_hidden_layers)
    want = tiny.logits(model, ids)
    for _ in range(2):
        assert condense.restore(model) is model
        assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in stock.modules()]
        assert torch.equal(tiny.logits(model, ids), tiny.logits(stock, ids))
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.config._attn_implementation == "sdpa"
    assert name == "qwen2-mixed" or {type(la) for la in tiny.filled(model, ids).layers} == {DynamicLayer}
    assert torch.equal(tiny.logits(condense.apply(model, choice), ids), want)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert condensed_layers(loaded) == held
    # loaded, the rotary embeddings' buffers are in float32 still
    torch.testing.assert_close(tiny.logits(loaded.double(), ids), want, **tiny.exact(model))
