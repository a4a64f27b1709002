"""One phase of training: Hugging Face's Trainer set up for it, and the checkpoints it resumes from."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from condense.train.config import PhaseConfig
from condense.train.data import TrainingSequences
from condense.train.optimizer import MasterAdamW
from condense.train.trainer import MixedTrainer


def train_phase(
    model: PreTrainedModel,
    dataset: TrainingSequences,
    phase: PhaseConfig,
    folder: Path,
    *,
    seed: int,
    workers: int = 0,
    checkpoint: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> list[dict[str, Any]]:
    """Train ``model`` in place.

    model: a causal LM with stock attention; moved to the GPU if there is one. dataset: the phase's sequences, in order.
    folder: where checkpoints go. seed: of Trainer. workers: processes that build sequences.
    checkpoint: a checkpoint of the same phase to go on from. callbacks: Trainer's, called between steps, when the model
    has stock attention.
    Returns Trainer's log history: one entry per ``phase.logging_steps`` steps.
    Raises ValueError if several GPUs are visible to one process.
    """
    interactive = sys.stderr.isatty()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        per_device_train_batch_size=phase.batch_size // phase.gradient_accumulation_steps,
        gradient_accumulation_steps=phase.gradient_accumulation_steps,
        learning_rate=phase.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=phase.warmup_steps,
        max_grad_norm=1.0,
        seed=seed,
        # The dataset is random already; in its own order, a resumed run sees the same sequences.
        train_sampling_strategy="sequential",
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_prefetch_factor=4 if workers else None,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        logging_steps=phase.logging_steps,
        logging_nan_inf_filter=False,  # it would wait for the GPU in every step
        save_strategy="steps",
        save_steps=phase.checkpoint_steps,
        save_total_limit=2,  # the newest may be half-written when the process dies
        report_to="none",
        disable_tqdm=not interactive,
    )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"model: wanted one visible GPU, got {arguments.n_gpu}; set CUDA_VISIBLE_DEVICES to one of them"
        )
    model.to(arguments.device)
    if phase.gradient_checkpointing:
        # this method's name differs between the supported versions of transformers, as does Trainer's own argument
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    optimizer = MasterAdamW(model, lr=phase.learning_rate, weight_decay=phase.weight_decay)
    use_cache = model.config.use_cache
    trainer = MixedTrainer(phase, model=model, args=arguments, train_dataset=dataset, optimizers=(optimizer, None))
    for callback in callbacks:
        trainer.add_callback(callback)
    if not interactive:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Lines(phase))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.config.use_cache = use_cache  # Trainer has turned it off, but the saved model should generate with a cache
    return list(trainer.state.log_history)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a phase's folder; half-written ones are removed."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        try:
            # Trainer writes this file last.
            state = json.loads((path / "trainer_state.json").read_text())
            complete.append((int(state["global_step"]), path))
        except (OSError, ValueError, KeyError):
            shutil.rmtree(path)
    return max(complete)[1] if complete else None


class _Lines(TrainerCallback):
    """Prints one line per log entry, for output that is not a terminal."""

    def __init__(self, phase: PhaseConfig) -> None:
        self._phase = phase
        self._time = time.monotonic()
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._time = time.monotonic()
        self._step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        steps = state.global_step - self._step
        if steps == 0:  # Trainer's summary at the end
            return
        now = time.monotonic()
        tokens = steps * self._phase.batch_size * self._phase.sequence_length
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items() if "_" in name)
        print(
            f"{self._phase.name} step {state.global_step}/{state.max_steps}  "
            f"{tokens / (now - self._time) / 1e3:.0f}K tokens/s  {numbers}",
            flush=True,
        )
        self._time, self._step = now, state.global_step
