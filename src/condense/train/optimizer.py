"""AdamW that keeps float32 copies of low-precision weights."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)


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

    In bfloat16 a weight of 1 cannot change by less than 0.4 %, so small steps would be lost; the copies keep
    them, while the forward and backward pass run entirely in the model's own dtype. Matrices get weight
    decay, vectors (norms, biases) do not. For a float32 model this is plain AdamW on the same weights.

    model: its parameters that require gradients are trained, on the device where they are now. lr: learning rate.
    weight_decay: on parameters of two or more dimensions.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.1) -> None:
        stored = parameter_groups(model, weight_decay)
        self._model_parameters = [parameter for group in stored for parameter in group["params"]]
        # float32 parameters are trained themselves: a copy would only cost memory
        own = {p: p.detach().float().requires_grad_() for p in self._model_parameters if p.dtype != torch.float32}
        self._rounded = list(own.items())
        masters = iter([own.get(parameter, parameter) for parameter in self._model_parameters])
        groups = [{**group, "params": list(islice(masters, len(group["params"])))} for group in stored]
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
