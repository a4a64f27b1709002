"""On a CUDA device (collected only there): graphs of models with sliding windows, linear attention and convolutions."""

import pytest
from gpu.test_graph import agree
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
    rows = [tiny.tokens(1, n, seed=n)[0] for n in (50, 37)]
    ids, mask = (x.cuda() for x in tiny.left_padded(rows))
    settings = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 1}
    growing = model.generate(ids, cache_implementation="dynamic", **settings)
    decoder = condense.GraphDecoder(model, batch_size=2, max_length=128)
    for _ in range(2):
        agree(decoder.generate(ids, mask, max_new_tokens=STEPS), growing, model, mask)
    assert decoder._graph is not None
    assert not graphs
    agree(model.generate(ids, **settings), growing, model, mask)
    assert len(graphs) == (name not in small.NO_STATIC_MASKS)
