"""Models with layers of other kinds beside full attention, with sinks and soft caps, and with a vision tower."""

from functools import partial

import pytest
import torch
from models import small, tiny
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

import condense
from condense.caches import StaticCondensedLayer
from condense.methods import StreamingLLM
from condense.models import condensed_layers
from condense.models.inspect import inspect

CCA, LCA = condense.CCA(group_size=2, window=4), condense.LCA(group_size=4, window=8)
# a sliding window of 6, with soft-capped scores and sink logits, too; chunks of 6; linear attention; a convolution;
# latents beside linear attention
MODELS = dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2"), CCA)
MODELS["kimi_linear"] = LCA
# linear attention of the stock models is float32
ROUNDED = {"rtol": 0, "atol": 5e-6}
PROMPT, NEW = 17, 9
LONG, READ = 22, 13
SIZES = (READ, *[1] * (LONG - READ))
FULL = {"layer_types": ["full_attention"] * 2}
SAME = condense.CCA(group_size=1, window=0)
ALL_OPEN = condense.Recall(group_size=2, window=4, num_recall=20)
IMAGE = 3  # the token that stands for a patch
IDS = torch.cat([torch.full((2, 4), IMAGE), tiny.tokens(2, 40).clamp(min=IMAGE + 1)], dim=1)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(params=MODELS)
def hybrid(request):
    return condense.apply(small.model(request.param), MODELS[request.param])


@pytest.mark.parametrize("sizes", [(PROMPT, *[1] * NEW), (3, 9, 1, 13), (1,) * 26], ids=["prompt", "chunks", "steps"])
def test_a_static_cache_equals_the_whole(hybrid, sizes):
    ids = tiny.tokens(2, sum(sizes))
    cache = StaticCache(hybrid.config.get_text_config(), max_cache_len=40)
    out = tiny.in_chunks(hybrid, ids, sizes, cache, torch.ones_like(ids))
    torch.testing.assert_close(out, tiny.logits(hybrid, ids), **ROUNDED)
    assert all(isinstance(cache.layers[i], StaticCondensedLayer) for i in condensed_layers(hybrid))
    assert not any(isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers)


@pytest.mark.parametrize("hybrid", sorted(set(MODELS) - set(small.NO_STATIC_MASKS)), indirect=True)
def test_padded_rows_and_beams_as_in_a_growing_cache(hybrid):
    ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n)[0] for n in (PROMPT, PROMPT - 4)])
    for beams in (1, 3):
        settings = {"attention_mask": mask, "num_beams": beams, "disable_compile": True}
        static = tiny.generate(hybrid, ids, cache_implementation="static", **settings)
        assert torch.equal(static, tiny.generate(hybrid, ids, **settings))


def test_a_graph_decodes_prompt_after_prompt(hybrid):
    decoder = condense.GraphDecoder(hybrid, batch_size=2, max_length=40)
    for seed in (1, 2):
        ids, mask = tiny.left_padded([tiny.tokens(1, n, seed=n + seed)[0] for n in (PROMPT, PROMPT - 4)])
        expected = tiny.generate(hybrid, ids, attention_mask=mask)
        assert torch.equal(tiny.decoded(decoder, ids, mask, max_new_tokens=tiny.NEW), expected)


def test_a_window_longer_than_the_cache():
    model = condense.apply(small.model("olmo3", sliding_window=30), CCA)
    ids = tiny.tokens(1, PROMPT)
    cache = StaticCache(model.config, max_cache_len=20)
    torch.testing.assert_close(tiny.in_chunks(model, ids, (9, *[1] * 8), cache), tiny.logits(model, ids), **tiny.EXACT)
    assert StreamingLLM(sink=0, window=30) in [layer.method for layer in cache.layers]


def test_nothing_left_to_condense():
    model, ids = tiny.model("mistral-sliding"), tiny.tokens()
    stock = tiny.logits(model, ids)
    for call in (condense.apply, partial(inspect, length=100)):
        tiny.refused("model has sliding windows in all layers", call, model, tiny.CCA)
    assert torch.equal(tiny.logits(model, ids), stock)
    assert not hasattr(model.config, "condense")
    said = r"layers: layer 0 has no attention that can be condensed; full are \[1\]"
    tiny.refused(said, condense.apply, small.model("granitemoehybrid"), tiny.CCA, layers=[0])


def capped(**changes):
    """A stock model; "sdpa" of the oldest transformers would leave the cap out."""
    made = small.model("gemma2", **FULL, **{"attn_logit_softcapping": 0.5} | changes)
    made.set_attn_implementation("eager")
    return made


ADDING = {"sinks": lambda: small.model("gpt_oss", **FULL), "soft caps": capped}


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("method", [SAME, ALL_OPEN], ids=["groups of one", "all groups open"])
@pytest.mark.parametrize("make", ADDING.values(), ids=ADDING)
def test_is_the_stock_model(make, method, static):
    model, ids = make(), tiny.tokens(2, LONG)
    expected = tiny.logits(model, ids)
    if make is capped:
        assert (tiny.logits(capped(attn_logit_softcapping=None), ids) - expected).abs().max() > 1e-3
    condense.apply(model, method)
    torch.testing.assert_close(tiny.logits(model, ids), expected, rtol=0, atol=1e-6)
    cache = StaticCache(model.config, max_cache_len=40) if static else None
    torch.testing.assert_close(tiny.in_chunks(model, ids, SIZES, cache), expected, rtol=0, atol=1e-6)


LEARNED = [(ADDING["sinks"], "sinks", 1e-6, 1e-9), (capped, "q_proj.weight", 1e-5, 1e-8)]


@pytest.mark.parametrize(("make", "name", "rtol", "atol"), LEARNED, ids=ADDING)
def test_gradients_are_those_of_the_stock_model(make, name, rtol, atol):
    model, ids, grads = make(), tiny.tokens(2, LONG), []
    for method in (None, SAME):
        model.zero_grad()
        if method is not None:
            condense.apply(model, method)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([layer.self_attn.get_parameter(name).grad.clone() for layer in model.model.layers])
    for stock, condensed in zip(*grads, strict=True):
        assert stock.abs().max() > 0
        torch.testing.assert_close(condensed, stock, rtol=rtol, atol=atol)


def test_a_sparse_prompt_has_no_cap():
    model = condense.apply(capped(), "vertical_slash")
    said = r"VerticalSlash\(\) has no soft-capped scores, got a cap of 0.5: use another"
    tiny.refused(said, tiny.logits, model, tiny.tokens(1, LONG))


@pytest.fixture
def llava():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    image = {"image_token_index": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=tower, text_config=tiny.config("llama"), **image)
    return LlavaForConditionalGeneration(config).to(torch.float64).eval()


def _seen(llava):
    return tiny.logits(llava, IDS, pixel_values=PIXELS)


def test_of_a_model_that_sees_the_text_alone_is_condensed(llava):
    llava.config.vision_config._attn_implementation = "eager"
    want = _seen(llava)
    condense.apply(llava, condense.CCA(window=1000))
    torch.testing.assert_close(_seen(llava), want, **tiny.EXACT)
    condense.apply(llava, tiny.CCA)
    assert float((_seen(llava) - want).abs().max()) > 0.05
    implementations = [part._attn_implementation for part in (llava.config.text_config, llava.config.vision_config)]
    assert implementations == ["condense", "eager"]
    assert torch.equal(_seen(condense.restore(llava)), want)
    assert llava.config.vision_config._attn_implementation == "eager"


def test_a_model_that_sees_is_saved_and_loaded_and_generated_from_as_others(llava, tmp_path):
    condense.apply(llava, tiny.CCA)
    settings = {"pixel_values": PIXELS, "max_new_tokens": 12, "suppress_tokens": [IMAGE]}
    assert torch.equal(tiny.generate(llava, IDS, **settings), tiny.generate(llava, IDS, **settings, use_cache=False))
    llava.save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert condensed_layers(loaded) == condensed_layers(llava) != {}
    torch.testing.assert_close(_seen(loaded), _seen(llava), **tiny.EXACT)
    condense.apply(llava, tiny.CCA.replace(summary="prompt"))
    read = partial(tiny.generate, llava, IDS[:1], pixel_values=PIXELS[:1])
    tiny.refused("unset prefill_chunk_size", read, prefill_chunk_size=7)
    assert read().shape == (1, IDS.shape[1] + tiny.NEW)
