"""Weights: marking those that are trained, and AdamW that keeps float32 copies of low-precision ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from condense.models import attention_layers
from condense.train.config import TrainConfig, Trained

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # the projection behind attention, in the supported families
_LORA_SCALE = 2
BETAS = (0.9, 0.95)


def set_trained(model: PreTrainedModel, config: TrainConfig) -> nn.Module:
    """Freeze what ``config.train`` leaves out, in place.

    Returns the model, wrapped by PEFT if adapters are trained; the adapters then have the dtype of the weights.
    Raises ValueError if PEFT is missing, or the attention layers hold no projections.
    """
    if config.train == "all":
        return model
    if config.train != "lora":
        names = projections(model, config.train)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[0] in names)
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"train: wanted PEFT for 'lora', got none: pip install peft ({error})") from error
    targets = config.lora_targets if config.lora_targets == "all-linear" else projections(model, config.lora_targets)
    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=_LORA_SCALE * config.lora_rank, target_modules=targets, task_type="CAUSAL_LM"
    )
    # adapters stay in the weights' dtype, as the optimizer keeps float32 copies: PEFT casts inputs of float32 adapters
    return get_peft_model(model, settings, autocast_adapter_dtype=False)


def projections(model: PreTrainedModel, which: Trained | str) -> list[str]:
    """Names of the attention layers' projections: ``"qkv"`` all but that of the output, ``"qkvo"`` all.

    Raises ValueError if there are none.
    """
    parts = {part: name for module in attention_layers(model).values() for name, part in module.named_modules()}
    inner = {part for part in parts if getattr(getattr(part, "weight", None), "ndim", 0) == 2}
    chosen = {part for part in inner if which == "qkvo" or parts[part] not in _OUTPUTS}
    names = [name for name, part in model.named_modules() if part in chosen]
    if not names:
        raise ValueError(f"train: wanted a model whose attention has projections for {which!r}, got none in it")
    return names


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as AdamW takes them: matrices with weight decay; vectors (norms, biases) without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose parameters are float32 copies of the model's; every step rounds them back into the model.

    In bfloat16 a weight of 1 cannot change by less than 0.4 %, so small steps would be lost; the copies keep them,
    while the forward and backward pass run entirely in the model's own dtype. For a float32 model this is plain AdamW.

    model: its parameters that require gradients are trained, on the device where they are now. lr: learning rate.
    weight_decay: on parameters of two or more dimensions.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.1) -> None:
        stored = parameter_groups(model, weight_decay)
        self._model_parameters = [parameter for group in stored for parameter in group["params"]]
        # float32 parameters are trained themselves: a copy would only cost memory
        own = {p: p.detach().float().requires_grad_() for p in self._model_parameters if p.dtype != torch.float32}
        self._rounded = list(own.items())
        groups = [{**group, "params": [own.get(p, p) for p in group["params"]]} for group in stored]
        fused = all(parameter.is_cuda for parameter in self._model_parameters)
        super().__init__(groups, lr=lr, betas=BETAS, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One AdamW step from the gradients of the model's parameters."""
        for parameter, master in self._rounded:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        loss = super().step(closure)
        if self._rounded:
            parameters, masters = (list(side) for side in zip(*self._rounded, strict=True))
            torch._foreach_copy_(parameters, masters)
            for master in masters:
                master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self._model_parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state and the float32 copies."""
        state = super().state_dict()
        state["masters"] = [master.detach() for _, master in self._rounded]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        state = dict(state_dict)
        saved = state.pop("masters")
        for (_, master), value in zip(self._rounded, saved, strict=True):
            master.copy_(value)
        super().load_state_dict(state)
