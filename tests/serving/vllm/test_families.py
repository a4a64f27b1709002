"""All model classes that are served, each a small random model, its folder as it was saved: generate's tokens."""

import os
import subprocess
import sys

import pytest
import torch
from small_models import LATENTS, prompts_of, random_llama
from small_models import SIZES as WIDTHS
from transformers import AutoConfig
from transformers.models.auto import AutoModelForCausalLM
from vllm import ModelRegistry

import condense
from condense.serving.vllm import models
from condense.serving.vllm.register import ARCHITECTURES

METHOD = condense.CCA(group_size=4, window=24, summary="streaming", key_pooling="select", rep_bias="log_size")
LENGTHS, NEW = (130, 20), 12
SIZES = WIDTHS | {"num_hidden_layers": 2}
# type -> settings
CONFIGS = {
    "gemma": SIZES,
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 512, "vocab_size": 199, "initializer_range": 0.2},
    "mistral": SIZES | {"sliding_window": None},
    "opt": {
        "vocab_size": 199, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 512, "word_embed_proj_dim": 64, "init_std": 0.2, "do_layer_norm_before": True,
    },
    "phi3": SIZES | {"num_attention_heads": 2, "pad_token_id": 0, "sliding_window": None},
    # vLLM takes the width of a head from the hidden size
    "qwen2": SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": SIZES,
    "qwen3_moe": SIZES | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
}  # fmt: skip
# all that vLLM does before it looks at a device
START = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_model_config()
"""


@pytest.fixture(scope="module", autouse=True)
def _known_classes():
    """vLLM asks a process of its own about each class that it knows by name only, which takes long."""
    for architecture in ARCHITECTURES:
        name = f"Condensed{architecture}"
        ModelRegistry.register_model(name, getattr(models, name))


@pytest.mark.parametrize("family", CONFIGS | LATENTS)
def test_tokens_of_generate(engine, greedy, tmp_path, family):
    torch.manual_seed(0)
    config = LATENTS[family] if family in LATENTS else AutoConfig.for_model(family, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    condense.apply(model, METHOD)
    model.save_pretrained(tmp_path)
    want = greedy(model, prompts_of(LENGTHS), NEW)
    assert any(len(set(row)) > 2 for row in want)
    started = engine(tmp_path, skip_tokenizer_init=True, max_model_len=512, max_num_batched_tokens=48)
    assert started.tokens(prompts_of(LENGTHS), NEW) == want


@pytest.mark.parametrize("plugins", ["", "condense"], ids=["without", "with"])
def test_a_saved_folder_without_the_plugin_is_refused(tmp_path, plugins):
    condense.apply(random_llama(), METHOD).save_pretrained(tmp_path)
    command, env = [sys.executable, "-c", START, str(tmp_path)], {**os.environ, "VLLM_PLUGINS": plugins}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == bool(plugins), done.stderr
    if not plugins:
        assert "['CondensedLlamaForCausalLM'] are not supported" in done.stderr
