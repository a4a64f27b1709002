"""The configuration of a training run: frozen dataclasses that recipes fill in."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from condense.config import check_choice, check_int, check_number, check_positive
from condense.methods import Method

Mix = Literal["dense", "condensed", "alternate"]
_MIXES = ("dense", "condensed", "alternate")
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PhaseConfig:
    """One stretch of training with one sequence length and one learning rate schedule: warm-up, cosine to 0.

    name: names the folder of the phase's checkpoints. steps: optimizer steps. sequence_length: tokens per sequence.
    batch_size: sequences per optimizer step.
    mix: ``"dense"``: stock attention; ``"condensed"``: ``method`` in every step; ``"alternate"``: stock attention in
    even steps, ``method`` in odd ones, on the same weights. method: the condensed attention; needed unless ``mix`` is
    ``"dense"``.
    learning_rate: its peak. warmup_steps: steps until the peak. weight_decay: AdamW's, on matrices.
    task_share: share of the sequences with hidden numbers and questions; the others are plain text. keys: fewest and
    most hidden numbers in one sequence, drawn uniformly. answer_weight: weight in the loss of an answer's tokens; all
    others weigh 1.
    gradient_accumulation_steps: parts that a batch is computed in, for devices with little memory.
    gradient_checkpointing: recompute activations in the backward pass, for devices with little memory.
    checkpoint_steps: steps between checkpoints to resume from. logging_steps: steps between entries of the loss
    history.
    Raises ValueError for a number out of its range, and for a mix without the method that it needs.
    """

    name: str
    steps: int
    sequence_length: int
    batch_size: int
    mix: Mix = "dense"
    method: Method | None = None
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    task_share: float = 0.5
    keys: tuple[int, int] = (2, 8)
    answer_weight: float = 5.0
    weight_decay: float = 0.1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    checkpoint_steps: int = 1000
    logging_steps: int = 50

    def __post_init__(self) -> None:
        sizes = ("steps", "sequence_length", "batch_size", "checkpoint_steps", "logging_steps")
        for field in (*sizes, "gradient_accumulation_steps"):
            check_int(field, getattr(self, field), 1)
        check_int("warmup_steps", self.warmup_steps, 0)
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                "batch_size: wanted a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}, got {self.batch_size}"
            )
        check_choice("mix", self.mix, _MIXES)
        if self.mix != "dense" and self.method is None:
            raise ValueError(f"method: wanted a method for mix {self.mix!r}, got None")
        check_number("task_share", self.task_share, 0, 1)
        for count in self.keys:
            check_int("keys", count, 1)
        if len(self.keys) != 2 or self.keys[0] > self.keys[1]:
            raise ValueError(f"keys: wanted the fewest and the most, got {self.keys}")
        check_positive("learning_rate", self.learning_rate)
        for field in ("answer_weight", "weight_decay"):
            check_number(field, getattr(self, field), 0, math.inf)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run: the model to start from, the data, the phases, and the folder of the finished model.

    recipe: the name of the function that made this. seed: decides the weights to start from and every sequence.
    data: text files (see `condense.tasks.read_documents`). output: the folder that the finished model is written to;
    must not exist. phases: trained in order, each from the weights of the one before.
    architecture: a fresh model: the arguments of ``AutoConfig.for_model``, ``vocab_size`` included. pretrained: the
    folder or name of a saved model to adapt, instead of ``architecture``. dtype: of the weights; with ``"bfloat16"``
    the optimizer keeps a float32 copy.
    cache: folder for the tokenizer and the encoded text; runs can share it. By default in ``work``. workers: processes
    that build sequences; 0 builds them in the training process.
    save_condensed: the finished model is saved with the last phase's method, so that it loads condensed. shard_size: no
    file of the finished model is larger, as Hugging Face writes sizes (``"12MB"``).
    Raises ValueError for a run without data, without phases or with two of one name, for both or neither of
    ``architecture`` and ``pretrained``, and for a field out of range.
    """

    recipe: str
    seed: int
    data: tuple[Path, ...]
    output: Path
    phases: tuple[PhaseConfig, ...]
    architecture: Mapping[str, Any] | None = None
    pretrained: str | Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    cache: Path | None = None
    workers: int = 0
    save_condensed: bool = False
    shard_size: str = "5GB"

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: wanted at least one text file, got none")
        if not self.phases:
            raise ValueError("phases: wanted at least one phase, got none")
        if len({phase.name for phase in self.phases}) < len(self.phases):
            raise ValueError(f"phases: wanted different names, got {[phase.name for phase in self.phases]}")
        if (self.architecture is None) == (self.pretrained is None):
            raise ValueError("pretrained: wanted either an architecture or a pretrained model, got both or neither")
        check_choice("dtype", self.dtype, _DTYPES)
        check_int("seed", self.seed, 0)
        check_int("workers", self.workers, 0)
        if self.save_condensed and self.phases[-1].method is None:
            raise ValueError("save_condensed: wanted a method in the last phase, got None")

    @property
    def work(self) -> Path:
        """The folder of everything unfinished: checkpoints, and the models between phases."""
        return self.output.with_name(self.output.name + ".work")

    @property
    def cache_folder(self) -> Path:
        """The folder of the tokenizer and the encoded text."""
        return self.cache if self.cache is not None else self.work / "cache"

    def with_steps(self, steps: int) -> "TrainConfig":
        """The same run with ``steps`` steps per phase: at most a tenth warm-up, a checkpoint at least every quarter."""
        check_int("steps", steps, 1)
        phases = tuple(
            dataclasses.replace(
                phase,
                steps=steps,
                warmup_steps=min(phase.warmup_steps, steps // 10),
                checkpoint_steps=min(phase.checkpoint_steps, max(1, steps // 4)),
            )
            for phase in self.phases
        )
        return dataclasses.replace(self, phases=phases)
