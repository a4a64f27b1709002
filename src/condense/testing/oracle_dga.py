"""DGA by definition, for one query after another: the sets of tokens that it sees, each exact or inside a group.

Only the random choices use the library's code (`condense.ops.tensors.sampling`, which has its own tests).

Shapes: L tokens of one row and KV head, R query heads that share it, D and Dv widths.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.tensors.sampling import scramble


class Group(NamedTuple):
    """Members by position and their weights, which sum to 1."""

    members: list[int]
    weights: Tensor


class Row:
    """One row and KV head. q ``[R, L, D]``, k ``[L, D]``; ``prompt`` tokens came at once, before the others."""

    def __init__(self, method: Any, q: Tensor, k: Tensor, scale: float, prompt: int) -> None:
        self.method, self.q, self.k, self.scale = method, q, k, scale
        self.qbar = q.sum(0) / len(q)
        self.weight_scale = scale if method.weight_scale is None else method.weight_scale
        self.origin = prompt if method.selection == "prompt" else 0
        self.focal, self.groups = self._split_prompt()
        self.chunk_size = method.group_size + share(method.gamma, method.group_size)
        self.chunks: dict[int, tuple[list[int], Group]] = {}

    def sees(self, t: int) -> tuple[list[int], list[Group]]:
        """Exact tokens and groups that the query at position t sees."""
        if t < self.origin:
            return self._sees_in_prompt(t)
        exact, groups = list(self.focal), list(self.groups)
        number = 0
        while self.origin + (number + 1) * self.chunk_size + self.method.window - 1 <= t:
            focal, group = self.chunk(number)
            exact += focal
            groups.append(group)
            number += 1
        return exact + list(range(self.origin + number * self.chunk_size, t + 1)), groups

    def _sees_in_prompt(self, t: int) -> tuple[list[int], list[Group]]:
        exact = [i for i in self.focal if i <= t]
        complete = [group for group in self.groups if max(group.members) <= t]
        for group in self.groups:
            if max(group.members) > t:
                near = [i for i in group.members if i <= t]
                exact += near if self.method.complementary else [i for i in near if i == t]
        return exact, complete

    def chunk(self, number: int) -> tuple[list[int], Group]:
        """Focal tokens and the group of a chunk of the streaming rule."""
        if number not in self.chunks:
            c, g, w = self.chunk_size, self.method.group_size, self.method.window
            start = self.origin + number * c
            tokens = list(range(start, start + c))
            last = [tokens[-1]] if self.method.summary == "last" else range(start + w, start + c + w)
            summary = torch.stack([self.qbar[i] for i in last]).sum(0) / len(last)
            scores: dict[int, Any] = {i: self.weight_scale * float((summary @ self.k[i]).detach()) for i in tokens}
            if self.method.focal == "random":
                scores = lots(range(number * c, number * c + c), self.method.seed, tokens)
            best = sorted(tokens, key=lambda i: (-scores[i], i))[: c - g]
            self.chunks[number] = sorted(best), self._group([i for i in tokens if i not in best], summary)
        return self.chunks[number]

    def _group(self, members: list[int], summary: Tensor) -> Group:
        scores = torch.stack([self.weight_scale * summary @ self.k[i] for i in members])
        return Group(members, scores.softmax(0))

    def _split_prompt(self) -> tuple[list[int], list[Group]]:
        L, method = self.origin, self.method
        count = min(L, max(share(method.gamma, L), method.min_focal))
        while (L - count) % method.group_size:
            count += 1
        if count == L:
            return list(range(L)), []
        random = method.focal == "random"
        scores = lots(range(L), method.seed) if random else self._importance(L)
        focal = sorted(sorted(range(L), key=lambda i: (-scores[i], i))[:count])
        rest = [i for i in range(L) if i not in focal]
        members = [rest[j : j + method.group_size] for j in range(0, len(rest), method.group_size)]
        return focal, [self._group(part, self.qbar[part[-1]]) for part in members]

    def _importance(self, L: int) -> dict[int, float]:
        recent = list(range(max(0, L - self.method.num_recent), L))
        drawn = lots(range(recent[0]), self.method.seed)
        sampled = sorted(drawn, key=lambda i: -drawn[i])[: self.method.num_random] + recent
        total = dict.fromkeys(range(L), 0.0)
        for head in self.q:
            for j in sampled:
                weights = torch.stack([self.scale * head[j] @ self.k[i] for i in range(j + 1)]).softmax(0)
                for i in range(j + 1):
                    total[i] += float(weights[i].detach())
        return {i: total[i] / sum(j >= i for j in sampled) for i in total}


def share(gamma: float, count: int) -> int:
    """ceil(gamma * count), with gamma as the decimal that was written."""
    return math.ceil(Decimal(str(gamma)) * count)


def lots(places: range, seed: int, names: Any = None) -> dict[int, Any]:
    """The random score of each place, under its name (default: the place itself)."""
    drawn = [int(scramble(torch.tensor(place), seed)) for place in places]
    return dict(zip(places if names is None else names, drawn, strict=True))


def row(
    method: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    """One row and KV head: per query out ``[R, Dv]`` and lse ``[R]``; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    plan = Row(method, q, k, scale, len(k) if prompt is None else prompt)
    bias = math.log(method.group_size) if method.rep_bias == "log_size" else 0.0
    outs, lses = [], []
    for t in range(len(k)):
        exact, groups = plan.sees(t)
        keys, values = ([x[i] for i in exact] + [weights @ x[members] for members, weights in groups] for x in (k, v))
        logits = scale * q[:, t] @ torch.stack(keys).T + k.new_tensor([0.0] * len(exact) + [bias] * len(groups))
        outs.append(logits.softmax(-1) @ torch.stack(values))
        lses.append(logits.logsumexp(-1))
    return outs, lses


def seen_and_pooled(
    method: Any, qbar: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[list[tuple[range, list[int]]], list[list[list[tuple[Tensor, Tensor]]]]]:
    """For `oracle.eager`, with focal tokens chosen at random: the keys that each query sees, and all groups.

    Per query the numbers of its groups and its exact tokens; per row and head the groups' keys and values. qbar and k
    ``[B, K, L, D]``, v ``[B, K, L, Dv]``.
    """
    assert method.focal == "random"
    (B, K, L, _), pooled = k.shape, []
    for b in range(B):
        rows = [Row(method, qbar[b, h : h + 1], k[b, h], scale, L) for h in range(K)]
        groups = [row.sees(L - 1)[1] for row in rows]
        pooled.append([[(w @ k[b, h, members], w @ v[b, h, members]) for members, w in groups[h]] for h in range(K)])
        # a query's groups are the first ones: they stand in the order in which they become visible
        seen = [(range(len(near)), exact) for exact, near in (rows[0].sees(t) for t in range(L))]
    return seen, pooled


def chunk_entries(
    method: Any, qbar: Tensor, k: Tensor, v: Tensor, scale: float, chunks: range
) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Per row and head key and value of each entry of these chunks of the streaming rule: focal tokens, then the group.

    qbar and k ``[B, K, L, D]``, v ``[B, K, L, Dv]``.
    """
    pooled = []
    for b in range(k.shape[0]):
        heads = []
        for h in range(k.shape[1]):
            streaming, made = Row(method, qbar[b, h : h + 1], k[b, h], scale, 0), []
            for number in chunks:
                focal, (members, w) = streaming.chunk(number)
                made += [(k[b, h, i], v[b, h, i]) for i in focal] + [(w @ k[b, h, members], w @ v[b, h, members])]
            heads.append(made)
        pooled.append(heads)
    return pooled
