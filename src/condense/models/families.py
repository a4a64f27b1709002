"""The attention classes of transformers that can be condensed, and properties of the model families."""

import importlib
import json
from importlib import resources
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def asset(name: str) -> Any:
    """The content of a JSON file of the package."""
    return json.loads(resources.files("condense").joinpath("assets", name).read_text(encoding="utf-8"))


# stock attention class -> transformers.models.<family>; tests/models/test_families.py runs every one of them
FAMILIES: dict[str, str] = asset("families.json")
# folder in transformers.models of a family that is refused -> why, as a clause after "<class> cannot be condensed: "
REFUSED = {family: reason for reason, families in asset("refused_families.json").items() for family in families}
# reasons that also hold for models outside of transformers
_HAS_ENCODER, _INDEXER, _SHARED_KEYS = (REFUSED[family] for family in ("whisper", "deepseek_v32", "gemma3n"))
_BLOCKS = "its mask lets the tokens of a picture see each other"
# classes that `condense.register` accepted
REGISTERED: set[type[nn.Module]] = set()
# model types with a table of positions, which a text must not outgrow; CTRL's is computed from sines
_LEARNED_POSITIONS = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "opt")
# model types that, given no positions, number the real tokens of a row; others number slots
COUNT_TOKENS = ("opt",)
# model types that take no cache but the one that they make themselves
OWN_CACHE = ("minimax",)
# experts that run all at once, on every token; their only implementation has the name "eager" too
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


def obstacle(model: nn.Module) -> str | None:
    """All reasons why a model cannot be condensed, as clauses; None if no reason is known."""
    # its class's folder in transformers.models, "" for a class from elsewhere
    package, _, path = type(model).__module__.partition("transformers.models.")
    family, config = "" if package else path.partition(".")[0], getattr(model, "config", None)
    found = [REFUSED.get(family)]
    if family not in ("", *REFUSED, *FAMILIES.values()):
        has_encoder = getattr(config, "is_encoder_decoder", False) or hasattr(config, "is_decoder")
        found.append(_HAS_ENCODER if has_encoder else None)
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            found.append(_INDEXER)
        if getattr(module, "is_kv_shared_layer", False):
            found.append(_SHARED_KEYS)
    text: Any = getattr(config, "text_config", None)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        found.append(_BLOCKS)
    return "; ".join(dict.fromkeys(reason for reason in found if reason is not None)) or None


def is_chunked(module: Any) -> bool:
    """True for a layer whose queries see the tokens of their own chunk of the text (Llama 4)."""
    layer_types = getattr(module.config, "layer_types", None)
    return layer_types is not None and layer_types[module.layer_idx] == "chunked_attention"


def sliding_window(module: Any) -> int | None:
    """Sliding window of a layer, or the chunk that it attends within (Llama 4); None for full attention.

    Read from the configuration, as transformers' caches do, because Mistral's modules do not have the value.
    """
    config = module.config
    if is_chunked(module):
        return config.attention_chunk_size
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def max_learned_positions(config: Any) -> int | None:
    """Number of positions of a model with learned position embeddings, None for other embeddings."""
    return config.max_position_embeddings if config.model_type in _LEARNED_POSITIONS else None


def check_learned_positions(config: Any, what: str, length: int) -> None:
    """Raise ValueError if a model has learned positions, but fewer than ``length``; what: the length's name."""
    positions = max_learned_positions(config.get_text_config(decoder=True))
    if positions is not None and length > positions:
        raise ValueError(f"{what} must fit the model's {positions} learned positions, got {length}")


def has_eager_experts(model: PreTrainedModel) -> bool:
    """True if a mixture's experts run one by one, which waits for the device to learn which of them have tokens."""
    implementation = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    experts = (type(m).__name__ for name, m in model.named_modules() if name.rpartition(".")[2] == "experts")
    return implementation == "eager" and any(name not in _EXPERTS_AT_ONCE for name in experts)


def rope_that_changes(config: Any) -> str | None:
    """The kind of rotary embedding if its frequencies depend on the length of the text, else None."""
    kinds = (part.get("rope_type") for part in _rope_settings(config))
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def last_positions(config: Any) -> list[int]:
    """Lengths of text beyond which position embeddings end (learned ones) or rotate by other factors (longrope)."""
    longropes = (part for part in _rope_settings(config) if part.get("rope_type") == "longrope")
    ends = [max_learned_positions(config), *(part.get("original_max_position_embeddings") for part in longropes)]
    return [end for end in ends if end is not None]


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """Settings of the model's rotary embedding, then of each one that serves a single kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings, *(part for part in settings.values() if isinstance(part, dict))]
