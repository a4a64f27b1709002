"""Models trained with dense attention alone, on longer and longer texts, until they find hidden numbers in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from condense import Method
from condense.tasks import Corpus, SequenceBuilder, load_words
from condense.train import PhaseConfig, new_model
from condense.train.data import TrainingSequences
from condense.train.phase import train_phase
from condense.train.recipes import DEMO_ARCHITECTURE, TINY_MLA_ARCHITECTURE

LENGTH = 32768
_POSITIONS = {"max_position_embeddings": LENGTH}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**DEMO_ARCHITECTURE, **_POSITIONS},
    # four query heads per KV head
    "gqa4": {**DEMO_ARCHITECTURE, **_POSITIONS, "num_attention_heads": 8, "num_key_value_heads": 2},
    # 160 + 32 cached numbers per token and layer, a width for which Recall has kernels
    "mla": {**TINY_MLA_ARCHITECTURE, **_POSITIONS, "kv_lora_rank": 160},
}
TOKENS_PER_STEP = 65_536
LEARNED = 0.97  # share of answer tokens that are right, over the steps between two entries of the log
_LEAST = 0.5  # the same at the end of a phase; a model that looks nothing up has some 0.3
_WORKERS = 3


def phases(trial: bool) -> list[PhaseConfig]:
    """Four lengths; all but the last go on until numbers are found, at most for so many steps, the last one anneals.

    trial: two steps of one short sequence each.
    """
    sizes = (  # length, steps, rate, warm-up, hidden numbers
        (512, 1600, 2e-3, 100, (2, 8)),
        (4096, 400, 1e-3, 20, (4, 36)),
        (16384, 80, 1e-3, 0, (8, 72)),
        (LENGTH, 60, 1e-3, 0, (8, 72)),
    )
    found = [
        PhaseConfig(
            name=f"dense-{length}", steps=steps, sequence_length=length, batch_size=TOKENS_PER_STEP // length,
            learning_rate=rate, warmup_steps=warmup, schedule="cosine" if length == LENGTH else "constant",
            task_share=0.6, keys=keys, checkpoint_steps=10**6, logging_steps=25,
        )
        for length, steps, rate, warmup, keys in sizes
    ]  # fmt: skip
    if not trial:
        return found
    return [
        replace(phase, steps=2, batch_size=1, sequence_length=max(128, phase.sequence_length // 16), logging_steps=1)
        for phase in found
    ]


class _UntilLearned(TrainerCallback):
    """Ends a phase when nearly all answers are right."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """See `LEARNED`."""
        if (logs or {}).get("dense_answer_accuracy", 0) >= LEARNED:
            control.should_training_stop = True


def train_dense(
    architecture: str,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    folder: Path,
    *,
    trial: bool,
    longest: int = LENGTH,
) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    """The seed's model, and one record per phase: its length, and the entries of its log.

    longest: phases of longer texts are left out.
    Raises ValueError if it has not learned to find numbers.
    """
    set_seed(seed)
    model = new_model(ARCHITECTURES[architecture], tokenizer, "bfloat16")
    words, records = load_words().trained, []
    for number, phase in enumerate(phase for phase in phases(trial) if phase.sequence_length <= longest):
        compiled = number == 0 and device().type == "cuda"  # the phase with most of the steps, all of one shape
        for layer in model.model.layers:
            layer._compiled_call_impl = None
            if compiled:
                layer.compile()
        builder = SequenceBuilder(tokenizer, corpus, words, phase.sequence_length)
        dataset = TrainingSequences(builder, phase, seed=(seed, number))
        trainer = train_phase(
            model, dataset, phase, folder / phase.name, seed=seed, workers=0 if trial else _WORKERS,
            callbacks=() if phase.schedule == "cosine" else (_UntilLearned(),),
        )  # fmt: skip
        history = [entry for entry in trainer.state.log_history if "dense_loss" in entry]
        records.append({"length": phase.sequence_length, "steps": trainer.state.global_step, "history": history})
        right = history[-1].get("dense_answer_accuracy", 0.0)
        if right < _LEAST and not trial:
            raise ValueError(f"seed: {seed} had {right:.2f} of the answers right at {phase.sequence_length} tokens")
    return model.eval(), records


def adapt(
    model: PreTrainedModel,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    method: Method,
    length: int,
    folder: Path,
    *,
    trial: bool,
) -> list[dict[str, Any]]:
    """Train all weights for a method, distilled from the model itself, groups of 4, 8 and then its own; the log."""
    phase = PhaseConfig(
        name="adapted", steps=2 if trial else 300, sequence_length=length,
        batch_size=1 if trial else TOKENS_PER_STEP // 2 // length, mix="condensed", method=method, distill=1.0,
        group_sizes=(4, 8), learning_rate=1.5e-3, warmup_steps=0 if trial else 30, task_share=0.8, keys=(4, 36),
        checkpoint_steps=10**6, logging_steps=1 if trial else 25,
    )  # fmt: skip
    builder = SequenceBuilder(tokenizer, corpus, load_words().trained, length)
    dataset = TrainingSequences(builder, phase, seed=(seed, len(phases(trial))))
    trainer = train_phase(model, dataset, phase, folder, seed=seed, workers=0 if trial else _WORKERS)
    return [entry for entry in trainer.state.log_history if "condensed_loss" in entry]


def load_npz(path: Path) -> Corpus:
    """Text that `benchmarks/adaptation encode` has written."""
    with np.load(path) as arrays:
        return Corpus(arrays["tokens"], arrays["line_starts"], arrays["document_starts"])


def device() -> torch.device:
    """Where things run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
