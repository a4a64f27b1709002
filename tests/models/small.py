"""Every causal-LM type that the installed transformers registers, as a tiny random model in float64. It has one layer
of every kind, two at least. Configurations give their sizes alike names; `CHANGES` holds what a type needs besides.
"""

import inspect

import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_chunked_causal_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 64
_MOST_PARAMETERS = 10_000_000
# in names of classes that the stock models compute in float32, one token after another or many at once, which agrees
# the better the smaller their weights are
_RECURRENT = ("Conv", "Delta", "Lightning", "Mamba", "Mixer")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")
# widths and heads, experts, latents, linear attention, pictures and tokens, by size
_NAMES = {
    32: ("hidden_size", "d_model", "n_embd"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"),
    4: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "qk_rope_head_dim",
        "linear_num_value_heads", "mamba_num_heads",
    ),
    VOCAB: ("vocab_size", "vocab_size_per_layer_input"),
    8: (
        "hidden_size_per_layer_input", "head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim",
        "mamba_n_heads", "mamba_d_head", "ssm_state_size", "mamba_d_state", "patch_size",
    ),
    2: ("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"),
    256: ("max_position_embeddings", "n_positions"),
    6: ("sliding_window", "v_head_dim"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_head_dim", "image_size"),
    1: ("n_shared_experts", "n_group", "topk_group", "mamba_n_groups", "n_groups", "pad_token_id"),
    24: ("q_lora_rank",),
    12: ("kv_lora_rank",),
    0: ("bos_token_id",),
    None: ("eos_token_id",),
}  # fmt: skip
SIZES = {name: size for size, names in _NAMES.items() for name in names}
# settings whose default None means something: a type that leaves them out keeps it so
_OPTIONAL = ("q_lora_rank", "sliding_window", "num_experts", "n_inner")
_BOTH = ("sliding_attention", "full_attention")
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
# chunks of 6 tokens; the layer with full attention without rotation
_CHUNKED = {"attention_chunk_size": 6, "no_rope_layers": [1, 0]}
# full layers have other heads than sliding ones, which head_dim and num_key_value_heads are for
_OF_FULL_LAYERS = {
    "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
}  # fmt: skip
CHANGES = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _BOTH, "rope_parameters": dict.fromkeys(_BOTH, _ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gemma4": {"text_config": _OF_FULL_LAYERS},
    "gemma4_text": _OF_FULL_LAYERS,
    "gemma4_unified_text": _OF_FULL_LAYERS,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": _CHUNKED},
    "llama4_text": _CHUNKED,
    "longcat_flash": {"head_dim": 4, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "ministral": {"layer_types": _BOTH},
    "mistral": {"sliding_window": None},
}
# refused types whose default configuration makes no model, for want of a package or for an error of its own
UNBUILT = (
    "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody", "qwen4_exp",
    "qwen4_exp_text", "reformer",
)  # fmt: skip
_CHUNKED_MASK = inspect.signature(create_chunked_causal_mask)
# generate of transformers 5.17 over a static cache hands its own function of chunked masks an argument that it does not
# take
NO_STATIC_MASKS = () if "block_sequence_ids" in _CHUNKED_MASK.parameters else ("llama4", "llama4_text")


def config(name, **changes):
    return _small(CONFIG_MAPPING[name], CHANGES.get(name, {}) | changes)


def model(name, **changes):
    """A tiny model of a type, in float64 where its own code lets it be, its projections large."""
    settings = config(name, **changes)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(settings).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"{name} has {parameters} parameters: name what makes it small in CHANGES")
    stock = AutoModelForCausalLM.from_config(settings, experts_implementation="eager")  # the default needs float32
    generator = torch.Generator().manual_seed(0)
    recurrent = [m for m in stock.modules() if any(part in type(m).__name__ for part in _RECURRENT)]
    small = {id(parameter) for module in recurrent for parameter in module.parameters()}
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.ndim > 1 and id(parameter) not in small:
                parameter.normal_(0, min(parameter.shape) ** -0.5, generator=generator)
        for name, parameter in stock.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_(0, 2, generator=generator)
    return stock.double().eval()


def outline(name):
    """A model of a type in its default size, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name]())


def _small(cls, changes):
    stock = cls()
    settings = {key: value for key, value in SIZES.items() if _has(stock, key) and _is_settable(cls, key)}
    if _has(stock, "kv_lora_rank"):
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    for key in getattr(cls, "sub_configs", {}):
        if (part := getattr(stock, key, None)) is not None:
            settings[key] = _small(type(part), changes.get(key, {}))
    changes = {key: value for key, value in changes.items() if key not in getattr(cls, "sub_configs", {})}
    kinds = {}
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if key not in cls.attribute_map and _is_settable(cls, key):
            kinds[key] = list(changes.get(key, ())) or list(dict.fromkeys(getattr(stock, key, None) or ()))
    kinds = {key: of for key, of in kinds.items() if of}
    num_layers = max(2, *map(len, kinds.values()), 0)
    settings |= {key: [*of, *of[-1:] * (num_layers - len(of))] for key, of in kinds.items()}
    settings |= {key: num_layers for key in _LAYERS if _has(stock, key) and _is_settable(cls, key)}
    return cls(**(settings | {key: value for key, value in changes.items() if key not in kinds}))


def _has(stock, key):
    """True if a type has a setting, and uses it if it may be left out."""
    try:
        return hasattr(stock, key) and not (key in _OPTIONAL and getattr(stock, key) is None)
    except RuntimeError:
        return True  # a setting of its own for every layer


def _is_settable(cls, key):
    declared = getattr(cls, cls.attribute_map.get(key, key), None)
    return not isinstance(declared, property) or declared.fset is not None
