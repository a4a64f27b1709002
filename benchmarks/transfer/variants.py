"""Attention that the study measures beside the library's methods: a dense cache in few bits, and Recall with one mean
for all groups that are not open.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, D key width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from condense import Recall
from condense.methods import Context
from condense.ops import RuleSpans, Source, UniformRule, attend
from condense.ops.recall import GroupIndex, IndexChoice, rotation
from condense.ops.tensors.codes import dequantise, quantise

_AT_ONCE = 256  # queries whose weights of groups are held at a time


@dataclass(frozen=True)
class Cache:
    """Dense attention over tokens in 4 bits but for the newest: an ``attention(module, q, k, v, scale) -> out``.

    After KIVI (arXiv:2402.02750): keys have a step and a zero per channel of 64 tokens, values per token, both in the
    dtype of the tokens; the newest 128 tokens stay exact.
    """

    bits: int = 4
    group: int = 64
    window: int = 128

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        G = max(0, k.shape[2] - self.window) // self.group
        if G == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        groups = (x[:, :, : G * self.group].contiguous().unflatten(2, (G, self.group)) for x in (k, v))
        store = Source(*(self._rounded(x, dim).flatten(2, 3) for x, dim in zip(groups, (3, 4), strict=True)))
        spans = RuleSpans(UniformRule(self.group, self.window, entries=self.group), 0, 0)
        return attend(q, [store, Source(k, v)], spans, scale=q.shape[3] ** -0.5 if scale is None else scale)[0]

    def costs(self, length: int, width: int) -> dict[str, float]:
        """Bytes as a share of a dense cache of 16 bits; a step reads all of them."""
        tokens, exact = (length - self.window) // self.group * self.group, 4.0 * self.window * width
        of_key = width * self.bits / 8 + 4 * width / self.group
        kept = (tokens * (of_key + width * self.bits / 8 + 4) + exact) / (4.0 * length * width)
        return {"device": kept, "host_store": kept, "read": kept}

    def _rounded(self, x: Tensor, dim: int) -> Tensor:
        """Numbers ``[1, K, G, g, D]`` as they are read, with a step and a zero along a dimension."""
        codes, step, zero = quantise(x, dim, self.bits, x.dtype)
        return dequantise(codes, step, zero)


@dataclass(frozen=True, kw_only=True)
class OneMean(Recall):
    """Recall that sees all groups which are not open as one key more, which weighs what the centres of the index weigh,
    g times each; its value is the mean of the values of their tokens.

    unchosen: must be "drop". Not on latents. Without gradients, and without a cache's steps.
    """

    @torch.no_grad()
    def attend(
        self, q: Tensor, context: Context, *, scale: float, return_lse: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As of `condense.Recall`."""
        if not context.extra or (self.reads_exactly and q.shape[2] > 1):
            return super().attend(q, context, scale=scale, return_lse=return_lse, **options)
        assert self.unchosen == "drop"
        assert context.projection is None
        out, lse = super().attend(q, context, scale=scale, return_lse=True, **options)
        assert lse is not None
        (signs, steps, _), (B, H, L, D) = context.extra, q.shape
        index, (_, K, G, _) = GroupIndex(signs, steps), steps.shape
        centres = (steps[..., -1:].float() * index.centres(D, torch.float32)) @ rotation(D, q.device).mT
        tokens = self._asked_and_tokens(q, context, options.get("backend", "auto"))[1]
        means, choice = tokens.v.unflatten(2, (G, -1)).float().mean(3), IndexChoice(q, index, scale, self.quota)
        parts = []
        for start in range(0, L, _AT_ONCE):
            stop = min(L, start + _AT_ONCE)
            closed = context.spans.at(start, stop, q.device)[0].hi
            rest = torch.arange(G, device=q.device) < closed[..., None]
            rest = rest & ~choice.at(start, stop, closed[:, :1], G)
            asked = q[:, :, start:stop].reshape(B, K, H // K, stop - start, D).float()
            s = torch.einsum("bkrld,bkgd->bkrlg", asked, centres) * scale + math.log(self.group_size)
            mass = s.masked_fill(~rest[:, :, None], float("-inf")).logsumexp(-1).reshape(B, H, stop - start)
            share = rest.float() / rest.sum(-1, keepdim=True).clamp(min=1)
            mean = torch.einsum("bklg,bkgd->bkld", share, means).repeat_interleave(H // K, 1)
            total = torch.logaddexp(lse[:, :, start:stop].float(), mass)
            seen = out[:, :, start:stop].float() * (lse[:, :, start:stop] - total).exp()[..., None]
            parts.append((seen + mean * (mass - total).exp()[..., None], total))
        both = [torch.cat(x, dim=2) for x in zip(*parts, strict=True)]
        return both[0].to(q.dtype), both[1] if return_lse else None
