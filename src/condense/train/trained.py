"""Marking the weights that are trained: all, the attention's projections, or adapters (LoRA) beside frozen ones."""

from torch import nn
from transformers import PreTrainedModel

from condense.models import attention_layers
from condense.train.config import TrainConfig, Trained

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # the projection behind attention, in the supported families
_LORA_SCALE = 2


def set_trained(model: PreTrainedModel, config: TrainConfig) -> nn.Module:
    """Freeze what ``config.train`` leaves out, in place.

    Returns the model, wrapped by PEFT if adapters are trained; the adapters then have the dtype of the weights.
    Raises ValueError if PEFT is missing, or the attention layers hold no projections.
    """
    if config.train == "all":
        return model
    if config.train != "lora":
        names = projections(model, config.train)
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(name in names)
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"train: wanted PEFT for 'lora', got none: pip install peft ({error})") from error
    targets = config.lora_targets if config.lora_targets == "all-linear" else projections(model, config.lora_targets)
    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=_LORA_SCALE * config.lora_rank, target_modules=targets, task_type="CAUSAL_LM"
    )
    # in the dtype of the weights, of which the optimizer keeps float32 copies: float32 adapters would copy every input
    adapted: nn.Module = get_peft_model(model, settings, autocast_adapter_dtype=False)
    return adapted


def projections(model: PreTrainedModel, which: Trained | str) -> list[str]:
    """Names of the attention layers' projections: ``"qkv"`` all but that of the output, ``"qkvo"`` all.

    Raises ValueError if there are none.
    """
    attentions = set(attention_layers(model).values())
    parts = ((name, part) for module in attentions for name, part in module.named_modules())
    inner = {id(part): name for name, part in parts if getattr(getattr(part, "weight", None), "ndim", 0) == 2}
    names = [
        name
        for name, part in model.named_modules()
        if id(part) in inner and (which == "qkvo" or inner[id(part)] not in _OUTPUTS)
    ]
    if not names:
        raise ValueError(f"train: wanted a model whose attention has projections for {which!r}, got none in it")
    return names
