"""Gemma 3 in vLLM: sliding layers are vLLM's own, beside condensed ones; generate's tokens, anew and from the cache."""

import pytest
import torch
from small_models import SIZES, condensed, prompts_of
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import condense

RECALL = condense.Recall(group_size=4, window=24, num_recall=6, store_bits=4)
LCA = condense.LCA(group_size=4, window=24, rep_bias="log_size")
METHODS = {
    "recall": RECALL.replace(unchosen="drop"),
    "exact-8": RECALL.replace(prompt="exact", store_bits=8),
    "means": condense.CCA(group_size=4, window=19, key_pooling="mean", value_pooling="mean", rep_bias="log_size"),
    "streaming": LCA,
    "allocation": {1: RECALL, "rest": LCA.replace(entry_bits=4)},
    "one-dense-layer": {1: condense.Dense(), "rest": RECALL},
}
# read so that no piece of a prompt is one token, which exact prompts leave to Recall
LENGTHS, NEW = (610, 31, 1, 301, 64), 24


def random_gemma():
    """Queries scaled by another number than their width, rope with a base of its own in either kind of layers."""
    torch.manual_seed(0)
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    fixed = {"num_hidden_layers": 4, "sliding_window": 20, "query_pre_attn_scalar": 24}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **fixed, layer_types=kinds, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_tokens_of_generate(engine, greedy, tmp_path, method):
    model = condense.apply(random_gemma(), method)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts_of(LENGTHS), NEW)
    started = engine(tmp_path, **{**condensed(model), "max_model_len": 1024, "max_num_batched_tokens": 48})
    assert started.tokens(prompts_of(LENGTHS), NEW) == want
    outputs = started.generate(prompts_of(LENGTHS), NEW)
    assert [list(output.outputs[0].token_ids) for output in outputs] == want
    page = started.shared
    assert page < LENGTHS[0]
    assert [output.num_cached_tokens for output in outputs] == [(length - 1) // page * page for length in LENGTHS]
