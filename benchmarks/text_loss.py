"""The loss and the next-token accuracy on plain text, method by method and by position."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn import functional
from transformers import PreTrainedModel

from condense.config import check_int
from condense.models import MethodChoice, in_eval_mode, use
from condense.tasks import SequenceBuilder

_SLICE = 1024  # positions whose logits are held in float32 at a time


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss (nats per token) of the tokens at positions ``start`` to ``stop - 1``."""

    start: int
    stop: int
    loss: float


@dataclass(frozen=True)
class TextLossResult:
    """One method's loss.

    name: what the caller called the method. method: its settings, or methods by layer. loss: mean over all tokens, nats
    per token. standard_error: of that mean, from the spread between sequences. accuracy: share of the tokens that were
    the most likely one. tokens: number of predicted tokens. by_position: means over stretches of positions.
    """

    name: str
    method: MethodChoice
    loss: float
    standard_error: float
    accuracy: float
    tokens: int
    by_position: tuple[PositionLoss, ...]


def text_sequences(builder: SequenceBuilder, count: int, *, seed: int = 0) -> list[np.ndarray]:
    """``count`` stretches of plain text, each ``[L]`` int64; the same for the same arguments."""
    check_int("count", count, 1)
    return [builder.plain(np.random.default_rng([seed, index])) for index in range(count)]


def text_loss(
    model: PreTrainedModel,
    methods: Mapping[str, MethodChoice],
    sequences: Sequence[np.ndarray],
    *,
    edges: Sequence[int] = (0, 256, 512, 1024, 2048),
) -> list[TextLossResult]:
    """Mean loss of every token given all before it, under every method.

    model: a causal LM with stock attention, which it has afterwards too. methods: method by the name that its result
    gets. sequences: token ids, all of one length. edges: where the stretches of ``by_position`` begin, ascending; the
    last stretch ends with the sequence.
    Raises ValueError for no method or no sequence, sequences of several lengths, or edges that do not ascend within.
    """
    if not methods or not sequences:
        raise ValueError(f"methods: wanted methods and sequences, got {len(methods)} and {len(sequences)}")
    lengths = {len(sequence) for sequence in sequences}
    if len(lengths) > 1:
        raise ValueError(f"sequences: wanted one length, got {sorted(lengths)}")
    bounds = [*edges, lengths.pop()]
    if any(low >= high for low, high in pairwise(bounds)) or bounds[0] < 0:
        raise ValueError(f"edges: wanted ascending positions below {bounds[-1]}, got {list(edges)}")
    results = []
    with in_eval_mode(model), Progress(transient=True, console=Console(stderr=True)) as progress:
        for name, method in methods.items():
            with torch.no_grad(), use(model, method):
                rows = [_predictions(model, sequence) for sequence in progress.track(sequences, description=name)]
            losses, right = (np.stack(parts) for parts in zip(*rows, strict=True))
            means = losses.mean(1)
            error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
            # The token at position p is predicted by column p - 1: nothing predicts the first.
            stretches = tuple(
                PositionLoss(low, high, float(losses[:, max(low - 1, 0) : high - 1].mean()))
                for low, high in pairwise(bounds)
            )
            results.append(
                TextLossResult(name, method, float(losses.mean()), error, float(right.mean()), losses.size, stretches)
            )
    return results


def _predictions(model: PreTrainedModel, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses of all tokens but the first, and whether each was the most likely one, both ``[L - 1]`` float64."""
    ids = torch.from_numpy(sequence).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    losses, right = [], []
    for part, targets in zip(logits.split(_SLICE), ids[1:].split(_SLICE), strict=True):
        losses.append(functional.cross_entropy(part.float(), targets, reduction="none"))
        right.append(part.argmax(-1) == targets)
    return torch.cat(losses).double().cpu().numpy(), torch.cat(right).double().cpu().numpy()
