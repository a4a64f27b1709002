"""The attention classes of transformers that can be condensed, and properties of the model families."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

# stock attention class -> transformers.models.<family>; every family here runs the whole model test suite
FAMILIES = {
    "DeepseekV2Attention": "deepseek_v2",
    "DeepseekV3Attention": "deepseek_v3",
    "GPT2Attention": "gpt2",
    "GemmaAttention": "gemma",
    "Glm4MoeLiteAttention": "glm4_moe_lite",
    "LlamaAttention": "llama",
    "MiniCPM3Attention": "minicpm3",
    "MistralAttention": "mistral",
    "OPTAttention": "opt",
    "Phi3Attention": "phi3",
    "Qwen2Attention": "qwen2",
    "Qwen3Attention": "qwen3",
    "YoutuAttention": "youtu",
}
_LEARNED_POSITIONS = ("gpt2", "opt")


def stock_class(name: str) -> type[nn.Module]:
    """The stock attention class of that name, imported from transformers."""
    family = FAMILIES[name]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def is_supported(module: nn.Module) -> bool:
    """True for an instance of exactly one of the stock classes."""
    cls = type(module)
    family = FAMILIES.get(cls.__name__)
    return family is not None and cls.__module__ == f"transformers.models.{family}.modeling_{family}"


def is_latent(module: nn.Module) -> bool:
    """True for multi-head latent attention (MLA) among the supported classes, condensed or stock."""
    return hasattr(module, "kv_lora_rank")


# families whose attention looks like a supported one but does something more, which condensing would ignore
_NOT_HANDLED = {
    "bailing_hybrid": "most of its layers are linear attention",
    "kimi_linear": "its latent attention has no rotated keys and most of its layers are linear attention",
    "longcat_flash": "it scales latents and queries before they reach the cache",
    "mistral4": "it scales queries by their position",
}


def obstacle(model: nn.Module) -> str | None:
    """Why a model whose attention looks like a supported one cannot be condensed, None if no reason is known."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            return "its queries choose their keys by an indexer (sparse attention, DSA)"
        family = type(module).__module__.split(".")[-2:-1]
        if family and family[0] in _NOT_HANDLED:
            return _NOT_HANDLED[family[0]]
    return None


def sliding_window(module: nn.Module) -> int | None:
    """Sliding window of a layer, None for full attention.

    Read from the configuration, as transformers' caches do, because Mistral's modules do not have the value.
    """
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def max_learned_positions(config: Any) -> int | None:
    """Number of positions of a model with learned position embeddings, None for other embeddings."""
    return config.max_position_embeddings if config.model_type in _LEARNED_POSITIONS else None


def rope_that_changes(config: Any) -> str | None:
    """The kind of rotary embedding if its frequencies depend on the length of the text, else None."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(part for part in settings.values() if isinstance(part, dict))]  # one, or one per kind of layer
    return next((kind for part in kinds if (kind := part.get("rope_type")) in ("dynamic", "longrope")), None)
