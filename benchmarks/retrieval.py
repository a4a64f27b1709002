"""The share of hidden numbers that a model finds again, method by method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from condense.config import check_choice, check_int
from condense.evaluate.intervals import Proportion
from condense.models import MethodChoice, in_eval_mode, use
from condense.tasks import PasskeySequence

Decoding = Literal["forced", "generate"]


@dataclass(frozen=True)
class RetrievalResult:
    """One method's answers. An answer counts if all its digits are right.

    name: what the caller called the method. method: its settings, or methods by layer. exact: share of the questions
    answered. by_depth: the same for equal slices of the text, top first.
    """

    name: str
    method: MethodChoice
    exact: Proportion
    by_depth: tuple[Proportion, ...]


def retrieval(
    model: PreTrainedModel,
    methods: Mapping[str, MethodChoice],
    sequences: Sequence[PasskeySequence],
    *,
    decoding: Decoding = "forced",
    depths: int = 5,
) -> list[RetrievalResult]:
    """Ask every question of every sequence under every method, answers decoded greedily.

    A question is asked after the text and the questions before it, each followed by its right answer.

    model: a causal LM with stock attention, which it has afterwards too. methods: method by the name that its result
    gets. sequences: texts with questions. depths: number of slices for ``by_depth``.
    decoding: ``"forced"``: one forward pass over a whole sequence; an answer is exact if each of its tokens is the most
    likely one after the true tokens before it. Greedy decoding writes exactly this answer under the same condition.
    ``"generate"``: ``model.generate`` for every question, slow.
    Raises ValueError for no method, no sequence, or an unknown ``decoding``.
    """
    check_choice("decoding", decoding, ("forced", "generate"))
    check_int("depths", depths, 1)
    if not methods or not sequences:
        raise ValueError(f"methods: wanted methods and sequences, got {len(methods)} and {len(sequences)}")
    answer = _forced if decoding == "forced" else _generated
    results = []
    with in_eval_mode(model), Progress(transient=True, console=Console(stderr=True)) as progress:
        for name, method in methods.items():
            outcomes: list[bool] = []
            with torch.no_grad(), use(model, method):
                for sequence in progress.track(sequences, description=name):
                    outcomes += answer(model, sequence)
            places = [min(int(depth * depths), depths - 1) for sequence in sequences for depth in sequence.depths]
            slices = [
                Proportion.of([right for right, place in zip(outcomes, places, strict=True) if place == index])
                for index in range(depths)
            ]
            results.append(RetrievalResult(name, method, Proportion.of(outcomes), tuple(slices)))
    return results


def _forced(model: PreTrainedModel, sequence: PasskeySequence) -> list[bool]:
    ids = torch.from_numpy(sequence.input_ids).to(model.device)
    first = min(start for start, _ in sequence.answers)
    # The logits at position i predict token i + 1; only those from the first answer on are needed.
    kept = len(ids) - first + 1
    logits = model(input_ids=ids[None], logits_to_keep=kept, use_cache=False).logits
    right = logits[0, :-1].argmax(-1) == ids[first:]
    right_at = right.tolist()
    return [all(right_at[start - first : stop - first]) for start, stop in sequence.answers]


def _generated(model: PreTrainedModel, sequence: PasskeySequence) -> list[bool]:
    outcomes = []
    for start, stop in sequence.answers:
        ids = torch.from_numpy(sequence.input_ids[:start]).to(model.device)[None]
        written = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=stop - start, do_sample=False
        )
        outcomes.append(written[0, start:].tolist() == sequence.input_ids[start:stop].tolist())
    return outcomes
