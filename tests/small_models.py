"""Small random models with weights so large that no two tokens are nearly as likely, and prompts for them."""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import condense

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 199, "max_position_embeddings": 1024, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def random_llama(layers=2):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)).eval()


def tiny_llama(**sizes):
    """Two layers of two heads, 16 wide, with random weights, for the tokens of the bundled tokenizer."""
    torch.manual_seed(0)
    fixed = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 4096, **fixed, **sizes})).eval()


def saved_with_tokenizer(model, folder):
    """The folder, in which the model lies with the bundled tokenizer."""
    model.save_pretrained(folder)
    condense.demo_model()[1].save_pretrained(folder)
    return folder


def prompts_of(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(199) for _ in range(length)] for length in lengths]


def condensed(model, **settings):
    """Settings of the engine for a condensed model."""
    overrides = {"architectures": [f"Condensed{model.config.architectures[0]}"], "condense": model.config.condense}
    return {"hf_overrides": overrides, "skip_tokenizer_init": True, "max_model_len": 512, **settings}
