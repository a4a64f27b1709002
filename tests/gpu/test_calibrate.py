"""Calibrations on a GPU: stores in few bits, on keys and values and on latents."""

import pytest
import torch
from models import tiny

import condense
from condense import CCA, LCA, CalibrationConfig, Dense, Recall, StreamingLLM

RECALL = Recall(group_size=16, window=64, num_recall=4)
STORES = {
    "host": RECALL.replace(store="host", slots=2),
    "host, drop": RECALL.replace(store="host", slots=2, unchosen="drop"),
    "device": RECALL.replace(store_bits=4),
    "device, drop": RECALL.replace(store_bits=8, unchosen="drop"),
}
SIZES = {
    "llama": {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "deepseek_v3": {"kv_lora_rank": 160, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}


@pytest.mark.parametrize("name", SIZES)
def test_every_candidate_is_measured(tokenizer, text, name):
    model = tiny.model(name, torch.bfloat16, vocab_size=len(tokenizer), **SIZES[name]).to("cuda").eval()
    pooled = LCA if name == "deepseek_v3" else CCA
    pooled = pooled(group_size=16, window=64, rep_bias="log_size", entry_bits=4)
    candidates = (Dense(), *STORES.values(), pooled, StreamingLLM(window=64))
    config = CalibrationConfig(
        budget_nats=10.0, candidates=candidates, length=384, texts=2, hidden_numbers=2, min_found=0
    )
    result = condense.calibrate(model, tokenizer, [text], config)
    assert len(result.layers) == tiny.NUM_LAYERS * (len(candidates) - 1)
    assert result.verified.kl.mean <= 10
