"""On a CUDA device (collected only there): graphs of models with sliding windows, linear attention and convolutions."""

import pytest
from gpu.test_graph import agree
from models import small, tiny

import condense

STEPS = 60


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "jamba"])
def test_replayed_steps_give_the_growing_caches_tokens(name):
    model = condense.apply(small.model(name).float().cuda(), condense.CCA(group_size=4, window=8))
    if name in ("gpt_oss", "qwen3_next", "jamba"):  # mixtures of experts, which a graph takes only in one product
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
    agree(model.generate(ids, **settings), growing, model, mask)
