"""Recall as the library does not have it: stores on other grids, choices that queries share, and a second look.

Built from the library's operations, so that its kernels attend. Unopened groups are dropped.
Shapes: H query heads, K KV heads, L tokens, G groups of g tokens, D width of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.ops import RuleSpans, Source, UniformRule, attend, attend_recall
from condense.ops.recall import (
    ArrayChoice,
    Choice,
    IndexChoice,
    Quota,
    RecallSources,
    block_width,
    build_index,
    choose_groups,
    rotation,
)
from condense.ops.tensors.codes import dequantise, quantise

_BLOCK = 512  # queries whose scores are held at a time


@dataclass(frozen=True)
class Grid:
    """How stored tokens are rounded: ``keys`` and ``values`` bits per number, steps and zeros in the tokens' dtype.

    turned: keys are turned by the index's rotation and have a step and a zero per token; else per channel of a group,
    as the library's store. values_turned: values too; they have a step and a zero per token in either case.
    """

    keys: int = 4
    values: int = 4
    turned: bool = True
    values_turned: bool = False

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of keys and values ``[1, K, G, g, D]``."""
        k = _turned_on_grid(k, self.keys) if self.turned else _on_grid(k, 3, self.keys)
        return k, _turned_on_grid(v, self.values) if self.values_turned else _on_grid(v, 4, self.values)

    def nbytes(self, width: int, group: int) -> tuple[float, float]:
        """Of a token's key, and of its value, per KV head."""
        of_key = 4.0 if self.turned else 4 * width / group
        return width * self.keys / 8 + of_key, width * self.values / 8 + 4


def _on_grid(x: Tensor, dim: int, bits: int) -> Tensor:
    codes, step, zero = quantise(x, dim, bits, x.dtype)
    return dequantise(codes, step, zero)


def _turned_on_grid(x: Tensor, bits: int) -> Tensor:
    wide, D = torch.promote_types(x.dtype, torch.float32), x.shape[4]
    turn = rotation(D, x.device, wide) / math.sqrt(block_width(D))
    return (_on_grid((x.to(wide) @ turn).to(x.dtype), 4, bits).to(wide) @ turn.mT).to(x.dtype)


@dataclass(frozen=True)
class Variant:
    """Open a share of the closed groups, all of them for 1.0: an ``attention(module, q, k, v, scale) -> out``.

    grid: of stored tokens; None keeps them as they are. every: aligned blocks of so many queries, which ``group`` is a
    multiple of, use what their first query chooses. before: what the last query of the block before chooses. look: the
    index chooses so many times the groups, and the store's own keys those of them that are opened.
    """

    share: float = 0.25
    group: int = 16
    window: int = 256
    grid: Grid | None = None
    every: int = 1
    before: bool = False
    look: int = 1

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        groups = self._groups(k), self._groups(v)
        if not groups[0].shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rounded = groups if self.grid is None else self.grid.rounded(*groups)
        store = Source(*(x.flatten(2, 3) for x in rounded))
        rule = self._rule()
        if self.share == 1:
            spans = RuleSpans(replace(rule, entries=self.group), 0, 0)
            return attend(q, [store, Source(k, v)], spans, scale=scale)[0]
        # nothing sees entries: the first token of each group stands in their place
        entries = Source(*(x[:, :, :, 0] for x in rounded))
        sources = RecallSources(entries, store, Source(k, v), RuleSpans(rule, 0, 0))
        choice: Choice = self._indexed(q, groups[0], scale)
        if self.look > 1:
            choice = ArrayChoice(self._looked(q, groups[0], store.k, scale))
        return attend_recall(q, sources, choice, scale=scale, unchosen="drop")[0]

    def opened(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """The groups that the index chooses, bool ``[1, K, L, G]``."""
        choice, parts = self._indexed(q, self._groups(k), scale), []
        for start in range(0, q.shape[2], _BLOCK):
            stop = min(q.shape[2], start + _BLOCK)
            parts.append(choice.at(start, stop, self._closed(start, stop, q.device), choice.index.steps.shape[2]))
        return torch.cat(parts, 2)

    def costs(self, length: int, width: int) -> dict[str, float]:
        """Shares of a dense cache of 16 bits: kept on the device, or, with the store in host memory, there with a slot
        for each open group (host_store), and read by a step.
        """
        G, dense, exact = (length - self.window) // self.group, 4.0 * length * width, 4.0 * self.window * width
        of_key, of_value = (2.0 * width, 2.0 * width) if self.grid is None else self.grid.nbytes(width, self.group)
        tokens = G * self.group
        index = 0.0 if self.share == 1 else tokens * (width / 8 + 2)
        opened = G if self.share == 1 else Quota.of_share(self.share).at(G)
        again = min(G, self.look * opened) * self.group * of_key if self.look > 1 else 0.0
        read = opened * self.group * (of_key + of_value) + exact
        return {
            "device": (index + tokens * (of_key + of_value) + exact) / dense,
            "host_store": (index + read) / dense,
            "read": (index / self.every + again + read) / dense,
        }

    def _groups(self, x: Tensor) -> Tensor:
        """Of tokens ``[1, K, L, D]`` the whole groups behind the window, ``[1, K, G, g, D]``."""
        G = max(0, x.shape[2] - self._behind) // self.group
        return x[:, :, : G * self.group].contiguous().unflatten(2, (G, self.group))

    @property
    def _behind(self) -> int:
        """The window. Where queries share a choice it is a token longer, so that groups close where a block begins: one
        that would close within a block stays readable in it, and all queries of a block choose from the same groups.
        """
        return self.window + (self.every > 1 or self.before)

    def _rule(self) -> UniformRule:
        return UniformRule(self.group, self._behind)

    def _closed(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Closed groups of queries ``[start, stop)``, int64 ``[1, 1, stop - start]``."""
        closed: Tensor = self._rule().closed(torch.arange(start + 1, stop + 1, device=device))
        return closed[None, None]

    def _quota(self, times: int = 1) -> Quota:
        return Quota.of_share(self.share * times)

    def _indexed(self, q: Tensor, k: Tensor, scale: float) -> IndexChoice:
        """The choice by the index of groups of keys ``[1, K, G, g, D]``."""
        n, L = self.every, q.shape[2]
        if n > 1 or self.before:
            asked = q[:, :, ::n]
            if self.before:
                asked = torch.cat([q[:, :, :1], q[:, :, n - 1 :: n]], 2)[:, :, : asked.shape[2]]
            q = asked.repeat_interleave(n, 2)[:, :, :L].contiguous()
        return IndexChoice(q, build_index(k), scale, self._quota(self.look))

    def _looked(self, q: Tensor, k: Tensor, stored: Tensor, scale: float) -> Tensor:
        """The groups with the best token by keys in the store ``[1, K, G * g, D]``, of those that the index chooses of
        groups of keys ``[1, K, G, g, D]``; bool ``[1, K, L, G]``.
        """
        (K, G), parts, choice = k.shape[1:3], [], self._indexed(q, k, scale)
        for start in range(0, q.shape[2], _BLOCK):
            stop = min(q.shape[2], start + _BLOCK)
            closed = self._closed(start, stop, q.device)
            num = min(G, int(closed.max()))
            first = choice.at(start, stop, closed, num)
            heads = q[:, :, start:stop].unflatten(1, (K, -1)).flatten(2, 3)
            wide = torch.promote_types(q.dtype, torch.float32)
            of_tokens = heads.to(wide) @ stored[:, :, : num * self.group].to(wide).mT
            scores = of_tokens.unflatten(3, (num, self.group)).amax(4).unflatten(2, (-1, stop - start)) * scale
            scores = scores.masked_fill(~first[:, :, None], -math.inf).flatten(1, 2)
            parts.append(F.pad(choose_groups(scores, closed, self._quota(), K), (0, G - num)))
        return torch.cat(parts, 2)


UNITED = (2, 4, 8, 16, 32, 64)


def united(variant: Variant, record: list[dict[str, float]]) -> Callable[..., Tensor]:
    """The variant's attention, which also appends, per layer, the share of the closed groups that any of n consecutive
    queries opens, for each n of `UNITED`: mean over KV heads and aligned blocks of the second half of the text.
    """

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        scale, L = q.shape[3] ** -0.5 if scale is None else scale, q.shape[2]
        begin = -(-L // (2 * UNITED[-1])) * UNITED[-1]
        chosen = variant.opened(q, k, scale)[0, :, begin : L // UNITED[-1] * UNITED[-1]]
        closed, shares = variant._closed(begin, begin + chosen.shape[1], q.device)[0, 0].clamp(min=1), {}
        for n in UNITED:
            any_opens = chosen.unflatten(1, (-1, n)).any(2).sum(-1)
            shares[str(n)] = float((any_opens / closed[n - 1 :: n]).mean())
        record.append(shares)
        return variant(module, q, k, v, scale)

    return attention
