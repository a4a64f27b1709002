"""The configuration of a training run: frozen dataclasses that recipes fill in."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from condense.config import Natural, Positive, Range, Share, check_fields, check_int, check_positive
from condense.methods import Dense, Method
from condense.models import MethodChoice, described, methods_of, parse_choice
from condense.train.growth import grown, largest_group, trained

Trained = Literal["all", "qkv", "qkvo", "lora"]
NotNegative = Annotated[float, Range(0)]
_SIZE = re.compile(r"\d+(\.\d+)?[KMGT]B")
_GROWING = 2 / 3  # share of the steps after which groups have their full size


@dataclass(frozen=True)
class PhaseConfig:
    """One stretch of training with one sequence length and one learning rate schedule.

    name: names the folder of the phase's checkpoints. steps: optimizer steps. sequence_length: tokens per sequence.
    batch_size: sequences per optimizer step.
    mix: ``"dense"``: stock attention; ``"condensed"``: ``method`` in every step; ``"alternate"``: stock attention in
    even steps, ``method`` in odd ones, on the same weights. method: the condensed attention of the last two mixes, as
    `condense.apply` takes it, also by layer; layers whose methods give no gradients, such as `Recall`'s, are then
    trained with dense attention.
    group_sizes: the method's group sizes at the start, ascending, all below its own: the first two thirds of the steps
    are divided evenly among these and its own, which the last third has too. Empty: its own throughout. By layer,
    groups are cut to the size of the stage.
    distill: share of the KL to the model's dense self in the loss of every step, 0 to 1; the rest is cross entropy. The
    dense self is the model as the phase begins, with dense attention.
    learning_rate: its peak. warmup_steps: steps until the peak, at most all; None: a tenth of them, at most 100.
    schedule: what follows it, ``"cosine"`` down to 0 or ``"constant"``. weight_decay: AdamW's, on matrices.
    max_grad_norm: longer gradients are scaled down to it.
    task_share: share of the sequences with hidden numbers and questions; the others are plain text. keys: fewest and
    most hidden numbers in one sequence, drawn uniformly. varied_share: share of these sequences in which names share
    words with each other and numbers stand anywhere in the text, not on lines of their own. first_share: share of those
    with hidden numbers in which one opens the text, in a group with the first token, to which many heads attend.
    short_share: share of those with hidden numbers that end early, after 256 tokens or more, with proportionally fewer
    numbers; other text follows.
    packed: sequences hold the documents of the data side by side: attention, positions and groups begin anew at each,
    the tokenizer's ``bos`` token stands before each, and no document's first token is a target. Those with hidden
    numbers are one document up to the last answer. By default a sequence is one text, whatever it runs across.
    answer_weight: weight in the loss of an answer's tokens; all others weigh 1.
    gradient_accumulation_steps: parts that a batch is computed in, for devices with little memory.
    gradient_checkpointing: recompute activations in the backward pass, for devices with little memory.
    checkpoint_steps: steps between checkpoints to resume from. logging_steps: steps between entries of the log.
    Raises ValueError for a field out of its range or of another type, for a mix without the method that it needs or
    that learns nothing by ``distill``, and for a method that gives no gradients or reads sequences of this length with
    dense attention.
    """

    name: str
    steps: Positive
    sequence_length: Positive
    batch_size: Positive
    mix: Literal["dense", "condensed", "alternate"] = "dense"
    method: MethodChoice | None = None
    group_sizes: tuple[int, ...] = ()
    distill: Share = 0.0
    learning_rate: float = 2e-3
    warmup_steps: Natural | None = None
    schedule: Literal["cosine", "constant"] = "cosine"
    task_share: Share = 0.5
    keys: tuple[int, int] = (2, 8)
    varied_share: Share = 0.0
    first_share: Share = 0.0
    short_share: Share = 0.0
    packed: bool = False
    answer_weight: NotNegative = 5.0
    weight_decay: NotNegative = 0.1
    max_grad_norm: float = 1.0
    gradient_accumulation_steps: Positive = 1
    gradient_checkpointing: bool = False
    checkpoint_steps: Positive = 1000
    logging_steps: Positive = 50

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method is not None:
            object.__setattr__(self, "method", parse_choice(self.method))
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", _warmup(self.steps, None))
        elif self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps: wanted at most steps, {self.steps}, got {self.warmup_steps}")
        self.part_size()
        if self.mix != "dense" and self.method is None:
            raise ValueError(f"method: wanted a method for mix {self.mix!r}, got None")
        if self.group_sizes:
            self._check_group_sizes()
        for count in self.keys:
            check_int("keys", count, 1)
        if len(self.keys) != 2 or self.keys[0] > self.keys[1]:
            raise ValueError(f"keys: wanted the fewest and the most, got {self.keys}")
        check_positive("learning_rate", self.learning_rate)
        check_positive("max_grad_norm", self.max_grad_norm)
        if self.mix == "dense" and self.distill == 1:
            raise ValueError("distill: wanted below 1 with mix 'dense', as a model learns nothing of itself, got 1")
        if self.mix != "dense" and self.method is not None:
            self._check_method(methods_of(trained(self.method)))

    @property
    def tokens(self) -> int:
        """Tokens of the whole phase."""
        return self.steps * self.batch_size * self.sequence_length

    def part_size(self, processes: int = 1) -> int:
        """Sequences in one part of a batch on one process. Raises ValueError if the parts would not be equal."""
        parts = self.gradient_accumulation_steps * processes
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size: wanted a multiple of gradient_accumulation_steps times processes, {parts}, got "
                f"{self.batch_size}"
            )
        return self.batch_size // parts

    def attention_at(self, step: int) -> MethodChoice | None:
        """The methods of an optimizer step, counted from 0; None: the step has dense attention in all layers."""
        if self.method is None or self.mix == "dense" or (self.mix == "alternate" and step % 2 == 0):
            return None
        stage = int(step / (self.steps * _GROWING) * (len(self.group_sizes) + 1))
        full = trained(self.method)
        return full if stage >= len(self.group_sizes) else grown(full, self.group_sizes[stage])

    def _check_method(self, methods: Sequence[Method]) -> None:
        if all(isinstance(method, Dense) for method in methods) and self.distill > 0:
            raise ValueError("method: dense attention has nothing to learn of itself (distill), got Dense()")
        for method in methods:
            rule = method.layout.rule
            if rule.window is not None and self.sequence_length < rule.window + rule.chunk:
                raise ValueError(
                    f"sequence_length: wanted at least {rule.window + rule.chunk} tokens, as fewer are read with dense "
                    f"attention by {method}, got {self.sequence_length}"
                )

    def _check_group_sizes(self) -> None:
        for size in self.group_sizes:
            check_int("group_sizes", size, 1)
        own = 0 if self.method is None or self.mix == "dense" else largest_group(trained(self.method))
        if not own:
            got = self.method and described(self.method)
            raise ValueError(f"group_sizes: wanted a method with groups to train with, got {got}")
        if list(self.group_sizes) != sorted({*self.group_sizes, own} - {own}) or self.group_sizes[-1] > own:
            raise ValueError(f"group_sizes: wanted ascending sizes below the method's {own}, got {self.group_sizes}")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run: the model to start from, the data, the phases, and the folder of the finished model.

    recipe: the name of the function that made this. seed: decides the weights to start from and every sequence.
    data: text files and datasets, such as ``Path("hf:OWNER/NAME")`` (see `condense.tasks.read_documents`).
    data_weights: for each of them how often sequences are drawn from it, as numbers of any sum; empty: as often as it
    has lines. output: the folder that the finished model is written to; must not exist. phases: trained in order, each
    from the weights of the one before.
    architecture: a fresh model: the arguments of ``AutoConfig.for_model``, ``vocab_size`` included. pretrained: the
    folder or name of a saved model to adapt, instead of ``architecture``. dtype: of the weights; with ``"bfloat16"``
    the optimizer keeps a float32 copy.
    train: the weights that are trained: ``"all"``, those of the attention's projections (``"qkv"``, or ``"qkvo"`` with
    the output's), or ``"lora"``: adapters (PEFT), which alone are saved. lora_rank: their rank; they are scaled by 2.
    lora_targets: the layers that get one: ``"qkv"``, ``"qkvo"`` or ``"all-linear"``; both for ``"lora"`` alone.
    cache: folder for the tokenizer and the encoded text; runs can share it. By default in ``work``. workers: processes
    that build sequences, at most one per core; 0 builds them in the training process.
    report_to: ``"tensorboard"``: the log is written for it too, in ``runs`` of each phase and the finished model.
    save_condensed: the finished model is saved with the last phase's method, so that it loads condensed. shard_size: no
    file of the finished model is larger, as Hugging Face writes sizes (``"12MB"``).
    Raises ValueError for a run without data or with weights that do not fit them, without phases or with two of one
    name, for both or neither of ``architecture`` and ``pretrained``, and for a field out of range.
    """

    recipe: str
    seed: Natural
    data: tuple[Path, ...]
    output: Path
    phases: tuple[PhaseConfig, ...]
    architecture: Mapping[str, Any] | None = None
    pretrained: str | Path | None = None
    data_weights: tuple[float, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    train: Trained = "all"
    lora_rank: Positive = 16
    lora_targets: Literal["qkv", "qkvo", "all-linear"] = "all-linear"
    cache: Path | None = None
    workers: Natural = 0
    report_to: Literal["none", "tensorboard"] = "none"
    save_condensed: bool = False
    shard_size: str = "5GB"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed >= 2**32:
            raise ValueError(f"seed: wanted an integer below 2**32, as Trainer takes it, got {self.seed}")
        if not self.data:
            raise ValueError("data: wanted at least one text file, got none")
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise ValueError(
                f"data_weights: wanted one for each of {len(self.data)} data files, got {len(self.data_weights)}"
            )
        for weight in self.data_weights:
            check_positive("data_weights", weight)
        if not self.phases:
            raise ValueError("phases: wanted at least one phase, got none")
        if len({phase.name for phase in self.phases}) < len(self.phases):
            raise ValueError(f"phases: wanted different names, got {[phase.name for phase in self.phases]}")
        if str(self.pretrained).startswith("~"):
            object.__setattr__(self, "pretrained", Path(str(self.pretrained)).expanduser())
        if (self.architecture is None) == (self.pretrained is None):
            raise ValueError("pretrained: wanted either an architecture or a pretrained model, got both or neither")
        if not _SIZE.fullmatch(str(self.shard_size)) or float(self.shard_size[:-2]) == 0:
            raise ValueError(f"shard_size: wanted a size such as '12MB', got {self.shard_size!r}")
        defaults = TrainConfig.lora_rank, TrainConfig.lora_targets
        if self.train != "lora" and (self.lora_rank, self.lora_targets) != defaults:
            raise ValueError(f"lora_rank, lora_targets: wanted train='lora' for adapters, got train={self.train!r}")
        if self.train == "lora" and (self.pretrained is None or len(self.phases) > 1):
            raise ValueError("train: wanted 'lora' with a pretrained model and one phase, got another run")
        if self.save_condensed and self.phases[-1].method is None:
            raise ValueError("save_condensed: wanted a method in the last phase, got None")

    @property
    def work(self) -> Path:
        """The folder of everything unfinished: checkpoints, and the models between phases."""
        output = self.output if self.output.name else self.output.absolute()  # "." has no name
        return output.parent / f"{output.name}.work"

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
                warmup_steps=_warmup(steps, phase.warmup_steps),
                checkpoint_steps=min(phase.checkpoint_steps, max(1, steps // 4)),
            )
            for phase in self.phases
        )
        return dataclasses.replace(self, phases=phases)


def _warmup(steps: int, most: int | None) -> int:
    """A tenth of the steps, at most ``most`` of them; None: at most 100."""
    return min(100 if most is None else most, steps // 10)
