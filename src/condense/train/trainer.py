"""Hugging Face's Trainer with a weighted loss, and steps that alternate dense and condensed attention."""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer

from condense.models import use
from condense.train.config import PhaseConfig


class MixedTrainer(Trainer):
    """Trains one phase; ``phase.mix`` decides which steps are condensed.

    Beside the loss it logs, separately for dense and condensed steps since the last entry, the loss and the share of
    answer tokens whose most likely prediction is right.

    arguments: Trainer's own keyword arguments.
    """

    def __init__(self, phase: PhaseConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._phase = phase
        # The loss is a mean over one part of a batch; Trainer then divides by the number of parts.
        self.model_accepts_loss_kwargs = False
        self._sums: dict[str, torch.Tensor] = {}

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One forward and backward pass; condensed or dense as the phase says for this optimizer step."""
        method = self._phase.method if self._condensed() else None
        # the block holds the backward pass too, because gradient checkpointing runs the forward pass again there
        attention = contextlib.nullcontext() if method is None else use(self._stock(model), method)
        with attention:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The mean of the tokens' cross entropies, weighted by ``loss_weights``."""
        output = model(input_ids=inputs["input_ids"], use_cache=False)
        # shifts the targets, not the logits: slicing the last position off the logits would copy all of them
        targets = inputs["input_ids"].roll(-1, dims=1)
        weights = inputs["loss_weights"].roll(-1, dims=1)
        loss = weighted_cross_entropy(output.logits, targets, weights)
        self._count(output.logits.detach(), targets, weights, loss.detach())
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with Trainer's own numbers, loss and accuracy of dense and condensed steps since the last entry."""
        sums = {name: value.tolist() for name, value in self._sums.items()}
        self._sums.clear()
        for kind, (steps, loss, answers, right) in sums.items():
            logs[f"{kind}_loss"] = round(loss / steps, 4)
            if answers:
                logs[f"{kind}_answer_accuracy"] = round(right / answers, 4)
        super().log(logs, start_time)

    def _condensed(self) -> bool:
        mix = self._phase.mix
        return mix == "condensed" or (mix == "alternate" and self.state.global_step % 2 == 1)

    def _stock(self, model: nn.Module) -> nn.Module:
        """The model without the wrappers that accelerate may have put around it."""
        stock: nn.Module = self.accelerator.unwrap_model(model)
        return stock

    def _count(self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, loss: torch.Tensor) -> None:
        # Sums stay on the device, because reading one would wait for it.
        answers = weights > 1
        right = (logits.argmax(-1) == targets) & answers
        step = torch.stack([torch.ones_like(loss, dtype=torch.float32), loss.float(), answers.sum(), right.sum()])
        kind = "condensed" if self._condensed() else "dense"
        self._sums[kind] = self._sums[kind] + step if kind in self._sums else step


def weighted_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean of the cross entropies: ``sum(w * ce) / sum(w)``, computed in float32.

    logits: ``[B, L, vocabulary]``, any floating dtype. targets: ``[B, L]`` int64. weights: ``[B, L]`` float32, not
    negative, not all zero.
    Returns a float32 scalar.
    """
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (losses * weights).sum() / weights.sum()
