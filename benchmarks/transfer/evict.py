"""Caches that keep some tokens of a prompt: which ones, and what is read from what is left.

A prompt of n tokens is read with dense attention; then each layer and KV head keeps the tokens with the largest scores,
and later queries see these and what comes after the prompt. Attention is as in `exact`.
Shapes: K KV heads, R query heads for each, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from exact import Attention
from makes import replaced
from reading import token_losses
from texts import Drawn, HeldOut
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from condense import Reread

_OBSERVING, _POOLED = 64, 7  # SnapKV: last queries of the prompt, and the tokens over which their scores are averaged
_PIECE, _BLOCK = 2048, 256  # KVzip: tokens repeated at a time


@dataclass(frozen=True)
class Eviction:
    """Keep a share of a prompt's tokens. repeats: scored by the largest attention that a token gets while the prompt is
    read once more (KVzip, arXiv:2505.23416), all heads and layers at one threshold; else by the attention of the
    prompt's last queries (SnapKV, arXiv:2404.14469), as many in each head.
    """

    share: float
    repeats: bool


def _recording(scores: dict[int, Tensor], n: int, first: int, last: int) -> Attention:
    """Dense attention; scores ``[K, n]`` by layer grow to the largest share that a query from ``first`` to ``last``
    gives a token of the prompt.
    """

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        K, best = k.shape[1], scores.setdefault(module.layer_idx, torch.zeros(k.shape[1], n, device=q.device))
        for start in range(first, last, _BLOCK):
            stop = min(last, start + _BLOCK)
            t = torch.arange(start, stop, device=q.device)[:, None]
            s = q[0, :, start:stop].unflatten(0, (K, -1)).float() @ k[0, :, None, :stop].mT.float()
            s = (s * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(
                torch.arange(stop, device=q.device) > t, -math.inf
            )
            p = s.softmax(-1)[..., :n]
            if first < n:  # SnapKV: the mean of the queries, smoothed
                best[:, : p.shape[3]] += F.avg_pool1d(p.sum((1, 2)), _POOLED, 1, _POOLED // 2)
            else:
                torch.maximum(best, p.amax((1, 2)), out=best)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return attention


def _seeing(kept: dict[int, Tensor], n: int) -> Attention:
    """Queries from n on see the tokens of the prompt that their layer and KV head keep, bool ``[K, n]``."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        L, R = q.shape[2], q.shape[1] // k.shape[1]
        before = (x[:, :, :n] for x in (q, k, v))
        parts = [F.scaled_dot_product_attention(*before, is_causal=True, scale=scale, enable_gqa=True)]
        for start in range(n, L, _BLOCK):
            stop = min(L, start + _BLOCK)
            late = torch.arange(n, stop, device=q.device) <= torch.arange(start, stop, device=q.device)[:, None]
            old = kept[module.layer_idx][:, None].expand(-1, stop - start, -1)
            mask = torch.cat([old, late.expand(len(old), -1, -1)], 2).repeat_interleave(R, 0)[None]
            keys, values = (x[:, :, :stop].repeat_interleave(R, 1) for x in (k, v))
            parts.append(F.scaled_dot_product_attention(q[:, :, start:stop], keys, values, attn_mask=mask, scale=scale))
        return torch.cat(parts, 2)

    return attention


@torch.no_grad()
def kept_tokens(model: PreTrainedModel, ids: Tensor, n: int, ways: list[Eviction]) -> list[dict[int, Tensor]]:
    """For each way the tokens of the prompt ``ids[:n]`` that each layer keeps, bool ``[K, n]`` by layer."""
    result, seen = [], dict[bool, dict[int, Tensor]]()
    for way in ways:
        if way.repeats not in seen:
            scores = seen.setdefault(way.repeats, {})
            if way.repeats:
                for start in range(0, n, _PIECE):
                    again = torch.cat([ids[:n], ids[start : min(n, start + _PIECE)]])
                    with replaced(_recording(scores, n, n, len(again))):
                        model(input_ids=again[None], use_cache=False, logits_to_keep=1)
            else:
                with replaced(_recording(scores, n, n - _OBSERVING, n)):
                    model(input_ids=ids[None, :n], use_cache=False, logits_to_keep=1)
        scores, num = seen[way.repeats], max(1, round(way.share * n))
        if way.repeats:
            together = torch.cat([x.flatten() for x in scores.values()])
            least = together.kthvalue(len(together) - round(way.share * len(together)) + 1).values
            result.append({layer: x >= least for layer, x in scores.items()})
        else:
            for x in scores.values():
                x[:, n - _OBSERVING :] = math.inf
            result.append({layer: x >= x.topk(num, -1).values[:, -1:] for layer, x in scores.items()})
    return result


@torch.no_grad()
def evicting(
    model: PreTrainedModel, ways: Mapping[str, Eviction | Reread], held: HeldOut, texts: int
) -> dict[str, dict[str, Any]]:
    """By way, the answers in texts with questions and the copies of prose, as `reading.forced` writes them.

    A method reads through its own caches, an `Eviction` under a mask.
    """
    from reading import answered, over_cache, whole_logits

    result: dict[str, dict[str, Any]] = {name: {"prose": [], "code": [], "asked": []} for name in ways}
    masked = {name: way for name, way in ways.items() if isinstance(way, Eviction)}

    def each(text: Drawn) -> Iterator[tuple[str, Tensor, Callable[..., Tensor]]]:
        ids, n = torch.from_numpy(text.ids).to(model.device), text.asked - 1
        for name, way in ways.items():
            if isinstance(way, Reread):
                yield name, ids, over_cache(way, n)
        for name, kept in zip(masked, kept_tokens(model, ids, n, list(masked.values())), strict=True):
            with replaced(_seeing(kept, n)):
                yield name, ids, whole_logits

    for text in held.asked[:texts]:
        for name, _, read in each(text):
            result[name]["asked"].append(answered(model, text, read))
    for text in held.prose[: texts // 2]:
        _, start, stop = text.answers[0]
        for name, ids, read in each(text):
            logits = read(model, ids)
            part = token_losses(logits, ids)[start:stop]
            right = int((logits[start - 1 : stop - 1].argmax(-1) == ids[start:stop]).sum())
            result[name]["prose"].append({"copy": [round(float(part.sum()), 4), right, stop - start]})
    return result
