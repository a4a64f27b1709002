"""Models to time: well-known shapes with random weights, made on the device, or a saved model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from condense.config import check_int

# the sizes that decide time and memory, from the models' public configurations
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "minicpm3-4b": {
        "model_type": "minicpm3",
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "initializer_range": 0.02,  # with 0.1 no comparison of logits is meaningful
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# a large number costs nothing, because rotary tables are computed per call
_MAX_POSITIONS = 2**21


def check_shape(name: str) -> str:
    """The name. Raises ValueError for an unknown one."""
    if name not in MODEL_SHAPES:
        raise ValueError(f"shape must be one of {', '.join(MODEL_SHAPES)}, got {name!r}")
    return name


def random_model(
    name: str, *, num_layers: int | None = None, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A model of that shape with normal weights, drawn on the device; num_layers: only so many of its layers.

    Raises ValueError for an unknown shape or a number of layers below 1.
    """
    sizes: dict[str, Any] = dict(MODEL_SHAPES[check_shape(name)])
    if num_layers is not None:
        check_int("layers", num_layers, 1)
        sizes["num_hidden_layers"] = num_layers
    config = AutoConfig.for_model(sizes.pop("model_type"), max_position_embeddings=_MAX_POSITIONS, **sizes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return ready(model)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Set greedy generation without end tokens, for timing."""
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval().requires_grad_(False)
