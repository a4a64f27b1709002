"""The attention modules of a model by layer, those that are condensed among them, and why a model has none."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from condense.methods import Method, layers_as_text
from condense.models.attention import CondensedAttention
from condense.models.families import FAMILIES, is_supported, obstacle, transformers_model
from condense.models.stock import method_of

ModelT = TypeVar("ModelT", bound=nn.Module)


def condensed_layers(model: nn.Module) -> dict[int, Method]:
    """Layer index to method for the layers that `apply` condensed, also while another implementation is set."""
    methods = {i: m.condense_method for i, m in condensed_modules(model).items()}
    return {i: method for i, method in methods.items() if method is not None}


def check_stock(model: nn.Module) -> None:
    """Raise ValueError if a layer of the model is condensed."""
    if condensed_layers(model):
        raise ValueError("model must have stock attention: call condense.restore(model) first")


def all_methods(model: nn.Module) -> dict[int, Method]:
    """Layer index to the method of its cache: as in `condensed_layers`; for stock layers one that computes the same."""
    return {i: method_of(m) for i, m in condensed_modules(model).items()}


def condensed_modules(model: nn.Module) -> dict[int, CondensedAttention]:
    """The attention modules of a condensed model by layer, those of stock layers included; empty for a stock model."""
    return by_layer(m for m in model.modules() if isinstance(m, CondensedAttention))


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules that condense knows, by layer index. Raises ValueError if the model has none."""
    return attentions_of(model)[1]


def attentions_of(model: nn.Module) -> tuple[PreTrainedModel, dict[int, nn.Module]]:
    """The transformers model inside ``model`` and its attention modules by layer."""
    base = transformers_model(model)
    if base is None:
        raise ValueError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    name, wrong = type(base).__name__, []
    found = [m for m in base.modules() if is_supported(m) or isinstance(m, CondensedAttention)]
    if getattr(base.config, "is_encoder_decoder", False) or getattr(base.config, "add_cross_attention", False):
        wrong.append(f"{name} has cross-attention: only decoder-only models can be condensed")
    if (reason := obstacle(base)) is not None:
        wrong.append(f"{name} cannot be condensed: {reason}")
    if any(getattr(module, "is_causal", True) is False for module in found):
        wrong.append(f"{name} has bidirectional attention: only causal models can be condensed")
    # accelerate's hooks replace ``forward`` too, but call the condensed one, which they keep as ``_old_forward``
    patched = [m.layer_idx for m in found if "forward" in vars(m) and "_old_forward" not in vars(m)]
    if patched:
        wrong.append(
            f"attention in layers {layers_as_text(patched)} has a forward of its own, put there from outside, which "
            "would not be condensed: remove it first (del module.forward)"
        )
    if wrong:
        raise ValueError("; ".join(wrong))
    if not found:
        raise ValueError(f"{name} has no attention that condense knows{_closest(base)}")
    if unknown := {type(m).__name__ for m in base.modules() if m not in found and _resembles_known(m)}:
        raise ValueError(
            f"{name} has layers of {', '.join(sorted(unknown))} beside those that condense knows: "
            "condense.register(cls, model) takes a class that proves right"
        )
    return base, by_layer(found)


def _resembles_known(module: nn.Module) -> bool:
    """True for an attention of a class of its own that derives from a known one."""
    return hasattr(module, "layer_idx") and any(parent.__name__ in FAMILIES for parent in type(module).__mro__[1:])


def _closest(base: PreTrainedModel) -> str:
    """The end of an error about unknown classes: names them, and known classes that are their bases or named alike."""
    classes = {type(m).__name__: type(m) for m in base.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")}
    if not classes:
        return ""
    if any(parent.__name__ == "FSDPModule" for cls in classes.values() for parent in cls.__mro__):
        return f", but {', '.join(sorted(classes))}: call condense.apply before fully_shard"
    known = [parent.__name__ for cls in classes.values() for parent in cls.__mro__[1:] if parent.__name__ in FAMILIES]
    known += [name for cls in classes for name in difflib.get_close_matches(cls, FAMILIES, 2, 0.8)]
    like = f"; it knows {', '.join(dict.fromkeys(known))}" if known else ""
    return f", but {', '.join(sorted(classes))}{like}. condense.register(cls, model) takes a class that proves right"


def by_layer(modules: Iterable[ModelT]) -> dict[int, ModelT]:
    """Attention modules by their layer's index. Raises ValueError if two have the same, as in two stacks of layers."""
    found: dict[int, ModelT] = {}
    for module in modules:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if found.setdefault(index, module) is not module:
            raise ValueError(
                f"model must have one stack of decoder layers, got two attentions of layer {index}: pass the part that "
                "is to be condensed; if PEFT made copies of them, name projections in modules_to_save, or use LoRA"
            )
    return found
