"""Losses of a model under an arm: one forced pass per text, the prompt at once and what follows over its cache.

Shapes: L tokens of a text, n of them behind its prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from contenders import Arm
from makes import replaced
from texts import Drawn, HeldOut
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from condense import Method
from condense.caches import CACHE
from condense.evaluate.compare import attention_of
from condense.evaluate.verify_texts import needs_far
from condense.models import as_steps

_SLICE = 2048  # positions whose logits are held in float32 at a time


@dataclass
class Reference:
    """Dense attention on the texts of a length: its logits ``[n + 1, V]`` from the prompt's last token on, and the
    tokens that need far text, bool ``[n]``, one of each per text of prose and code.
    """

    logits: list[Tensor] = field(default_factory=list)
    needs_far: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def logits_of(model: PreTrainedModel, arm: Arm, ids: Tensor, prompt: int) -> Tensor:
    """Logits from the last of ``prompt`` tokens on, ``[n + 1, V]``.

    Methods read the prompt at once and what follows over its cache, as their steps do; other arms all at once.
    """
    n = len(ids) - prompt
    if not isinstance(arm, (Method, Mapping)):
        with replaced(arm) if arm else nullcontext():
            return model(input_ids=ids[None], use_cache=False, logits_to_keep=n + 1).logits[0]
    cache, parts, own = DynamicCache(config=model.config), [], model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # the study's own attention reads no cache
    try:
        for choice, part, kept in zip((arm, as_steps(arm)), ids.split([prompt, n]), (1, n), strict=True):
            with attention_of(model, choice):
                out = model(input_ids=part[None], **{CACHE: cache}, use_cache=True, logits_to_keep=kept)
            parts.append(out.logits[0])
    finally:
        model.set_attn_implementation(own)
    return torch.cat(parts)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of each of the tokens behind a prompt, float32 ``[n]``. logits ``[n + 1, V]``, ids ``[n]``."""
    parts = zip(logits[:-1].split(_SLICE), ids.split(_SLICE), strict=True)
    return torch.cat([F.cross_entropy(x.float(), y, reduction="none") for x, y in parts])


def _of_text(logits: Tensor, ids: Tensor, sequence: Drawn, dense: Tensor, needed: Tensor) -> dict[str, Any]:
    """Sums over tokens behind the prompt by what they need, how many of each there are, and the divergence."""
    prompt, ids = len(ids) - len(needed), ids[-len(needed) :]
    losses, right = token_losses(logits, ids), logits[:-1].argmax(-1) == ids
    far = torch.arange(prompt, prompt + len(ids), device=ids.device) < sequence.asked
    classes = {"key": far & needed, "other": far & ~needed}
    if sequence.answers:
        _, start, stop = sequence.answers[0]
        classes["copy"] = torch.zeros_like(far)
        classes["copy"][start - prompt : stop - prompt] = True
    if sequence.far is not None:
        classes["identifier"] = torch.from_numpy(sequence.far).to(ids.device)[prompt:]
    result: dict[str, Any] = {
        name: [round(float(losses[tokens].sum()), 4), int(right[tokens].sum()), int(tokens.sum())]
        for name, tokens in classes.items()
    }
    kl = 0.0
    for a, b in zip(logits[:-1].split(_SLICE), dense[:-1].split(_SLICE), strict=True):
        p, of_dense = a.float().log_softmax(-1), b.float().log_softmax(-1)
        kl += float((of_dense.exp() * (of_dense - p)).sum())
    result["kl"] = round(kl / len(ids), 6)
    return result


def forced(model: PreTrainedModel, arm: Arm, held: HeldOut, reference: Reference) -> dict[str, Any]:
    """All tasks under an arm, per text; dense attention (None) must come first, as it fills the reference.

    Of texts the first half is the prompt, of questions all that stands before the first answer.
    """
    result: dict[str, Any] = {"prose": [], "code": []}
    texts = [("prose", text) for text in held.prose] + [("code", text) for text in held.code]
    for index, (kind, text) in enumerate(texts):
        ids, prompt = torch.from_numpy(text.ids).to(model.device), len(text.ids) // 2
        logits = logits_of(model, arm, ids, prompt)
        if len(reference.logits) == index:
            assert arm is None
            reference.logits.append(logits)
            losses = F.pad(token_losses(logits, ids[prompt:]), (prompt, 0))
            reference.needs_far.append(needs_far(model, ids, losses)[prompt:])
        row = _of_text(logits, ids, text, reference.logits[index], reference.needs_far[index])
        result[kind].append(row)
    result["asked"] = [answered(model, arm, text) for text in held.asked]
    return result


def answered(model: PreTrainedModel, arm: Arm, text: Drawn) -> dict[str, str]:
    """Per kind a 1 for every answer of which each token is the most likely one, else a 0."""
    ids, first = torch.from_numpy(text.ids).to(model.device), text.asked
    right = (logits_of(model, arm, ids, first)[:-1].argmax(-1) == ids[first:]).tolist()
    hits: dict[str, str] = {}
    for kind, start, stop in text.answers:
        hits[kind] = hits.get(kind, "") + str(int(all(right[start - first : stop - first])))
    return hits
