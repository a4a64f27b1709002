"""What training takes in the shape of a known model with random weights: tokens per second and memory, dense beside it.

Started by torchrun, FSDP2 spreads all weights over the GPUs if accelerate's variables ask for it.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from condense import CCA
from condense.bench import MODEL_SHAPES
from condense.results import write_results
from condense.train import RECIPES, PhaseConfig
from condense.train.phase import train_phase
from condense.train.trained import set_trained

METHOD = CCA(group_size=16, window=1024, summary="streaming", rep_bias="log_size")
WAYS: dict[str, dict[str, Any]] = {
    "condensed, distilled": {"mix": "condensed", "distill": 1.0},
    "condensed": {"mix": "condensed"},
    "dense": {"mix": "dense"},
}
# Llama-3.2-1B's
SHAPES = {
    **MODEL_SHAPES,
    "llama-3.2-1b": {
        **MODEL_SHAPES["llama-3.1-8b"], "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
# PyTorch's own order would take flash attention first, which is slower on Hopper
DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SHORT = 4096
_SHARE = 0.97  # of the GPU's memory, as some of it is lost between blocks


class Noise(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; what is computed does not depend on them. ``lengths``: of the sequences, in their order."""

    def __init__(self, lengths: Sequence[int], vocabulary: int) -> None:
        self._lengths, self._vocabulary = lengths, vocabulary

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator, length = torch.Generator().manual_seed(index), self._lengths[index]
        ids = torch.randint(self._vocabulary, (length,), generator=generator)
        return {"input_ids": ids, "loss_weights": (torch.arange(length) > 0).float()}


class _Unsaved(TrainerCallback):
    """Leaves out the checkpoint after the last step."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = False


def measure(options: argparse.Namespace) -> None:
    """Train a few steps in each way and write what they took; the file is written anew after each."""
    processes = PartialState()
    rows = []
    for way in options.ways:
        lengths = [options.length] * options.steps
        speeds, peak = _train(options, way, lengths)
        rows.append({"name": way, "tokens_per_second": speeds, "peak_gib": peak})
        _write(options, {"processes": processes.num_processes, "length": options.length, "rows": rows})


def longest(options: argparse.Namespace) -> None:
    """The longest sequence that trains in each way: predicted from two lengths, as memory is linear, then tried."""
    rows = []
    for way in options.ways:
        (_, low), (speeds, high) = (_train(options, way, [_SHORT, length]) for length in (32768, 65536))
        _write(options, {"rows": [*rows, {"name": way, "at": [32768, 65536], "peak_gib": [low, high]}]})
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        length = int((_SHARE * whole - low) / (high - low) * 32768 + 32768) // _SHORT * _SHORT
        while True:
            try:
                speeds, peak = _train(options, way, [_SHORT, length])
                break
            except torch.OutOfMemoryError:
                print(way, length, "does not fit", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            length = length * 95 // 100 // _SHORT * _SHORT
        rows.append({"name": way, "length": length, "tokens_per_second": speeds[-1], "peak_gib": peak})
        _write(options, {"rows": rows})


def _train(options: argparse.Namespace, way: str, lengths: Sequence[int]) -> tuple[list[int], float]:
    """Tokens per second of each step, and the most memory of this GPU in GiB."""
    processes = PartialState()
    run = RECIPES["adapt"]([options.output], options.output, pretrained="", method=METHOD, train=options.train)
    settings = AutoConfig.for_model(**SHAPES[options.shape], max_position_embeddings=2**20)
    torch.manual_seed(0)
    with processes.device:
        stock = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    model = set_trained(stock, run)
    phase = PhaseConfig(
        name=way, steps=len(lengths), sequence_length=lengths[-1], batch_size=processes.num_processes, method=METHOD,
        learning_rate=1e-5, warmup_steps=0, gradient_checkpointing=True, checkpoint_steps=10**6, logging_steps=1,
        **WAYS[way],
    )  # fmt: skip
    data: Any = Noise([length for length in lengths for _ in range(processes.num_processes)], settings.vocab_size)
    torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as folder, sdpa_kernel(DENSE, set_priority=True):
            trainer = train_phase(model, data, phase, Path(folder), seed=0, callbacks=[_Unsaved()])
        history = trainer.state.log_history
    finally:
        model = stock = trainer = None
        gc.collect()
        torch.cuda.empty_cache()
    speeds = [entry["tokens_per_second"] for entry in history if "loss" in entry]
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if processes.is_main_process:
        print(way, lengths, speeds, peak, flush=True)
    return speeds, peak


def _write(options: argparse.Namespace, content: dict[str, Any]) -> None:
    if PartialState().is_main_process:
        about = {"shape": options.shape, "train": options.train, "method": METHOD, "lora_rank": 16}
        write_results(options.output, {**about, **content}, seed=0, overwrite=True)
