"""Losses of a model under an arm: one forced pass per text.

Shapes: L tokens of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from contenders import Arm
from makes import replaced
from texts import Drawn, HeldOut
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from variants import Answers

from condense import Method, use
from condense.evaluate.verify_texts import needs_far

_SLICE = 2048  # positions whose logits are held in float32 at a time
_BINS = 8


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of each token but the first, float32 ``[L]`` with 0 in its place. logits ``[L, V]``, ids ``[L]``."""
    parts = zip(logits[:-1].split(_SLICE), ids[1:].split(_SLICE), strict=True)
    return F.pad(torch.cat([F.cross_entropy(x.float(), y, reduction="none") for x, y in parts]), (1, 0))


@dataclass
class Reference:
    """Dense attention on the texts of a length: its logits ``[L, V]`` in the second half, and the tokens that need far
    text, bool ``[L]``, one of each per text of prose and code.
    """

    logits: list[Tensor] = field(default_factory=list)
    needs_far: list[Tensor] = field(default_factory=list)


def under(model: PreTrainedModel, arm: Arm, prompt: int) -> AbstractContextManager[Any]:
    """The model with the arm's attention, within the block. prompt: tokens of a text that `Answers` take as read."""
    if arm is None:
        return nullcontext()
    if isinstance(arm, Answers):
        return replaced(arm.after(prompt))
    return use(model, arm) if isinstance(arm, (Method, Mapping)) else replaced(arm)


@torch.no_grad()
def whole_logits(model: PreTrainedModel, ids: Tensor, kept: int = 0) -> Tensor:
    """Logits of a whole text, or of its last ``kept`` tokens, ``[L or kept, V]``."""
    return model(input_ids=ids[None], use_cache=False, logits_to_keep=kept).logits[0]


def _of_text(logits: Tensor, ids: Tensor, sequence: Drawn, dense: Tensor, needed: Tensor) -> dict[str, Any]:
    """Sums over tokens by what they need, and how many of each there are."""
    L, asked = len(ids), sequence.asked
    losses, right = token_losses(logits, ids), F.pad(logits[:-1].argmax(-1) == ids[1:], (1, 0))
    far = torch.arange(L, device=ids.device) >= L // 2
    far[asked:] = False
    classes = {"key": far & needed, "other": far & ~needed}
    if sequence.answers:
        _, start, stop = sequence.answers[0]
        classes["copy"] = torch.zeros_like(far)
        classes["copy"][start:stop] = True
    if sequence.far is not None:
        classes["identifier"] = torch.from_numpy(sequence.far).to(ids.device)
    result: dict[str, Any] = {
        name: [round(float(losses[tokens].sum()), 4), int(right[tokens].sum()), int(tokens.sum())]
        for name, tokens in classes.items()
    }
    kl = agree = 0.0
    for a, b in zip(logits[L // 2 :].split(_SLICE), dense.split(_SLICE), strict=True):
        p, of_dense = a.float().log_softmax(-1), b.float().log_softmax(-1)
        kl += float((of_dense.exp() * (of_dense - p)).sum())
        agree += float((a.argmax(-1) == b.argmax(-1)).sum())
    result["kl"], result["agree"] = round(kl / (L - L // 2), 6), round(agree / (L - L // 2), 5)
    result["by_position"] = [round(float(part.mean()), 5) for part in losses[:asked].tensor_split(_BINS)]
    return result


def forced(model: PreTrainedModel, arm: Arm, held: HeldOut, reference: Reference) -> dict[str, Any]:
    """All tasks under an arm, per text; dense attention (None) must come first, as it fills the reference.

    Of texts the first half is the prompt, of questions all that stands before the first answer.
    """
    result: dict[str, Any] = {"prose": [], "code": []}
    texts = [("prose", text) for text in held.prose] + [("code", text) for text in held.code]
    for index, (kind, text) in enumerate(texts):
        ids = torch.from_numpy(text.ids).to(model.device)
        with under(model, arm, len(ids) // 2):
            logits = whole_logits(model, ids)
        if len(reference.logits) == index:
            assert arm is None
            reference.logits.append(logits[len(ids) // 2 :].clone())
            reference.needs_far.append(needs_far(model, ids, token_losses(logits, ids)))
        row = _of_text(logits, ids, text, reference.logits[index], reference.needs_far[index])
        result[kind].append(row)
    result["asked"] = [answered(model, arm, text) for text in held.asked]
    return result


def answered(model: PreTrainedModel, arm: Arm, text: Drawn) -> dict[str, str]:
    """Per kind a 1 for every answer of which each token is the most likely one, else a 0."""
    ids = torch.from_numpy(text.ids).to(model.device)
    first = text.asked
    with under(model, arm, first):
        logits = whole_logits(model, ids, len(ids) - first + 1)
    right = (logits[:-1].argmax(-1) == ids[first:]).tolist()
    hits: dict[str, str] = {}
    for kind, start, stop in text.answers:
        hits[kind] = hits.get(kind, "") + str(int(all(right[start - first : stop - first])))
    return hits
