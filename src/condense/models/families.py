"""The attention classes of transformers that can be condensed, and properties of the model families."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# stock attention class -> transformers.models.<family>; tests/models/test_families.py runs every one of them
FAMILIES = {
    "AfmoeAttention": "afmoe",
    "ApertusAttention": "apertus",
    "ArceeAttention": "arcee",
    "AriaTextAttention": "aria",
    "AXK1Attention": "axk1",
    "BailingHybridAttention": "bailing_hybrid",
    "BambaAttention": "bamba",
    "BeamAttention": "beam",
    "BioGptAttention": "biogpt",
    "BitNetAttention": "bitnet",
    "CohereAttention": "cohere",
    "Cohere2Attention": "cohere2",
    "Cohere2MoeAttention": "cohere2_moe",
    "CohereCompassAttention": "cohere_compass",
    "MultiHeadAttention": "ctrl",
    "CwmAttention": "cwm",
    "DbrxAttention": "dbrx",
    "DeepseekV2Attention": "deepseek_v2",
    "DeepseekV3Attention": "deepseek_v3",
    "Dots1Attention": "dots1",
    "Emu3Attention": "emu3",
    "Ernie4_5Attention": "ernie4_5",
    "Ernie4_5_MoeAttention": "ernie4_5_moe",
    "Exaone4Attention": "exaone4",
    "ExaoneMoeAttention": "exaone_moe",
    "FlexOlmoAttention": "flex_olmo",
    "FlintAttention": "flint",
    "GemmaAttention": "gemma",
    "Gemma2Attention": "gemma2",
    "Gemma3Attention": "gemma3",
    "Gemma4TextAttention": "gemma4",
    "Gemma4UnifiedTextAttention": "gemma4_unified",
    "GlmAttention": "glm",
    "Glm4Attention": "glm4",
    "Glm4MoeAttention": "glm4_moe",
    "Glm4MoeLiteAttention": "glm4_moe_lite",
    "GPT2Attention": "gpt2",
    "GptOssAttention": "gpt_oss",
    "GPTBigCodeAttention": "gpt_bigcode",
    "GPTNeoXAttention": "gpt_neox",
    "GraniteAttention": "granite",
    "GraniteMoeAttention": "granitemoe",
    "GraniteSWAAttention": "granite_swa",
    "GraniteMoeSWAAttention": "granitemoe_swa",
    "GraniteMoeHybridAttention": "granitemoehybrid",
    "GraniteMoeSharedAttention": "granitemoeshared",
    "HeliumAttention": "helium",
    "HunYuanDenseV1Attention": "hunyuan_v1_dense",
    "HunYuanMoEV1Attention": "hunyuan_v1_moe",
    "HYV3Attention": "hy_v3",
    "HyperCLOVAXAttention": "hyperclovax",
    "Jais2Attention": "jais2",
    "JambaAttention": "jamba",
    "KimiLinearAttention": "kimi_linear",
    "Kolibri1Attention": "kolibri1",
    "LagunaAttention": "laguna",
    "Lfm2Attention": "lfm2",
    "Lfm2MoeAttention": "lfm2_moe",
    "Lfm3Attention": "lfm3",
    "LlamaAttention": "llama",
    "Llama4TextAttention": "llama4",
    "LongcatFlashMLA": "longcat_flash",
    "MellumAttention": "mellum",
    "MiMoV2FlashAttention": "mimo_v2_flash",
    "MiniCPM3Attention": "minicpm3",
    "MiniMaxAttention": "minimax",
    "MiniMaxM2Attention": "minimax_m2",
    "MinistralAttention": "ministral",
    "Ministral3Attention": "ministral3",
    "MistralAttention": "mistral",
    "Mistral4Attention": "mistral4",
    "MixtralAttention": "mixtral",
    "ModernBertDecoderAttention": "modernbert_decoder",
    "NanoChatAttention": "nanochat",
    "NemotronAttention": "nemotron",
    "NemotronHAttention": "nemotron_h",
    "OlmoAttention": "olmo",
    "Olmo2Attention": "olmo2",
    "Olmo3Attention": "olmo3",
    "OlmoHybridAttention": "olmo_hybrid",
    "OlmoeAttention": "olmoe",
    "OPTAttention": "opt",
    "PersimmonAttention": "persimmon",
    "PhiAttention": "phi",
    "Phi3Attention": "phi3",
    "Phi4MultimodalAttention": "phi4_multimodal",
    "PhimoeAttention": "phimoe",
    "Qwen2Attention": "qwen2",
    "Qwen2MoeAttention": "qwen2_moe",
    "Qwen3Attention": "qwen3",
    "Qwen3_5Attention": "qwen3_5",
    "Qwen3_5MoeAttention": "qwen3_5_moe",
    "Qwen3MoeAttention": "qwen3_moe",
    "Qwen3NextAttention": "qwen3_next",
    "SeedOssAttention": "seed_oss",
    "SmolLM3Attention": "smollm3",
    "SolarOpenAttention": "solar_open",
    "StableLmAttention": "stablelm",
    "Starcoder2Attention": "starcoder2",
    "VaultGemmaAttention": "vaultgemma",
    "YoutuAttention": "youtu",
}
# classes that `condense.register` accepted
REGISTERED: set[type[nn.Module]] = set()
_LEARNED_POSITIONS = ("biogpt", "gpt2", "gpt_bigcode", "opt")
# experts that run all at once, on every token; transformers calls them "eager" too, their only implementation
_EXPERTS_AT_ONCE = ("Llama4TextExperts",)


def stock_class(name: str) -> type[nn.Module]:
    """The stock attention class of that name, imported from transformers."""
    family = FAMILIES[name]
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def transformers_model(model: object) -> PreTrainedModel | None:
    """The transformers model inside ``model`` (PEFT wrappers included), None if there is none."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((m for m in modules if isinstance(m, PreTrainedModel)), None)


def is_supported(module: nn.Module) -> bool:
    """True for an instance of exactly one of the stock classes, or of a registered one."""
    cls = type(module)
    if cls in REGISTERED:
        return True
    family = FAMILIES.get(cls.__name__)
    return family is not None and cls.__module__ == f"transformers.models.{family}.modeling_{family}"


def is_latent(module: nn.Module) -> bool:
    """True for multi-head latent attention (MLA) among the supported classes, condensed or stock."""
    return getattr(module, "kv_lora_rank", None) is not None


# reasons why families are refused, as clauses after "<class> cannot be condensed: "
_HAS_ENCODER = "it is an encoder, or the decoder of a model that has one"
_OWN_CODE = "its attention is written out in its own code and calls no attention function"
_NO_SOFTMAX = "its layers have no softmax attention"
_INDEXER = "its queries choose their keys by an indexer (sparse attention, DSA)"
_STATE = "its attention layers keep a recurrent state or a convolution's beside their keys"
_SHARED_KEYS = "later layers read the keys of earlier ones"
_READS_ANOTHER = "it has no keys of its own: it reads those of the model that it assists"
_PICTURES = "some of its layers attend to pictures (cross-attention)"
_BLOCKS = "its mask lets the tokens of a picture see each other"
_TWO_STACKS = "it has two stacks of layers, which read different tokens"
REFUSED = {
    "axk2": _INDEXER,
    "bart": _HAS_ENCODER,
    "bert": _HAS_ENCODER,
    "bert_generation": _HAS_ENCODER,
    "big_bird": _HAS_ENCODER,
    "bigbird_pegasus": _HAS_ENCODER,
    "blenderbot": _HAS_ENCODER,
    "blenderbot_small": _HAS_ENCODER,
    "bloom": _OWN_CODE,
    "blt": _TWO_STACKS,
    "camembert": _HAS_ENCODER,
    "codegen": _OWN_CODE,
    "cpmant": _OWN_CODE,
    "data2vec": _HAS_ENCODER,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "it compresses its keys itself",
    "diffllama": "each layer calls attention twice, with halves of its values",
    "doge": "its mask depends on its values",
    "dots3_note": _INDEXER,
    "electra": _HAS_ENCODER,
    "ernie": _HAS_ENCODER,
    "falcon": _OWN_CODE,
    "falcon_h1": _STATE,
    "falcon_mamba": _NO_SOFTMAX,
    "gemma3n": _SHARED_KEYS,
    "gemma4_assistant": _READS_ANOTHER,
    "gemma4_unified_assistant": _READS_ANOTHER,
    "git": _OWN_CODE,
    "glm_moe_dsa": _INDEXER,
    "gpt_neo": _OWN_CODE,
    "gpt_neox_japanese": _OWN_CODE,
    "gptj": _OWN_CODE,
    "hrm_text": "its layers run several times for each token",
    "hy_v4": _INDEXER,
    "inkling": _STATE,
    "inkling2": _STATE,
    "jetmoe": "it copies keys and values for several experts, and a condensed cache would hold the copies",
    "mamba": _NO_SOFTMAX,
    "mamba2": _NO_SOFTMAX,
    "marian": _HAS_ENCODER,
    "mbart": _HAS_ENCODER,
    "megatron_bert": _HAS_ENCODER,
    "minimax_m3_vl": _INDEXER,
    "mllama": _PICTURES,
    "moshi": _TWO_STACKS,
    "mpt": _OWN_CODE,
    "musicgen": _HAS_ENCODER,
    "musicgen_melody": _HAS_ENCODER,
    "mvp": _HAS_ENCODER,
    "openai": _OWN_CODE,
    "pegasus": _HAS_ENCODER,
    "plbart": _HAS_ENCODER,
    "prophetnet": _HAS_ENCODER,
    "qwen4_exp": _INDEXER,
    "recurrent_gemma": "its attention layers all have a sliding window",
    "reformer": _OWN_CODE,
    "rembert": _HAS_ENCODER,
    "roberta": _HAS_ENCODER,
    "roberta_prelayernorm": _HAS_ENCODER,
    "roc_bert": _HAS_ENCODER,
    "roformer": _HAS_ENCODER,
    "rwkv": _NO_SOFTMAX,
    "trocr": _HAS_ENCODER,
    "whisper": _HAS_ENCODER,
    "xglm": _OWN_CODE,
    "xlm": _OWN_CODE,
    "xlm_roberta": _HAS_ENCODER,
    "xlm_roberta_xl": _HAS_ENCODER,
    "xlnet": _OWN_CODE,
    "xlstm": _NO_SOFTMAX,
    "xmod": _HAS_ENCODER,
    "zamba": "one attention module serves several of its layers",
    "zamba2": "one attention module serves several of its layers",
    "zaya": _STATE,
}


def obstacle(model: nn.Module) -> str | None:
    """All reasons why a model cannot be condensed, as clauses; None if no reason is known."""
    found = [REFUSED.get(_family_of(model))]
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            found.append(_INDEXER)
        if getattr(module, "is_kv_shared_layer", False):
            found.append(_SHARED_KEYS)
    text: Any = getattr(getattr(model, "config", None), "text_config", None)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        found.append(_BLOCKS)
    return "; ".join(dict.fromkeys(reason for reason in found if reason is not None)) or None


def _family_of(module: nn.Module) -> str:
    """The folder of transformers.models that a module's class is from, "" for a class from elsewhere."""
    package, _, path = type(module).__module__.partition("transformers.models.")
    return "" if package else path.partition(".")[0]


def is_chunked(module: nn.Module) -> bool:
    """True for a layer whose queries see the tokens of their own chunk of the text (Llama 4)."""
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    return layer_types is not None and layer_types[module.layer_idx] == "chunked_attention"


def sliding_window(module: nn.Module) -> int | None:
    """Sliding window of a layer, or the chunk that it attends within (Llama 4); None for full attention.

    Read from the configuration, as transformers' caches do, because Mistral's modules do not have the value.
    """
    config: Any = module.config
    if is_chunked(module):
        return config.attention_chunk_size
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def max_learned_positions(config: Any) -> int | None:
    """Number of positions of a model with learned position embeddings, None for other embeddings."""
    return config.max_position_embeddings if config.model_type in _LEARNED_POSITIONS else None


def has_eager_experts(model: nn.Module) -> bool:
    """True if a mixture's experts run one by one, which waits for the device to learn which of them have tokens."""
    config: Any = model.config
    implementation = getattr(config.get_text_config(decoder=True), "_experts_implementation", None)
    experts = (type(m).__name__ for name, m in model.named_modules() if name.rpartition(".")[2] == "experts")
    return implementation == "eager" and any(name not in _EXPERTS_AT_ONCE for name in experts)


def rope_that_changes(config: Any) -> str | None:
    """The kind of rotary embedding if its frequencies depend on the length of the text, else None."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(part for part in settings.values() if isinstance(part, dict))]  # one, or one per kind of layer
    return next((kind for part in kinds if (kind := part.get("rope_type")) in ("dynamic", "longrope")), None)
