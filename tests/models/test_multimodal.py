"""A language model with a vision tower: the text's attention is condensed, the tower's stays as it is."""

import pytest
import torch
from models import tiny
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

import condense
from condense.models import condensed_layers

IMAGE = 3  # the token that stands for a patch
IDS = torch.cat([torch.full((2, 4), IMAGE), tiny.tokens(2, 40).clamp(min=IMAGE + 1)], dim=1)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    image = {"image_token_index": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=tower, text_config=tiny.config("llama"), **image)
    return LlavaForConditionalGeneration(config).to(torch.float64).eval()


def _logits(model):
    return tiny.logits(model, IDS, pixel_values=PIXELS)


def test_a_window_longer_than_the_text_is_dense(model):
    model.config.vision_config._attn_implementation = "eager"
    want = _logits(model)
    condense.apply(model, condense.CCA(window=1000))
    torch.testing.assert_close(_logits(model), want, **tiny.EXACT)
    condense.apply(model, tiny.CCA)
    assert float((_logits(model) - want).abs().max()) > 0.05
    implementations = [part._attn_implementation for part in (model.config.text_config, model.config.vision_config)]
    assert implementations == ["condense", "eager"]
    assert torch.equal(_logits(condense.restore(model)), want)
    assert model.config.vision_config._attn_implementation == "eager"


def test_generated_saved_and_loaded(model, tmp_path):
    condense.apply(model, tiny.CCA)
    settings = {"input_ids": IDS, "pixel_values": PIXELS, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    settings["suppress_tokens"] = [IMAGE]
    cached = model.generate(**settings)
    assert torch.equal(cached, model.generate(**settings, use_cache=False))
    model.save_pretrained(tmp_path)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert condensed_layers(loaded) == condensed_layers(model) != {}
    torch.testing.assert_close(_logits(loaded), _logits(model), **tiny.EXACT)


def test_generate_refuses_what_it_refuses_of_a_text_model(model):
    condense.apply(model, tiny.CCA.replace(summary="prompt"))
    with pytest.raises(ValueError, match="unset prefill_chunk_size"):
        tiny.generate(model, IDS[:1], pixel_values=PIXELS[:1], prefill_chunk_size=7)
    assert tiny.generate(model, IDS[:1], pixel_values=PIXELS[:1]).shape == (1, IDS.shape[1] + tiny.NEW)
