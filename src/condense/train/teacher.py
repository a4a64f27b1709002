"""The dense self that a model is distilled from: its weights before training, with stock attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Teacher:
    """Gives the dense self's logits.

    With adapters (LoRA) it is the model itself with its adapters off and takes no memory. Otherwise it is a frozen copy
    of all weights, in the dtype they are loaded in, on every GPU; or spread over them (``sharded``), as FSDP2 spreads
    the model. Either way a step has one more forward pass.

    model: as training begins, with stock attention. device: where the copy goes. sharded: spread it over the processes.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, sharded: bool = False) -> None:
        self._model: Any = None
        if hasattr(model, "disable_adapter"):
            return
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        if sharded:
            layers = [part for part in self._model.modules() if isinstance(part, nn.ModuleList)]
            for layer in max(layers, key=len):
                fully_shard(layer)
            fully_shard(self._model)
        else:
            self._model.to(device)

    @torch.no_grad()
    def logits(self, student: Any, **inputs: Tensor) -> Tensor:
        """``[B, L, V]``, by stock attention; ``student``: the model in training; inputs: the model's, ``[B, L]``."""
        if self._model is not None:
            return self._model(**inputs, use_cache=False).logits
        training = student.training
        student.eval()
        with student.disable_adapter():
            logits: Tensor = student(**inputs, use_cache=False).logits
        student.train(training)
        return logits
