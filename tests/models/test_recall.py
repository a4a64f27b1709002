"""Recall in models, beside the laws of `test_laws`: rows, crops, stores in host memory."""

import copy

import pytest
import torch
from grids import grid
from models import tiny

import condense
from condense.caches import CondensedLayer

METHOD = condense.Recall(group_size=4, window=8, num_recall=2)
MODELS = ("llama", "gpt2", "deepseek_v2")
ROWS = [tiny.tokens(1, n, seed=n)[0] for n in (39, 26, 32)]
IDS, MASK = tiny.left_padded(ROWS)


@pytest.fixture(params=MODELS)
def model(request):
    return condense.apply(tiny.model(request.param), METHOD)


def _generate(model, **kwargs):
    torch.manual_seed(3)
    return tiny.generate(model, IDS, attention_mask=MASK, **kwargs)


def test_differs_from_dense_only_once_some_group_stays_closed(model):
    ids = tiny.tokens()
    condensed = tiny.logits(model, ids)
    difference = (condensed - tiny.logits(condense.restore(model), ids)).abs().amax((0, 2))
    first = METHOD.window + 3 * METHOD.group_size - 1
    assert bool((difference[:first] < tiny.exact(model)["atol"]).all())
    assert difference[first:].max() > 1


def test_each_row_is_what_it_is_alone(model):
    out = _generate(model)
    for row, tokens in zip(ROWS, out, strict=True):
        assert torch.equal(tokens[IDS.shape[1] :], tiny.generate(model, row[None])[0, len(row) :])


def test_exact_prompts_read_the_same_stored_tokens_in_a_padded_batch(model):
    """As the rows alone, whose prompts are read with dense attention over the tokens as they are stored."""
    condense.apply(model, METHOD.replace(prompt="exact", store_bits=8))
    got = tiny.logits(model, IDS, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0))
    for row, out in zip(ROWS, got, strict=True):
        torch.testing.assert_close(out[-len(row) :], tiny.logits(model, row[None])[0], **tiny.exact(model))


def test_tokens_that_are_taken_back(model):
    """Prompt lookup and an assistant propose tokens that are refused after a while, also across closed groups."""
    ids = torch.cat([ROWS[0][:13]] * 3)[None]
    assert torch.equal(tiny.generate(model, ids, prompt_lookup_num_tokens=10), tiny.generate(model, ids))
    helper = condense.restore(copy.deepcopy(model))
    helper.generation_config.num_assistant_tokens = 7
    assert torch.equal(tiny.generate(model, ROWS[0][None], assistant_model=helper), tiny.generate(model, ROWS[0][None]))


def test_crop_goes_back_to_what_was(model):
    ids = tiny.tokens(2, 45)
    cache, full = tiny.filled(model, ids), tiny.logits(model, ids)
    assert {type(layer) for layer in cache.layers} == {CondensedLayer}
    cache.crop(-20)
    torch.testing.assert_close(
        tiny.in_chunks(model, ids[:, 25:], (3, *[1] * 17), cache), full[:, 25:], **tiny.exact(model)
    )


@grid(2, "model", model=MODELS)
def test_a_store_in_host_memory_gives_the_same_tokens(model):
    """Growing, static, and by a decoder whose prompt comes in chunks; beams are refused."""
    want = _generate(model)
    condense.apply(model, METHOD.replace(store="host", slots=3))
    assert torch.equal(_generate(model), want)
    assert torch.equal(_generate(model, cache_implementation="static"), want)
    decoder = condense.GraphDecoder(model, batch_size=3, max_length=60)
    assert torch.equal(decoder.generate(IDS, MASK, max_new_tokens=tiny.NEW, chunk=7), want)
    with pytest.raises(ValueError, match=r"beams.*store='device'"):
        _generate(model, num_beams=3)


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_a_store_is_checked_for_latents_of_their_width(kind, monkeypatch):
    """As on a GPU, where steps with a host store round entries in blocks, of which latents must be whole ones."""
    model, widths = condense.apply(tiny.model("deepseek_v3"), METHOD.replace(store="host", entry_bits=4)), set()
    monkeypatch.setattr(
        "condense.caches.store.Store.check",
        lambda store, k, v, latent, groups=None: widths.add((k.shape[3] - v.shape[3], latent)),
    )
    mode = {"cache_implementation": "static"} if kind == "static" else {}
    tiny.generate(model, ROWS[0][None], **mode)
    latent = model.config.kv_lora_rank
    assert widths == {(latent + model.config.qk_rope_head_dim, latent)}


def test_dropout_is_refused_before_a_token_is_stored():
    model, ids = condense.apply(tiny.model("llama", attention_dropout=0.5), METHOD), tiny.tokens(1, 40)
    cache = tiny.filled(model, ids)
    with torch.no_grad(), pytest.raises(ValueError, match="has no attention dropout"):
        model.train()(ids[:, :5], past_key_values=cache, use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * tiny.NUM_LAYERS
