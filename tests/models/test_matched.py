"""Models with matched biases, entries in fewer bits, and Recall that opens a share of the groups: all modes agree,
settings survive.
"""

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM, StaticCache

import condense

METHODS = {
    "cca": condense.CCA(group_size=4, window=8, rep_bias="matched"),
    "lca": condense.LCA(group_size=4, window=6, rep_bias="matched"),
    "dga": condense.DGA(group_size=4, gamma=0.3, window=5, rep_bias="matched"),
    "lca-entries-4": condense.LCA(group_size=4, window=6, rep_bias="matched", entry_bits=4),
    "store-and-entries-4": condense.Recall(group_size=4, window=8, num_recall=2, store_bits=4, entry_bits=4),
    "store-8-host": condense.Recall(group_size=4, window=8, num_recall=2, store_bits=8, store="host", slots=3),
    "recall": condense.Recall(group_size=4, window=8, num_recall=0.3, key_pooling="weighted", rep_bias="matched"),
}
SAVED = ["cca", "lca-entries-4", "recall"]


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_full_forward_chunks_and_steps_agree(name, method, static):
    model, ids = condense.apply(tiny.model(name), method), tiny.tokens()
    full = tiny.logits(model, ids)
    for sizes in (tiny.CHUNKS, (17, *[1] * (tiny.LENGTH - 17))):
        cache = StaticCache(model.config, max_cache_len=tiny.LENGTH) if static else None
        torch.testing.assert_close(tiny.in_chunks(model, ids, sizes, cache), full, **tiny.exact(model))


@pytest.mark.parametrize("method", [METHODS[name] for name in SAVED], ids=SAVED)
def test_a_saved_model_has_the_same_settings(method, tmp_path):
    model, ids = condense.apply(tiny.model("llama"), method), tiny.tokens()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype).eval()
    torch.testing.assert_close(tiny.logits(again, ids), tiny.logits(model, ids), **tiny.exact(model))
    assert condense.Recall.parse("recall:num_recall=0.3").num_recall == 0.3
