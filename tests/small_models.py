"""Small random models with weights so large that no two tokens are nearly as likely, and prompts for them."""

import copy
import functools
import random

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig, LlamaForCausalLM, MiniCPM3Config
from transformers.models.auto import AutoModelForCausalLM

import condense

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 199, "max_position_embeddings": 1024, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_LATENTS = {
    **{key: size for key, size in SIZES.items() if key != "head_dim"}, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
_DEEPSEEK = _LATENTS | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
_EXPERTS = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENTS = {
    "deepseek_v2": DeepseekV2Config(**_DEEPSEEK, **_EXPERTS, q_lora_rank=None),
    # dense layers alone: vLLM on a CPU computes other experts than transformers, without condensing too
    "deepseek_v3": DeepseekV3Config(**_DEEPSEEK, first_k_dense_replace=2, q_lora_rank=24),
    "minicpm3": MiniCPM3Config(**_LATENTS, q_lora_rank=24),
}


def random_latents(name="minicpm3"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(LATENTS[name])).eval()


def random_llama(layers=2):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)).eval()


def tiny_llama(**sizes):
    """Two layers of two heads, 16 wide, with random weights, for the tokens of the bundled tokenizer."""
    torch.manual_seed(0)
    fixed = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 4096, **fixed, **sizes})).eval()


@functools.cache
def _demo_tokenizer():
    return condense.demo_model()[1]


def saved_with_tokenizer(model, folder):
    model.save_pretrained(folder)
    _demo_tokenizer().save_pretrained(folder)
    return folder


def prompts_of(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(length)] for length in lengths]


def condensed(model, **settings):
    overrides = {"architectures": [f"Condensed{model.config.architectures[0]}"], "condense": model.config.condense}
    return {"hf_overrides": overrides, "skip_tokenizer_init": True, "max_model_len": 512, **settings}
