"""The texts of a calibration: stretches that do not overlap, and texts with hidden numbers.

Shapes: L tokens of a text, n of them whose predictions are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from condense.calibration.config import CalibrationConfig
from condense.tasks import FORMS, Corpus, SequenceBuilder, encode_corpus, load_words


class Sample(NamedTuple):
    """One text. ids: int64 ``[L]``. compared: positions of the tokens whose predictions are compared, int64 ``[n]``.
    answers: for each hidden number, the span ``[start, stop)`` of its answer in ``compared``; empty without any.
    """

    ids: Tensor
    compared: Tensor
    answers: tuple[tuple[int, int], ...] = ()


class Samples(NamedTuple):
    """Texts to measure and texts to verify the result; with hidden numbers, the plain texts come first."""

    measured: list[Sample]
    held_out: list[Sample]


def draw_samples(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], config: CalibrationConfig) -> Samples:
    """Texts to measure and texts to hold out, from different stretches; hidden numbers go into the same stretches.

    Raises ValueError for a text not in a list, for too few tokens, and for a tokenizer without a token that ends texts.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, got one alone: put it into a list")
    corpus = encode_corpus(texts, tokenizer)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = config.length - len(bos)
    there, wanted = len(corpus.tokens) // size, 2 * config.texts
    if there < wanted:
        raise ValueError(
            f"text must have {wanted * size} tokens, {config.texts} texts of {config.length} to measure and as many "
            f"to verify, got {len(corpus.tokens)}: give more text, or a smaller texts or length"
        )
    halves = np.split(np.random.default_rng(config.seed).permutation(there)[:wanted], 2)
    return Samples(*(_of_stretches(tokenizer, corpus, half, bos, config) for half in halves))


def _of_stretches(
    tokenizer: PreTrainedTokenizerBase, corpus: Corpus, stretches: np.ndarray, bos: list[int], config: CalibrationConfig
) -> list[Sample]:
    """Samples of the stretches with these numbers: plain ones, then those with hidden numbers."""
    size = config.length - len(bos)
    own, far = _joined(corpus, stretches, size), torch.arange(config.length // 2, config.length, device="cpu")
    samples = [Sample(torch.tensor([*bos, *part], device="cpu"), far) for part in own.tokens.reshape(-1, size).tolist()]
    if config.hidden_numbers == 0:
        return samples
    words = load_words().held_out
    if config.hidden_numbers > len(words) // 2:
        raise ValueError(
            f"hidden_numbers must be at most {len(words) // 2}, as names are pairs of {len(words)} words, got "
            f"{config.hidden_numbers}"
        )
    builder = SequenceBuilder(tokenizer, own, words, config.length)
    for i, stretch in enumerate(stretches):
        rng = np.random.default_rng([config.seed, int(stretch)])
        sequence = builder.passkeys(rng, config.hidden_numbers, FORMS[i % len(FORMS)])
        if len(sequence.keys) < config.hidden_numbers:
            raise ValueError(
                f"hidden_numbers must fit into texts of {config.length} tokens with their questions, got "
                f"{config.hidden_numbers}, of which {len(sequence.keys)} do: hide fewer, or give a greater length"
            )
        ends = np.cumsum([stop - start for start, stop in sequence.answers]).tolist()
        compared = torch.cat([torch.arange(start, stop, device="cpu") for start, stop in sequence.answers])
        answers = tuple(zip([0, *ends], ends, strict=False))
        samples.append(Sample(torch.from_numpy(sequence.input_ids), compared, answers))
    return samples


def _joined(corpus: Corpus, stretches: np.ndarray, size: int) -> Corpus:
    """A corpus of these stretches; each stretch begins a line."""
    columns = (stretches[:, None] * size + np.arange(size)).flatten()
    begins_line = np.isin(columns, np.concatenate([corpus.line_starts, stretches * size]))
    return Corpus(corpus.tokens[columns], np.flatnonzero(begins_line), np.arange(len(stretches)) * size)
