"""Hugging Face's Trainer with the loss, the attention and the teacher of each step, and checkpoints that are whole."""

import contextlib
import copy
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import Trainer

from condense.files import whole_file
from condense.models import in_eval_mode, use
from condense.train.config import PhaseConfig
from condense.train.loss import TokenLoss, token_loss
from condense.train.optimizer import BETAS, MasterAdamW, parameter_groups

COMPLETE = "complete"  # marks a checkpoint that all processes have finished; holds the bytes of each file, by its name
_EARLY = 10  # steps, after which the time that the run will take is known


def frozen_copy(model: nn.Module, device: torch.device, *, sharded: bool) -> nn.Module:
    """A copy of the model with all its weights on this process's GPU, or sharded over all of them by FSDP2.

    model: as training begins, with stock attention; the copy keeps its dtype. device: where the copy goes.
    """
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    if not sharded:
        return copied.to(device)
    layers = [part for part in copied.modules() if isinstance(part, nn.ModuleList)]
    for layer in max(layers, key=len):
        fully_shard(layer)
    fully_shard(copied)
    return copied


class MixedTrainer(Trainer):
    """Trains one phase; ``phase.attention_at`` decides the attention of a step.

    Beside the loss it logs, separately for dense and condensed steps since the last entry, the cross entropy, the KL to
    the teacher and the share of answer tokens whose most likely prediction is right; tokens per second, and the most
    memory that was allocated. The loss is a mean over all tokens of a step, of all parts and processes.

    Entries are printed, as plain lines where there is no progress bar. There are further ones after ten steps, before
    each checkpoint, because a resumed run does not count the steps before it, and after the last step.
    """

    def __init__(self, phase: PhaseConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._phase = phase
        self._teacher: Any = None
        if phase.distill and not hasattr(self.model, "disable_adapter"):
            self._teacher = frozen_copy(self.model, self.args.device, sharded=self.is_fsdp_enabled)
        # so that Trainer counts the weights of all parts of a batch before the first is computed
        self.model_accepts_loss_kwargs = True
        self._sums: dict[str, torch.Tensor] = {}
        self._since: tuple[float, int] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with float32 copies of low-precision weights; FSDP and DeepSpeed keep float32 shards themselves."""
        optimizer: torch.optim.Optimizer | None = vars(self).get("optimizer")
        if optimizer is None:
            trained, phase = self.model if model is None else model, self._phase
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                groups = parameter_groups(trained, phase.weight_decay)
                optimizer = torch.optim.AdamW(groups, lr=phase.learning_rate, betas=BETAS)
            else:
                optimizer = MasterAdamW(trained, lr=phase.learning_rate, weight_decay=phase.weight_decay)
            self.optimizer = optimizer
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One forward and backward pass, with the attention that the phase has in this optimizer step."""
        if self._since is None:  # set only now, because a resumed run begins at a later step
            self._since = time.monotonic(), self.state.global_step
        step = self.state.global_step + 1
        if step in (_EARLY, self.state.max_steps) or step % self._phase.checkpoint_steps == 0:
            self.control.should_log = True
        inputs = self._prepare_inputs(inputs)
        stock: nn.Module = self.accelerator.unwrap_model(model)
        if self._phase.distill:
            with self.compute_loss_context_manager():
                inputs["teacher"] = self._dense_logits(stock, _of_model(inputs))
        method = self._phase.attention_at(self.state.global_step)
        # the stock step does this too, but too late: `use` warns of pooling unless the model is in training mode
        model.train()
        # the block holds the backward pass too, because gradient checkpointing runs the forward pass again there
        with contextlib.nullcontext() if method is None else use(stock, method):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """This part's share of the mean over all tokens of the step, weighted by ``loss_weights``."""
        taken = _of_model(inputs)
        if self._phase.packed and self._phase.attention_at(self.state.global_step) is not None:
            # condensed attention reads packed documents in one row; where a sequence begins, so does a document
            taken = {name: x.reshape(1, -1) for name, x in taken.items()}
        output = model(**taken, use_cache=False)
        # shifts the targets, not the logits: slicing the last position off the logits would copy all of them
        targets = inputs["input_ids"].roll(-1, dims=1).flatten()
        weights = inputs["loss_weights"].roll(-1, dims=1).flatten()
        teacher = inputs["teacher"].flatten(0, 1) if "teacher" in inputs else None
        sums = token_loss(output.logits.flatten(0, 1), targets, weights, teacher, self._phase.distill)
        self._count(sums)
        # the gradients of the processes are averaged, so each must hold its part times their number
        loss = sums.loss * (self.accelerator.num_processes / num_items_in_batch)
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log Trainer's own numbers, and means over the steps since the last entry (see the class).

        Raises ValueError if their loss is not finite.
        """
        for kind, (ce, kl, weights, answers, right) in self._totals().items():
            logs[f"{kind}_loss"] = round(ce / weights, 4)
            if self._phase.distill:
                logs[f"{kind}_kl"] = round(kl / weights, 4)
            if answers:
                logs[f"{kind}_answer_accuracy"] = round(right / answers, 4)
        now = time.monotonic()
        then, first = self._since or (now, self.state.global_step)
        if self.state.global_step > first:
            seconds = (now - then) / (self.state.global_step - first)
            logs["tokens_per_second"] = round(self._phase.batch_size * self._phase.sequence_length / seconds)
            logs["seconds_left"] = round(seconds * (self.state.max_steps - self.state.global_step))
        if torch.cuda.is_available():
            logs["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self._since = now, self.state.global_step
        super().log(logs, start_time)
        self._sums.clear()
        is_summary = "train_runtime" in logs  # Trainer's, at the end
        if self.is_world_process_zero() and self.args.disable_tqdm and not is_summary:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if "_" in name)
            print(f"{self._phase.name} step {self.state.global_step}/{self.state.max_steps}  {numbers}", flush=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, which counts as one only when every process has written its part."""
        self._totals()
        trained = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters() if p.requires_grad)
        finite = torch.stack([p.detach().isfinite().all() for p in trained]).all()
        if not self.accelerator.reduce((~finite).float(), "sum").item() == 0:
            raise ValueError(self._stopped("wanted finite weights, got others"))
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                files = [file for file in folder.rglob("*") if file.is_file()]
                sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
                with whole_file(folder / COMPLETE, overwrite=True) as complete:
                    complete.write(json.dumps(sizes).encode())
        except Exception as error:  # each writer has its own class of error for a full disk
            if self.accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(self.args.output_dir).free / 2**20
            reason = f"could not write {folder}, where {free:,.0f} MiB are free: {error}"
            raise ValueError(self._stopped(reason)) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights in the dtype that they were trained in; PEFT loads adapters as float32."""
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
        """Sum of the weights of all tokens of a step, over all its parts and processes."""
        weights = torch.stack([batch["loss_weights"].sum() for batch in batch_samples]).sum()
        return self.accelerator.reduce(weights.to(device), "sum")

    @torch.no_grad()
    def _dense_logits(self, student: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Logits ``[B, L, V]`` of the dense teacher: the frozen copy, or the model itself with adapters (LoRA) off."""
        if self._teacher is not None:
            return self._teacher(**inputs, use_cache=False).logits
        with in_eval_mode(student), student.disable_adapter():
            return student(**inputs, use_cache=False).logits

    def _count(self, sums: TokenLoss) -> None:
        # sums stay on the device, because reading one would wait for the device
        kind = "dense" if self._phase.attention_at(self.state.global_step) is None else "condensed"
        step = torch.stack(sums[1:]).double()
        self._sums[kind] = self._sums[kind] + step if kind in self._sums else step

    def _totals(self) -> dict[str, list[float]]:
        """The sums since the last entry, of all processes. Raises ValueError if one is not finite."""
        totals = {kind: self.accelerator.reduce(sums, "sum").tolist() for kind, sums in sorted(self._sums.items())}
        if not all(math.isfinite(value) for values in totals.values() for value in values):
            raise ValueError(self._stopped("wanted a finite loss, got nan or infinity"))
        return totals

    def _stopped(self, reason: str) -> str:
        stopped = f"training: stopped at step {self.state.global_step}: {reason}"
        if not any(Path(self.args.output_dir).glob(f"checkpoint-*/{COMPLETE}")):
            return f"{stopped}; no checkpoint was written yet, so the same command with --resume starts anew"
        return (
            f"{stopped}; the last good checkpoint lies in {self.args.output_dir}, and the same command with --resume "
            "goes on from it"
        )


def _of_model(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's inputs in a batch: tokens, and positions if documents are packed."""
    return {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}
