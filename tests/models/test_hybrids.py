"""Models with layers of other kinds (sliding window, linear attention, convolution) in static caches and graphs."""

import pytest
import torch
from models import small, tiny
from transformers import StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

import condense
from condense.caches import StaticCondensedLayer
from condense.methods import StreamingLLM
from condense.models import GraphDecoder, condensed_layers

CCA, LCA = condense.CCA(group_size=2, window=4), condense.LCA(group_size=4, window=8)
# a sliding window of 6, with soft-capped scores and sink logits, too; chunks of 6; linear attention; a convolution;
# latents beside linear attention
MODELS = dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2"), CCA)
MODELS["kimi_linear"] = LCA
# linear attention of the stock models is float32
ROUNDED = {"rtol": 0, "atol": 5e-6}
PROMPT, NEW = 17, 9


@pytest.fixture(params=MODELS)
def model(request):
    return condense.apply(small.model(request.param), MODELS[request.param])


@pytest.mark.parametrize("sizes", [(PROMPT, *[1] * NEW), (3, 9, 1, 13), (1,) * 26], ids=["prompt", "chunks", "steps"])
def test_a_static_cache_equals_the_whole(model, sizes):
    ids = tiny.tokens(2, sum(sizes))
    cache = StaticCache(model.config.get_text_config(), max_cache_len=40)
    out = tiny.in_chunks(model, ids, sizes, cache, torch.ones_like(ids))
    torch.testing.assert_close(out, tiny.logits(model, ids), **ROUNDED)
    assert all(isinstance(cache.layers[i], StaticCondensedLayer) for i in condensed_layers(model))
    assert not any(isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers)


@pytest.mark.parametrize("model", sorted(set(MODELS) - set(small.NO_STATIC_MASKS)), indirect=True)
def test_padded_rows_and_beams_as_in_a_growing_cache(model):
    ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (PROMPT, PROMPT - 4)])
    for beams in (1, 3):
        settings = {"attention_mask": mask, "num_beams": beams, "disable_compile": True}
        static = tiny.generate(model, ids, cache_implementation="static", **settings)
        assert torch.equal(static, tiny.generate(model, ids, **settings))


def test_a_graph_decodes_prompt_after_prompt(model):
    decoder = GraphDecoder(model, batch_size=2, max_length=40)
    for seed in (1, 2):
        rows = [tiny.tokens(1, n, seed=n + seed)[0] for n in (PROMPT, PROMPT - 4)]
        ids, mask = tiny.left_padded(rows)
        expected = tiny.generate(model, ids, attention_mask=mask)
        assert torch.equal(decoder.generate(ids, mask, max_new_tokens=tiny.NEW), expected)


def test_a_window_longer_than_the_cache():
    model = condense.apply(small.model("olmo3", sliding_window=30), CCA)
    ids = tiny.tokens(1, PROMPT)
    cache = StaticCache(model.config, max_cache_len=20)
    out = tiny.in_chunks(model, ids, (9, *[1] * 8), cache)
    torch.testing.assert_close(out, tiny.logits(model, ids), **tiny.EXACT)
    assert StreamingLLM(sink=0, window=30) in [layer.method for layer in cache.layers]


def test_a_stock_model_with_a_sliding_window_has_no_graph():
    with pytest.raises(ValueError, match="stock model's layers with a sliding window cannot be decoded by a graph"):
        GraphDecoder(small.model("gemma3_text"), batch_size=1, max_length=40)
