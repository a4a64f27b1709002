"""One phase of training: its sizes, Hugging Face's Trainer set up for it, and checkpoints to resume from."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_torch_version, parse_flag_from_env
from torch import nn
from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from condense.methods import layers_as_text
from condense.models import chosen_methods
from condense.train.config import PhaseConfig
from condense.train.data import TrainingSequences
from condense.train.growth import left_dense
from condense.train.trainer import COMPLETE, MixedTrainer

# a variable of accelerate's, its default, the value that is needed and why
_SHARDING = (
    ("FSDP_VERSION", "1", "2", "the first version spreads weights in another way, which is not supported"),
    ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "SHARDED_STATE_DICT",
     "others gather weights and optimizer on one process for every checkpoint"),
    ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", "TRANSFORMER_BASED_WRAP",
     "others do not spread layer by layer, and a step may gather all weights on every GPU"),
)  # fmt: skip
_GIB = 2**30


def forecast(
    model: Any, phase: PhaseConfig, *, processes: int = 1, sharded: bool = False, sharded_teacher: bool = False
) -> dict[str, int]:
    """Bytes that a phase takes per process (GPU), by purpose, without activations.

    model: a causal LM whose trained weights have requires_grad. ``logits``: those of one part and their gradient, or
    the teacher's. sharded: processes share weights, gradients and optimizer (FSDP2, ZeRO-3), and trained weights are
    float32. sharded_teacher: processes share the teacher too (FSDP2).
    """
    width = next(model.parameters()).element_size()
    total, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    shares = processes if sharded else 1
    stored = 4 if sharded else width  # bytes of a trained weight
    copies = 0 if sharded or width == 4 else 4
    own_teacher = phase.distill > 0 and not hasattr(model, "disable_adapter")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return {
        "weights": ((total - trained) * width + trained * stored) // shares,
        "gradients": trained * stored // shares,
        "optimizer": trained * (8 + copies) // shares,
        "teacher": total * width // (processes if sharded_teacher else 1) if own_teacher else 0,
        "logits": 2 * phase.part_size(processes) * phase.sequence_length * vocabulary * width,
    }


def plan_of(model: Any, phase: PhaseConfig, processes: int, sizes: Mapping[str, int]) -> str:
    """Lines that say how much a phase trains, the bytes of its `forecast`, and which layers are dense in training."""
    total, own = (_count(model.num_parameters(only_trainable=only)) for only in (False, True))
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in sizes.items())
    lines = [
        f"trains {own} of {total} parameters, {phase.steps} steps, {_count(phase.tokens)} tokens, processes: "
        f"{processes}",
        f"{sum(sizes.values()) / _GIB:.2f} GiB each ({parts}), before activations",
    ]
    if phase.mix != "dense" and isinstance(phase.method, Mapping):
        dense = left_dense(chosen_methods(model, phase.method))
        lines += [f"dense attention is trained in layers {layers_as_text(dense)}"] if dense else []
    return "\n".join(f"{phase.name}: {line}" for line in lines)


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def train_phase(
    model: nn.Module,
    dataset: TrainingSequences,
    phase: PhaseConfig,
    folder: Path,
    *,
    seed: int,
    workers: int = 0,
    checkpoint: Path | None = None,
    report_to: str = "none",
) -> MixedTrainer:
    """Train ``model`` in place, in all processes that `accelerate launch` or `torchrun` has started.

    The plan is printed before the first step. Under FSDP2 (``ACCELERATE_USE_FSDP``) weights and optimizer are spread
    over the processes; otherwise each has all of them (DDP).

    model: a causal LM with stock attention, or PEFT around one; moved to the GPU if there is one. dataset: the phase's
    sequences, in order. folder: where checkpoints go. seed: of Trainer. workers: processes that build
    sequences. checkpoint: a checkpoint of the same phase to go on from. report_to: as in `TrainConfig`.
    Returns the trainer: ``state.log_history`` has the entries of `MixedTrainer`.
    Raises ValueError if several GPUs are visible to one process, a batch has no sequence for each process and part, or
    FSDP is asked for where it cannot be or would fail; and if training must stop (see `MixedTrainer`).
    """
    interactive, sharded = sys.stderr.isatty(), parse_flag_from_env("ACCELERATE_USE_FSDP")
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    low_precision = next(model.parameters()).dtype == torch.bfloat16
    if sharded:
        _check_sharding(adapters=hasattr(model, "disable_adapter"), low_precision=low_precision)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=phase.steps,
        gradient_accumulation_steps=phase.gradient_accumulation_steps,
        learning_rate=phase.learning_rate,
        lr_scheduler_type="cosine" if phase.schedule == "cosine" else "constant_with_warmup",
        warmup_steps=phase.warmup_steps,
        max_grad_norm=phase.max_grad_norm,
        bf16=(sharded or deepspeed) and low_precision,  # else the weights are bfloat16 themselves
        seed=seed,
        use_cpu=not torch.accelerator.is_available(),  # without it several processes would not find each other there
        # The dataset is random already; in its own order, a resumed run sees the same sequences.
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,  # every trained weight has a gradient in every step
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
        report_to=report_to,
        disable_tqdm=not interactive,
    )
    if arguments.device.type == "cpu":
        # in a group of processes accelerate names it "cpu:0", with which transformers 5.17 cannot load a checkpoint
        vars(arguments)["_setup_devices"] = torch.device("cpu")
    if arguments.n_gpu > 1:
        raise ValueError(
            f"model: wanted one visible GPU, got {arguments.n_gpu}; start one process per GPU with torchrun or "
            "accelerate launch, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    arguments.per_device_train_batch_size = phase.part_size(arguments.world_size)
    config: Any = model.config
    # None: configurations of several parts have no such field
    use_cache = getattr(config, "use_cache", None)
    trainer = MixedTrainer(phase, model=model, args=arguments, train_dataset=dataset)
    if sharded and not trainer.is_fsdp_enabled:
        with suppress(OSError):
            Path(arguments.output_dir).rmdir()  # Trainer made it, and the next run would take it for one to resume
        raise ValueError(
            "ACCELERATE_USE_FSDP: wanted processes on GPUs, got none: start them with torchrun or accelerate launch, "
            "or unset it"
        )
    if arguments.process_index == 0:
        spread = {"processes": arguments.world_size, "sharded": sharded or deepspeed, "sharded_teacher": sharded}
        print(plan_of(model, phase, arguments.world_size, forecast(model, phase, **spread)), flush=True)
    if phase.gradient_checkpointing:
        # this method's name differs between the supported versions of transformers, as does Trainer's own argument
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if not interactive:
        trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # Trainer has turned it off, but the saved model should generate with a cache
    if use_cache is None:
        vars(config).pop("use_cache", None)
    else:
        config.use_cache = use_cache
    return trainer


def _check_sharding(*, adapters: bool, low_precision: bool) -> None:
    """Raise ValueError for settings of FSDP2 that fail later, or that would gather all weights on one GPU."""
    for name, default, wanted, reason in _SHARDING:
        if (value := os.environ.get(name, default)) != wanted:
            raise ValueError(f"{name}: wanted {wanted}, as {reason}, got {value}")
    if parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "FSDP_CPU_RAM_EFFICIENT_LOADING: wanted false, as each process reads model and teacher itself, got true"
        )
    if adapters and low_precision and not is_torch_version(">=", "2.13"):
        raise ValueError(
            "train: wanted torch 2.13 or newer for bfloat16 adapters under FSDP2 (older ones mix up weights of two "
            f"dtypes), got {torch.__version__}; use dtype 'float32', or DDP"
        )


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a phase's folder.

    Half-written ones are removed. Raises ValueError if one of its files was lost or truncated since.
    """
    for path in folder.glob("checkpoint-*"):
        if not (path / COMPLETE).exists():  # a process died while it was written
            shutil.rmtree(path)
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    newest = None if last is None else Path(last)
    if newest is not None and (changed := _changed_file(newest)) is not None:
        raise ValueError(
            f"resume: wanted the files of {newest} as they were written, got {changed} without its end, or none: "
            "delete that folder, and training goes on from the checkpoint before it"
        )
    return newest


def _changed_file(checkpoint: Path) -> str | None:
    """The name of a file whose size has changed since the checkpoint was complete; None if no size has."""
    try:
        sizes = dict(json.loads((checkpoint / COMPLETE).read_bytes()))
    except (TypeError, ValueError):
        return COMPLETE
    files = ((name, checkpoint / name, size) for name, size in sizes.items())
    return next((name for name, file, size in files if not file.is_file() or file.stat().st_size != size), None)
