"""On a CUDA device (collected only there): graphs of models with sliding windows, linear attention and convolutions."""

import pytest
from gpu.running import agree, generate, padded
from models import small, tiny

import condense
from condense.models.families import has_eager_experts

STEPS = 60
CCA = condense.CCA(group_size=4, window=8)
MODELS = dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "jamba"), CCA)
MODELS |= {"qwen3_5_text": CCA, "nemotron_h": CCA, "kimi_linear": condense.LCA(group_size=4, window=8)}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_give_the_growing_caches_tokens(name, graphs):
    model = condense.apply(small.model(name).float().cuda(), MODELS[name])
    if has_eager_experts(model):  # mixtures of experts, which a graph takes only in one product
        with pytest.raises(ValueError, match="batched_mm"):
            condense.GraphDecoder(model, batch_size=2, max_length=128)
        model.set_experts_implementation("batched_mm")
    ids, mask = padded(50, 37)
    growing = generate(model, ids, mask, STEPS, cache_implementation="dynamic")
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=128)
    for _ in range(2):
        agree(tiny.decoded(decoder, ids, mask, max_new_tokens=STEPS), growing, model, mask)
    assert decoder._graph is not None
    assert not graphs
    agree(generate(model, ids, mask, STEPS), growing, model, mask)
    assert len(graphs) == (name not in small.NO_STATIC_MASKS)
