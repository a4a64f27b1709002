"""Memory, work and disk space that a phase will take, said before its first step."""

from typing import Any, NamedTuple

from torch import nn

from condense.train.config import PhaseConfig

_GIB = 2**30


class Forecast(NamedTuple):
    """Sizes of a phase, per process (GPU) where they are bytes; activations are not among them.

    parameters, trained: numbers of weights. processes: their number. weights, gradients, optimizer, teacher: bytes.
    logits: bytes of one part's logits and their gradient, or of the teacher's logits.
    """

    phase: PhaseConfig
    processes: int
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    teacher: int
    logits: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole phase."""
        return self.phase.steps * self.phase.batch_size * self.phase.sequence_length

    def __str__(self) -> str:
        names, sizes = self._fields[4:], self[4:]
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in zip(names, sizes, strict=True))
        return (
            f"{self.phase.name}: trains {_count(self.trained)} of {_count(self.parameters)} parameters, "
            f"{self.phase.steps} steps, {_count(self.tokens)} tokens, processes: {self.processes}\n"
            f"{self.phase.name}: {sum(sizes) / _GIB:.2f} GiB each ({parts}), before activations"
        )


def forecast(
    model: nn.Module, phase: PhaseConfig, *, processes: int = 1, sharded: bool = False, sharded_teacher: bool = False
) -> Forecast:
    """Sizes of a phase for a model whose trained weights are marked by ``requires_grad``.

    processes: their number. sharded: whether they share weights, gradients and optimizer too (FSDP2, ZeRO-3),
    whose trained weights are float32. sharded_teacher: and the teacher (FSDP2).
    """
    parameters = list(model.parameters())
    width = parameters[0].element_size()
    total, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    shares = processes if sharded else 1
    stored = 4 if sharded else width  # bytes of a trained weight
    copies = 0 if sharded or width == 4 else 4
    own_teacher = phase.distill > 0 and not hasattr(model, "disable_adapter")
    causal_lm: Any = model
    vocabulary = causal_lm.get_input_embeddings().weight.shape[0]
    return Forecast(
        phase,
        processes,
        total,
        trained,
        weights=((total - trained) * width + trained * stored) // shares,
        gradients=trained * stored // shares,
        optimizer=trained * (8 + copies) // shares,
        teacher=total * width // (processes if sharded_teacher else 1) if own_teacher else 0,
        logits=2 * phase.part_size(processes) * phase.sequence_length * vocabulary * width,
    )


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
