"""Attention of the study that the library does not have: a dense cache in few bits, and prompts read before answers.

Built from the library's operations, so that its kernels attend.
Shapes: H query heads, K KV heads, L tokens, P of them the prompt, G groups of g tokens, N = G * g, D key width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from condense import Recall
from condense.functional import extend
from condense.methods import Context
from condense.ops import RuleSpans, Source, UniformRule, attend, attend_recall
from condense.ops.recall import ArrayChoice, GroupIndex, RecallSources, block_width, rotation, turned_queries
from condense.ops.tensors.codes import dequantise, quantise

_BLOCK = 64  # queries whose estimates of all tokens are held at a time
Attention = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass(frozen=True)
class Cache:
    """Dense attention over tokens in 4 bits but for the newest: an ``attention(module, q, k, v, scale) -> out``.

    After KIVI (arXiv:2402.02750): keys have a step and a zero per channel of 64 tokens, values per token, both in the
    dtype of the tokens; the newest 128 tokens stay exact. turned: keys are turned by the index's rotation and have a
    step and a zero per token, too.
    """

    turned: bool = False
    bits: int = 4
    group: int = 64
    window: int = 128

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        G = max(0, k.shape[2] - self.window) // self.group
        if G == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        groups = (x[:, :, : G * self.group].contiguous().unflatten(2, (G, self.group)) for x in (k, v))
        store = Source(*(x.flatten(2, 3) for x in self._rounded(*groups)))
        spans = RuleSpans(UniformRule(self.group, self.window, entries=self.group), 0, 0)
        return attend(q, [store, Source(k, v)], spans, scale=q.shape[3] ** -0.5 if scale is None else scale)[0]

    def costs(self, length: int, width: int) -> dict[str, float]:
        """Bytes as a share of a dense cache of 16 bits; a step reads all of them."""
        tokens, exact = (length - self.window) // self.group * self.group, 4.0 * self.window * width
        of_key = width * self.bits / 8 + (4 if self.turned else 4 * width / self.group)
        kept = (tokens * (of_key + width * self.bits / 8 + 4) + exact) / (4.0 * length * width)
        return {"device": kept, "host_store": kept, "read": kept}

    def _rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read, ``[1, K, G, g, D]``."""
        if not self.turned:
            return self._on_grid(k, 3), self._on_grid(v, 4)
        wide, D = torch.promote_types(k.dtype, torch.float32), k.shape[4]
        turn = rotation(D, k.device, wide) / math.sqrt(block_width(D))
        turned = self._on_grid((k.to(wide) @ turn).to(k.dtype), 4)
        return (turned.to(wide) @ turn.mT).to(k.dtype), self._on_grid(v, 4)

    def _on_grid(self, x: Tensor, dim: int) -> Tensor:
        codes, step, zero = quantise(x, dim, self.bits, x.dtype)
        return dequantise(codes, step, zero)


@dataclass(frozen=True)
class Answers:
    """A text as users read it: its prompt by the method with ``prompt="exact"``, what follows by the method's steps.

    left: instead of the method's number of groups, open the fewest that leave at most so much of a query head's
    attention closed, as the index estimates it; query heads that share a KV head open what any of them needs.
    opened: with ``left``, the share of the closed groups that queries behind the prompt opened, appended by layer.
    """

    method: Recall
    left: float | None = None
    opened: list[float] = field(default_factory=list, compare=False, repr=False)

    def after(self, prompt: int) -> Attention:
        """The attention of texts whose first ``prompt`` tokens are the prompt."""

        def attention(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            scale, state, parts = q.shape[3] ** -0.5 if scale is None else scale, None, []
            ends = (0, prompt), (prompt, q.shape[2])
            for method, (start, stop) in zip((self.method.replace(prompt="exact"), self.method), ends, strict=True):
                new = tuple(x[:, :, start:stop] for x in (q, k, v))
                context, keep = extend(method, state, *new, scale=scale)
                if start and self.left is not None and context.extra:
                    parts.append(self._by_mass(new[0], context, scale))
                else:
                    parts.append(method.attend(new[0], context, scale=scale)[0])
                state = keep()
            return torch.cat(parts, 2)

        return attention

    @property
    def costed(self) -> Recall:
        """The method whose bytes are those of this one: with the share of groups that was opened."""
        if not self.opened:
            return self.method
        return self.method.replace(num_recall=max(1e-6, sum(self.opened) / len(self.opened)))

    def _by_mass(self, q: Tensor, context: Context, scale: float) -> Tensor:
        signs, steps, _ = context.extra
        _, store = self.method._asked_and_tokens(q, context, "auto")
        entries = context.entries
        if self.method.unchosen == "drop":
            entries = Source(*(x[:, :, :: self.method.group_size] for x in store[:2]))
        mask = self._chosen(q, GroupIndex(signs, steps), context, scale)
        sources = RecallSources(entries, store, context.window, context.spans)
        return attend_recall(q, sources, ArrayChoice(mask), scale=scale, unchosen=self.method.unchosen)[0]

    def _chosen(self, q: Tensor, index: GroupIndex, context: Context, scale: float) -> Tensor:
        """The groups that queries ``[1, H, L, D]`` open, bool ``[1, K, L, G]``."""
        (_, K, G, g), D, wide = index.steps.shape, q.shape[3], torch.promote_types(q.dtype, torch.float32)
        keys = index.turned(D, wide).flatten(2, 3) * index.steps.to(wide).flatten(2)[..., None]
        # an estimate errs by a normal number of this deviation times the query's norm (condense.ops.recall.index):
        # 0.75 |k| / sqrt(D), where a step is |k| / sqrt(D) over 0.8 and over the root of the block's width
        error = 0.75 * 0.8 * math.sqrt(block_width(D)) * index.steps.to(wide).flatten(2)
        chosen, shares = [], []
        for start in range(0, q.shape[2], _BLOCK):
            block = q[:, :, start : start + _BLOCK]
            stop = start + block.shape[2]
            numbers, unit = turned_queries(block)
            heads = (numbers * unit).unflatten(1, (K, -1))  # [1, K, R, l, D]
            norms = block.to(wide).norm(dim=-1).unflatten(1, (K, -1))[..., None]
            # the mean of exp of a normal number is larger than exp of its mean by half of its variance
            scores = heads @ keys.mT[:, :, None] * scale - (norms * error[:, :, None, None] * scale).square() / 2
            entries, window = context.spans.at(start, stop, q.device)
            closed = torch.arange(G, device=q.device) < entries.hi[:, :, None, :, None]
            of_groups = scores.unflatten(4, (G, g)).logsumexp(5).masked_fill(~closed, -math.inf)
            near = self._window_mass(block, context.window.k, window, scale).unflatten(1, (K, -1))
            total = torch.logaddexp(of_groups.logsumexp(4), near)
            mass = (of_groups - total[..., None]).exp()
            best = mass.sort(4, descending=True).values
            needed = (best.flip(4).cumsum(4).flip(4) > self.left).sum(4, keepdim=True)
            least = best.gather(4, (needed - 1).clamp(min=0))
            opened = ((mass >= least) & (needed > 0) & closed).any(2)
            chosen.append(opened)
            shares.append(opened.sum(3) / closed[:, :, 0].sum(3).clamp(min=1))
        self.opened.append(float(torch.cat(shares, 2).mean()))
        return torch.cat(chosen, 2)

    @staticmethod
    def _window_mass(q: Tensor, k: Tensor, span: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """Log of the summed weights of the window's tokens, ``[1, H, l]``; span: those that each query sees."""
        lo, hi = (x[0, 0] for x in span)
        first, last, wide = int(lo.min()), int(hi.max()), torch.promote_types(q.dtype, torch.float32)
        column = torch.arange(first, last, device=q.device)
        seen = (column >= lo[:, None]) & (column < hi[:, None])
        near = k[:, :, first:last].to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (q.to(wide) @ near.mT * scale).masked_fill(~seen, -math.inf).logsumexp(3)
