"""What a model loses under an arm: one forced pass per text, and the claimed settings through `generate`.

Shapes: L tokens of a text, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
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


def under(model: PreTrainedModel, arm: Arm) -> AbstractContextManager[Any]:
    """The model with the arm's attention, within the block."""
    if arm is None:
        return nullcontext()
    return use(model, arm) if isinstance(arm, Method) else replaced(arm)


@torch.no_grad()
def whole_logits(model: PreTrainedModel, ids: Tensor, kept: int = 0) -> Tensor:
    """Of a whole text, or of its last ``kept`` tokens, ``[L or kept, V]``."""
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


def forced(
    model: PreTrainedModel, arm: Arm, held: HeldOut, reference: Reference, fewer: bool = False
) -> dict[str, Any]:
    """All tasks under an arm, per text; dense attention (None) must come first, as it fills the reference.

    fewer: half of the texts, the first ones, for arms that are slow.
    """
    device, result = model.device, {"prose": [], "code": [], "asked": []}
    texts = [("prose", text) for text in held.prose] + [("code", text) for text in held.code]
    with under(model, arm):
        for index, (kind, text) in enumerate(texts):
            ids = torch.from_numpy(text.ids).to(device)
            number, of = (index, len(held.prose)) if kind == "prose" else (index - len(held.prose), len(held.code))
            if fewer and number >= max(1, of // 2):
                continue
            logits = whole_logits(model, ids)
            if len(reference.logits) == index:
                assert arm is None
                reference.logits.append(logits[len(ids) // 2 :].clone())
                reference.needs_far.append(needs_far(model, ids, token_losses(logits, ids)))
            row = _of_text(logits, ids, text, reference.logits[index], reference.needs_far[index])
            result[kind].append(row)
        for text in held.asked[: max(1, len(held.asked) // 2)] if fewer else held.asked:
            result["asked"].append(answered(model, text))
    return result


def answered(model: PreTrainedModel, text: Drawn, read: Callable[..., Tensor] = whole_logits) -> dict[str, str]:
    """Per kind a 1 for every answer of which each token is the most likely one, else a 0. read: as `whole_logits`."""
    ids = torch.from_numpy(text.ids).to(model.device)
    first = text.asked
    right = (read(model, ids, len(ids) - first + 1)[:-1].argmax(-1) == ids[first:]).tolist()
    hits: dict[str, str] = {}
    for kind, start, stop in text.answers:
        hits[kind] = hits.get(kind, "") + str(int(all(right[start - first : stop - first])))
    return hits


def over_cache(method: Method, prompt: int) -> Callable[..., Tensor]:
    """Logits as of `whole_logits`, where the first ``prompt`` tokens are read into a cache, and the others over it."""

    @torch.no_grad()
    def read(model: PreTrainedModel, ids: Tensor, kept: int = 0) -> Tensor:
        with _stock(model), use(model, method):
            first = model(input_ids=ids[None, :prompt], use_cache=True)
            rest = model(input_ids=ids[None, prompt:], past_key_values=first.past_key_values, use_cache=True)
        return torch.cat([first.logits[0], rest.logits[0]])[-kept:]

    return read


@contextlib.contextmanager
def _stock(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention within the block, which reads over caches."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation("transfer")


@torch.no_grad()
def generated(
    model: PreTrainedModel, settings: Mapping[str, Method | None], held: HeldOut,
    note: Callable[[dict[str, Any]], None], until: float, *, turns: int = 16, texts: int = 4, tokens: int = 64,
) -> None:  # fmt: skip
    """Several turns over one cache, each a question; and a text that goes on. Greedy, through ``model.generate``.

    note gets a record per setting: per text a 1 or 0 per question, and how many of the first tokens of each
    continuation are those that dense attention writes (of ``tokens``). No setting begins after ``until``.
    """
    dense: list[Tensor] = []
    for name, method in settings.items():
        if time.time() > until:
            return
        began, record = time.time(), {"generate": name, "settings": str(method), "of": tokens}
        try:
            with _stock(model), use(model, method) if method is not None else nullcontext():
                record["hits"] = [_conversation(model, text, turns) for text in held.asked[:texts]]
                prompts = [torch.from_numpy(text.ids[: text.asked]) for text in held.prose[:texts]]
                written = [_written(model, ids, None, tokens)[0][len(ids) :] for ids in prompts]
            dense = dense or written
            record["same"] = [int((a == b).long().cumprod(0).sum()) for a, b in zip(written, dense, strict=True)]
        except Exception:
            record["error"] = traceback.format_exc()[-3000:]
        note(record | {"seconds": round(time.time() - began, 2)})


def _conversation(model: PreTrainedModel, text: Drawn, turns: int) -> str:
    """Questions in order, each after what was asked and answered before, over one cache."""
    ids, cache, hits, end = torch.from_numpy(text.ids), None, "", 0
    said = ids[:0]
    for _, start, stop in [answer for answer in text.answers if answer[0] != "several"][:turns]:
        # the first turn has the text, the others what stands between the last answer and the next question
        between = ids[end:start] if end == 0 else ids[_question_start(text, start) : start]
        said, cache = _written(model, torch.cat([said, between]), cache, stop - start)
        hits += str(int(said[-(stop - start) :].tolist() == ids[start:stop].tolist()))
        end = stop
    return hits


def _question_start(text: Drawn, start: int) -> int:
    """Where what follows the answer before the one at ``start`` begins."""
    return max((stop for _, _, stop in text.answers if stop <= start), default=0)


def _written(model: PreTrainedModel, ids: Tensor, cache: Any, tokens: int) -> tuple[Tensor, Any]:
    """The ids ``[N]`` with ``tokens`` more behind them, on the CPU, and the cache. cache: of a beginning of the ids."""
    out = model.generate(
        input_ids=ids[None].to(model.device), past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    return out.sequences[0].cpu(), out.past_key_values
