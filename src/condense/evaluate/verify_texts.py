"""Texts by which settings are verified, and how they are read: prompts, pieces, turns and steps over the real caches.

Shapes: L tokens of a text, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode

from condense.caches import CACHE
from condense.config import check_int
from condense.evaluate.compare import attention_of
from condense.methods import Dense
from condense.models import GraphDecoder, MethodChoice, as_steps, condensed_layers, use
from condense.models.families import max_learned_positions, rope_that_changes
from condense.models.replay import replayable_cache, static_length
from condense.tasks import Corpus, PasskeySequence, SequenceBuilder, load_words

COPIED = 128  # tokens of the copy that ends a text, an eighth of shorter texts
BINS = 8  # stretches of the second half for which losses are given
_SURE = 4  # a copy's first 1/4 is not counted, because nothing announces the copy
_PIECE = 512  # tokens whose losses are taken at a time
_READ = 4 * _PIECE  # tokens read at a time, so that no more logits are held than `needs_far` holds
TASKS = ("numbers", "shared names")
# tokens that need far text are those that a short context predicts worse (LongPPL, arXiv:2410.23771)
_ROWS = 4  # short contexts read at a time
SHORT = 2048  # tokens of the short context, at most
NEEDS = 1.0  # nats that all the text must be worth more than the short context


@dataclass(frozen=True)
class VerifyText:
    """A text ``ids`` [L] int64 whose end, from ``copy`` on, repeats what stands in its first half.

    asked: by task, a text with hidden numbers.
    """

    ids: np.ndarray
    copy: int
    asked: dict[str, PasskeySequence]


def verify_texts(
    tokenizer: PreTrainedTokenizerBase, corpus: Corpus, length: int, count: int, *, questions: int, seed: int
) -> list[VerifyText]:
    """``count`` texts with a copy at the end, each with a further text per task; the same for the same arguments.

    The two tasks ask for numbers on lines of their own, and for numbers anywhere in the text whose names share words;
    as many of the ``questions`` as fit. length: >= 256.
    Raises ValueError as `SequenceBuilder`.
    """
    words = load_words().held_out
    builder, questions = SequenceBuilder(tokenizer, corpus, words, length), min(questions, len(words) // 2)
    numbers = passkey_sequences(builder, count, keys=questions, seed=seed)
    shared = passkey_sequences(
        builder, count, keys=questions, form="question", seed=seed + 1, shared=True, anywhere=True
    )
    copied, texts = min(COPIED, length // 8), []
    for index, asked in enumerate(zip(numbers, shared, strict=True)):
        rng = np.random.default_rng([seed, index])
        ids = builder.plain(rng)
        start = int(rng.integers(1, length // 2 - copied))
        ids[-copied:] = ids[start : start + copied]
        texts.append(VerifyText(ids, length - copied, dict(zip(TASKS, asked, strict=True))))
    return texts


def passkey_sequences(
    builder: SequenceBuilder, count: int, *, keys: int = 8, form: str = "cloze", seed: int = 0, **placed: bool
) -> list[PasskeySequence]:
    """``count`` sequences with ``keys`` hidden numbers each; the same for the same arguments.

    form, and in ``placed`` shared and anywhere: as in `SequenceBuilder.passkeys`.
    """
    check_int("count", count, 1)
    rngs = (np.random.default_rng([seed, index]) for index in range(count))
    return [builder.passkeys(rng, keys, form, **placed) for rng in rngs]


class TextReading(NamedTuple):
    """One text under one setting. sums: by kind, the sum of losses and the number of tokens. losses, divergence: per
    stretch of the second half, the mean loss, and in its first piece the divergence from dense attention. same: per
    greedy step, whether the setting takes dense attention's token. right: by task, which answers are right.
    """

    sums: dict[str, tuple[float, int]]
    losses: list[float]
    divergence: list[float]
    same: list[bool]
    right: dict[str, list[bool]]


@dataclass
class DenseReading:
    """Dense attention on one text: logits of some pieces of the second half, the tokens there that need far text, and
    those that are written after it.
    """

    logits: dict[int, Tensor] = field(default_factory=dict)
    needs_far: Tensor | None = None
    written: Tensor | None = None


@torch.no_grad()
def read_text(
    model: PreTrainedModel, text: VerifyText, method: MethodChoice, dense: DenseReading, greedy: int
) -> TextReading:
    """Read the first half as a prompt and the second in pieces; decode the copy, ``greedy`` tokens, and the answers.

    Pieces say what steps lose if the model reads several tokens as it reads single ones (`condense.Method.as_steps`).
    Decoding is token by token, given the copy, what dense attention wrote, and the answers.

    dense: dense attention's reading of this text, which comes first and fills it.
    """
    ids, half, cache = torch.from_numpy(text.ids).to(model.device), text.copy // 2, DynamicCache(config=model.config)
    with attention_of(model, method):
        model(ids[None, : half - 1], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    with attention_of(model, as_steps(method)):
        each, apart = _read_half(model, ids[: text.copy], cache, dense)
    needed, same = dense.needs_far, []
    assert needed is not None
    sure, right = text.copy + (len(ids) - text.copy) // _SURE, {}
    with attention_of(model, method):
        if not _reads_at_once(model):
            cache = None  # makes room for the decoder's cache
        decoder = _decoder(model, max(len(ids), text.copy + greedy))
        copied = _turns(model, decoder, ids, range(sure, len(ids)), cache).float()
        del cache
        if greedy:
            if dense.written is None:
                dense.written = wrote = _written(model, ids[: text.copy], greedy)
            else:
                given = torch.cat([ids[: text.copy], dense.written])
                wrote = _turns(model, decoder, given, range(text.copy, len(given))).argmax(-1)
            same = (wrote == dense.written).tolist()
        for task, sequence in text.asked.items():
            asked = torch.from_numpy(sequence.input_ids).to(model.device)
            # turns: up to an answer, then its tokens one by one; the last one begins the turn to the next answer
            ends = [end for span in sequence.answers for end in range(*span)]
            wrote = _turns(model, decoder, asked, ends).argmax(-1)
            found = dict(zip(ends, (wrote == asked[ends]).tolist(), strict=True))
            right[task] = [all(found[end] for end in range(*span)) for span in sequence.answers]
    sums = {name: (float(each[of].sum()), int(of.sum())) for name, of in (("far", needed), ("other", ~needed))}
    sums["copy"] = (float(F.cross_entropy(copied, ids[sure:], reduction="sum")), len(copied))
    by_place, apart_by_place = ([float(part.nanmean()) for part in x.tensor_split(BINS)] for x in (each, apart))
    return TextReading(sums, by_place, apart_by_place, same, right)


def _read_half(model: PreTrainedModel, ids: Tensor, cache: Any, dense: DenseReading) -> tuple[Tensor, Tensor]:
    """The losses of the second half of ids ``[L]``, and the divergences from dense attention there, ``[n]`` in nats.

    Divergence is taken in one piece of each stretch and NaN elsewhere, because logits of half a text are gigabytes.
    cache: holds the first half without its last token.
    """
    half, is_dense = len(ids) // 2, not dense.logits
    losses, divergence = [], []
    pieces = ids[half:].split(_PIECE)
    read = (model(x[None], **{CACHE: cache}, use_cache=True).logits[0] for x in ids[half - 1 : -1].split(_READ))
    parts = (part for logits in read for part in logits.split(_PIECE))
    for index, (logits, targets) in enumerate(zip(parts, pieces, strict=True)):
        p = logits.float().log_softmax(-1)
        losses.append(F.nll_loss(p, targets, reduction="none"))
        apart = torch.zeros_like(losses[-1])
        if index % max(1, len(pieces) // BINS):
            apart.fill_(torch.nan)
        elif is_dense:
            dense.logits[index] = logits.to("cpu", copy=True)
        else:
            of_dense = dense.logits[index].to(logits.device).float().log_softmax(-1)
            apart = (of_dense.exp() * (of_dense - p)).sum(-1)
        divergence.append(apart)
    each = torch.cat(losses)
    if is_dense:
        dense.needs_far = needs_far(model, ids, F.pad(each, (half, 0)))[half:]
    return each, torch.cat(divergence)


@torch.no_grad()
def needs_far(model: PreTrainedModel, ids: Tensor, losses: Tensor) -> Tensor:
    """Tokens of the second half that a short context predicts worse by more than a nat, bool ``[L]``.

    The context is of 2,048 to 2,560 tokens, or a quarter of shorter texts.

    model: with dense attention. ids ``[L]`` int64, L >= 16. losses ``[L]``: with all context.
    """
    L = len(ids)
    short = min(SHORT, L // 4)
    block, result = short // 4, torch.zeros(L, dtype=torch.bool, device=ids.device)
    # the last block ends with the text and may begin inside the one before it
    starts = [min(start, L - block) for start in range(L // 2, L, block)]
    for i in range(0, len(starts), _ROWS):
        some = starts[i : i + _ROWS]
        rows = torch.stack([ids[start - short : start + block] for start in some])
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=block + 1).logits[:, :-1]
        targets = rows[:, -block:]
        alone = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        at = torch.tensor(some, device=ids.device)[:, None] + torch.arange(block, device=ids.device)
        result[at.flatten()] = alone - losses[at.flatten()] > NEEDS
    return result


class _Growing:
    """Reads as a `GraphDecoder` does, over a cache that grows: for models whose steps cannot be replayed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prefill(self, input_ids: Tensor) -> Tensor:
        self._cache = DynamicCache(config=self._model.config)
        return self.extend(input_ids)

    def extend(self, input_ids: Tensor) -> Tensor:
        return self._model(input_ids, **{CACHE: self._cache}, use_cache=True, logits_to_keep=1).logits[:, -1]


def _decoder(model: PreTrainedModel, length: int) -> GraphDecoder | _Growing:
    """The reader of texts of up to ``length`` tokens, turn by turn: it replays steps where `generate` would."""
    growing, methods = DynamicCache(config=model.config), condensed_layers(model).values()
    held = replayable_cache(model, growing, model.generation_config, GenerationMode.GREEDY_SEARCH, length)
    # how many tokens a second reading keeps is known only after it
    if held is growing or not methods or any(method.reread is not None for method in methods):
        return _Growing(model)
    positions = max_learned_positions(model.config.get_text_config(decoder=True))
    room = static_length(length) if positions is None else length
    return GraphDecoder(model, batch_size=1, max_length=room)


def _reads_at_once(model: PreTrainedModel) -> bool:
    """True for dense attention that reads many tokens as it reads single ones."""
    return not condensed_layers(model) and rope_that_changes(model.config.get_text_config(decoder=True)) is None


def _turns(
    model: PreTrainedModel, decoder: GraphDecoder | _Growing, ids: Tensor, ends: Sequence[int], cache: Any = None
) -> Tensor:
    """The logits ``[n, V]`` after each turn of ids ``[L]``; ends: where these end, the first one at the prompt's.

    cache: holds the first tokens already; for dense attention alone.
    """
    if _reads_at_once(model):
        kept, held = ends[-1] - ends[0] + 1, 0 if cache is None else cache.get_seq_length()
        unread = ids[None, held : ends[-1]]
        logits = model(unread, **{CACHE: cache}, use_cache=cache is not None, logits_to_keep=kept).logits[0]
        return logits[torch.tensor(ends) - ends[0]]
    turns = (ids[None, begin:end] for begin, end in pairwise(ends))
    return torch.cat([decoder.prefill(ids[None, : ends[0]]), *map(decoder.extend, turns)])


def _written(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """The ``count`` tokens that follow ids ``[L]`` in a stock model, greedily.

    Condensed layers compute its dense attention, because their steps can be replayed.
    """
    with use(model, Dense()):
        decoder = _decoder(model, len(ids) + count)
        tokens = [decoder.prefill(ids[None]).argmax(-1)]
        while len(tokens) < count:
            tokens.append(decoder.extend(tokens[-1][None]).argmax(-1))
    return torch.cat(tokens)
