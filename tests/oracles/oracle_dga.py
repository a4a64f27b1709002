"""DGA by definition, for one query after another: the sets of tokens that it sees, each exact or inside a group. Random
choices alone use the library's code (`condense.ops.tensors.sampling`, which has its own tests).

Shapes: L tokens of one row and KV head, R query heads that share it, D and Dv widths.
"""

import math
from decimal import Decimal
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.tensors.sampling import scramble


class Group(NamedTuple):
    """Members by position and their weights, which sum to 1."""

    members: list[int]
    weights: Tensor


class Row:
    """Keys seen by each query of one row and KV head. q ``[R, L, D]``, k ``[L, D]``; prompt: tokens read at once."""

    def __init__(self, method, q, k, scale, prompt):
        self.method, self.q, self.k, self.scale = method, q, k, scale
        self.qbar = q.sum(0) / len(q)
        self.origin = prompt if method.selection == "prompt" else 0
        self.focal, self.groups = self._split_prompt()
        self.chunk_size = method.group_size + share(method.gamma, method.group_size)
        self.chunks: dict[int, tuple[list[int], Group]] = {}

    def sees(self, t):
        if t < self.origin:
            return self._sees_in_prompt(t)
        exact, groups = list(self.focal), list(self.groups)
        closed = max(0, t + 1 - self.origin - self.method.window) // self.chunk_size
        for focal, group in map(self.chunk, range(closed)):
            exact += focal
            groups.append(group)
        return exact + list(range(self.origin + closed * self.chunk_size, t + 1)), groups

    def _sees_in_prompt(self, t):
        exact = [i for i in self.focal if i <= t]
        complete = [group for group in self.groups if max(group.members) <= t]
        for group in self.groups:
            if max(group.members) > t:
                near = [i for i in group.members if i <= t]
                exact += near if self.method.complementary else [i for i in near if i == t]
        return exact, complete

    def chunk(self, number):
        if number not in self.chunks:
            c, g, w = self.chunk_size, self.method.group_size, self.method.window
            start = self.origin + number * c
            tokens = range(start, start + c)
            last = tokens[-1:] if self.method.summary == "last" else range(start + w, start + c + w)
            summary = torch.stack([self.qbar[i] for i in last]).sum(0) / len(last)
            scores = {i: self.scale * float((summary @ self.k[i]).detach()) for i in tokens}
            if self.method.focal == "random":
                scores = lots(range(number * c, number * c + c), self.method.seed, tokens)
            best = sorted(tokens, key=lambda i: (-scores[i], i))[: c - g]
            self.chunks[number] = sorted(best), self._group([i for i in tokens if i not in best], summary)
        return self.chunks[number]

    def _group(self, members, summary):
        return Group(members, torch.stack([self.scale * summary @ self.k[i] for i in members]).softmax(0))

    def _split_prompt(self):
        L, method = self.origin, self.method
        count = min(L, max(share(method.gamma, L), method.min_focal))
        while (L - count) % method.group_size:  # the others fill whole groups
            count += 1
        if count == L:
            return list(range(L)), []
        scores = lots(range(L), method.seed) if method.focal == "random" else self.importance(L).tolist()
        focal = sorted(sorted(range(L), key=lambda i: (-scores[i], i))[:count])
        rest, g = [i for i in range(L) if i not in focal], method.group_size
        parts = [rest[j : j + g] for j in range(0, len(rest), g)]
        return focal, [self._group(part, self.qbar[part[-1]]) for part in parts]

    def importance(self, L):
        """Mean attention ``[L]`` that a prompt's tokens get from sampled queries that see them, all heads together."""
        recent = list(range(max(0, L - self.method.num_recent), L))
        drawn = lots(range(recent[0] if recent else L), self.method.seed)
        others = sorted(drawn, key=lambda i: -drawn[i])[: self.method.num_random]
        at, k = torch.tensor(sorted(others + recent), dtype=torch.int64), self.k[:L].detach()
        hidden, total = torch.arange(L) > at[:, None], k.new_zeros(L)
        for head in self.q[:, at].detach():
            total += (head @ k.T * self.scale).masked_fill(hidden, -math.inf).softmax(-1).sum(0)
        return total / (~hidden).sum(0).clamp(min=1)


def share(gamma, count):
    return math.ceil(Decimal(str(gamma)) * count)


def lots(places, seed, names=None):
    """The random score of each place, under its name (default: the place itself)."""
    drawn = scramble(torch.tensor(list(places), dtype=torch.int64), seed).tolist()
    return dict(zip(places if names is None else names, drawn, strict=True))


def seen_keys(method, q, k, v, scale, prompt):
    """As `oracle.attention` wants it of one row and KV head: q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    row = Row(method, q, k, scale, len(k) if prompt is None else prompt)
    for exact, groups in map(row.sees, range(len(k))):
        tokens = [(k[i], v[i], k.new_zeros(())) for i in exact]
        yield tokens + [(w @ k[members], w @ v[members], group_bias(method, w)) for members, w in groups]


def group_bias(method, weights):
    """The bias of a group's entry, from the weights of its tokens; a matched one is their entropy."""
    if method.rep_bias == "matched":
        return -(weights * weights.log()).sum()
    return weights.new_tensor(math.log(method.group_size) if method.rep_bias == "log_size" else 0.0)
