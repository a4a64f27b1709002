"""Texts by which settings are verified, and how they are read: prompts, pieces, turns and steps over the real caches.

Shapes: L tokens of a text, V vocabulary.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode

from condense.config import check_int
from condense.evaluate.compare import attention_of, new_cache
from condense.models import GraphDecoder, MethodChoice, as_steps, condensed_layers
from condense.models.families import rope_that_changes
from condense.models.replay import replayable_cache
from condense.tasks import Corpus, PasskeySequence, SequenceBuilder, load_words

COPIED = 128  # tokens of the copy that ends a text, an eighth of shorter texts
BINS = 8  # stretches of the second half by which losses are given
_SURE = 4  # the first quarter of a copy, which nothing announces, is not counted
_PIECE = 512  # tokens read at a time, so that few logits are held
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
    """``count`` texts with a copy at the end, each with others for the tasks; the same for the same arguments.

    The two tasks ask for numbers on lines of their own, and for numbers anywhere in the text whose names share words;
    as many of the ``questions`` as fit.
    Raises ValueError for a length below 256, and as `SequenceBuilder`.
    """
    if length < 256:
        raise ValueError(f"length: wanted at least 256 tokens, got {length}")
    builder = SequenceBuilder(tokenizer, corpus, load_words().held_out, length)
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
    """One text under one setting: sums of losses and numbers of tokens by kind, and per stretch of the second half the
    mean loss and divergence from dense. same: per greedy step, whether the setting takes dense attention's token.
    right: by task, which answers are right.
    """

    sums: dict[str, tuple[float, int]]
    losses: list[float]
    divergence: list[float]
    same: list[bool]
    right: dict[str, list[bool]]


@dataclass
class DenseReading:
    """Dense attention on one text: logits per piece of the second half, tokens that need far text, tokens written."""

    logits: list[Tensor] = field(default_factory=list)
    needs_far: Tensor | None = None
    written: Tensor | None = None


@torch.no_grad()
def read_text(
    model: PreTrainedModel, text: VerifyText, method: MethodChoice, dense: DenseReading, greedy: int
) -> TextReading:
    """Read the first half as a prompt and the second in pieces; decode the copy, ``greedy`` tokens, and the answers.

    Pieces say what steps lose if the model reads several tokens as it reads single ones (`condense.Method.as_steps`).
    Decoded is by `generate`, made to write the copy and what dense attention wrote, and for answers by a `GraphDecoder`
    where steps can be replayed. Of dense attention, where the tokens are given, one forward decodes them all.

    dense: of this text; empty while the method is dense attention, which fills it.
    """
    ids, half, cache = torch.from_numpy(text.ids).to(model.device), text.copy // 2, new_cache(model)
    with attention_of(model, method):
        model(ids[None, : half - 1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    with attention_of(model, as_steps(method)):
        each, apart = _read_half(model, ids[: text.copy], cache, dense)
    del cache
    needed, same = dense.needs_far, []
    assert needed is not None
    sure = text.copy + (len(ids) - text.copy) // _SURE
    with attention_of(model, method):
        copied = _decoded(model, ids[:sure], len(ids) - sure, ids[sure:])
        if greedy:
            wrote = _decoded(model, ids[: text.copy], greedy, dense.written).argmax(-1)
            dense.written = wrote if dense.written is None else dense.written
            same = (wrote == dense.written).tolist()
        decoder = _decoder(model, len(ids))
        right = {task: _answers(model, sequence, decoder) for task, sequence in text.asked.items()}
    sums = {name: (float(each[of].sum()), int(of.sum())) for name, of in (("far", needed), ("other", ~needed))}
    sums["copy"] = (float(F.cross_entropy(copied, ids[sure:], reduction="sum")), len(copied))
    by_place, apart_by_place = ([float(part.mean()) for part in x.tensor_split(BINS)] for x in (each, apart))
    return TextReading(sums, by_place, apart_by_place, same, right)


def _read_half(model: PreTrainedModel, ids: Tensor, cache: Any, dense: DenseReading) -> tuple[Tensor, Tensor]:
    """The losses of the second half of ids ``[L]``, and their divergences from dense attention, ``[n]`` in nats.

    cache: of the first half but its last token.
    """
    half, is_dense = len(ids) // 2, not dense.logits
    losses, divergence = [], []
    pieces = zip(ids[half - 1 : -1].split(_PIECE), ids[half:].split(_PIECE), strict=True)
    for index, (piece, targets) in enumerate(pieces):
        logits = model(piece[None], past_key_values=cache, use_cache=True).logits[0]
        p = logits.float().log_softmax(-1)
        losses.append(F.nll_loss(p, targets, reduction="none"))
        if is_dense:
            dense.logits.append(logits.cpu())
            divergence.append(torch.zeros_like(losses[-1]))
        else:
            of_dense = dense.logits[index].to(logits.device).float().log_softmax(-1)
            divergence.append((of_dense.exp() * (of_dense - p)).sum(-1))
    each = torch.cat(losses)
    if is_dense:
        dense.needs_far = needs_far(model, ids, F.pad(each, (half, 0)))[half:]
    return each, torch.cat(divergence)


def _reads_alike(model: PreTrainedModel) -> bool:
    """True for dense attention, which reads many tokens as it reads single ones: then one forward replaces steps."""
    return not condensed_layers(model) and rope_that_changes(model.config.get_text_config(decoder=True)) is None


def _logits(model: PreTrainedModel, ids: Tensor, count: int) -> Tensor:
    """The logits ``[count, V]`` of the last tokens of ids ``[L]``, from one forward."""
    return model(ids[None], use_cache=False, logits_to_keep=count).logits[0]


class _Writer(LogitsProcessor):
    """Keeps the logits ``[1, V]`` of each step, and lets only the given tokens be written; None: any."""

    def __init__(self, tokens: Tensor | None) -> None:
        self.logits: list[Tensor] = []
        self._tokens = tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """See the class; scores ``[1, V]``."""
        self.logits.append(scores.float())
        if self._tokens is None:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill_(1, self._tokens[len(self.logits) - 1], 0)


def _decoded(model: PreTrainedModel, ids: Tensor, count: int, tokens: Tensor | None) -> Tensor:
    """The logits ``[count, V]`` by which `generate` would write each token after ids; None: of its own choice."""
    if tokens is not None and _reads_alike(model):
        return _logits(model, torch.cat([ids, tokens[:-1]]), count).float()
    # its own output of logits would make it keep a growing cache, whose steps are not replayed
    writer = _Writer(tokens)
    model.generate(
        input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=count, do_sample=False,
        repetition_penalty=1.0, use_cache=True, logits_processor=LogitsProcessorList([writer]), pad_token_id=0,
        # a token that is never written, so that none ends the text
        eos_token_id=model.config.get_text_config(decoder=True).vocab_size,
    )  # fmt: skip
    return torch.cat(writer.logits)


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


def _decoder(model: PreTrainedModel, length: int) -> GraphDecoder | None:
    """What replays the steps of texts of ``length`` tokens; None for models whose steps `generate` does not replay."""
    growing, greedy = new_cache(model), GenerationMode.GREEDY_SEARCH
    is_growing = replayable_cache(model, growing, model.generation_config, greedy, length) is growing
    if condensed_layers(model) and not is_growing:
        with suppress(ValueError):  # of methods for which buffers cannot be made before the prompt
            return GraphDecoder(model, batch_size=1, max_length=length)
    return None


def _answers(model: PreTrainedModel, sequence: PasskeySequence, decoder: GraphDecoder | None) -> list[bool]:
    """Ask every question as a turn over one cache, answers token by token; whether greedy decoding writes each."""
    ids = torch.from_numpy(sequence.input_ids).to(model.device)
    spans, cache, wrote = sequence.answers, new_cache(model), ids.clone()
    if _reads_alike(model):
        wrote[spans[0][0] :] = _logits(model, ids[:-1], len(ids) - spans[0][0]).argmax(-1)
        spans = ()
    at = 0
    for start, stop in spans:
        # the turn up to the answer, then its tokens but the last one, which the next turn begins with
        for begin, end in [(at, start), *((i, i + 1) for i in range(start, stop - 1))]:
            new = ids[None, begin:end]
            if decoder is None:
                logits = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            else:
                logits = decoder.extend(new) if begin else decoder.prefill(new)
            wrote[end] = logits[0].argmax()
        at = stop - 1
    right = (wrote == ids).tolist()
    return [all(right[start:stop]) for start, stop in sequence.answers]
