"""DGA by definition, for one query after another: the sets of tokens that it sees, each exact or inside a group.

Only the random choices use the library's code (`condense.ops.tensors.sampling`, which has its own tests).

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

    def _sees_in_prompt(self, t):
        exact = [i for i in self.focal if i <= t]
        complete = [group for group in self.groups if max(group.members) <= t]
        for group in self.groups:
            if max(group.members) > t:
                near = [i for i in group.members if i <= t]
                exact += near if self.method.complementary else [i for i in near if i == t]
        return exact, complete

    def chunk(self, number):
        """Focal tokens and the group of a chunk of the streaming rule."""
        if number not in self.chunks:
            c, g, w = self.chunk_size, self.method.group_size, self.method.window
            start = self.origin + number * c
            tokens = list(range(start, start + c))
            last = [tokens[-1]] if self.method.summary == "last" else range(start + w, start + c + w)
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
        if method.focal == "random":
            scores = lots(range(L), method.seed)
        else:
            scores = dict(enumerate(self.importance(L).tolist()))
        focal = sorted(sorted(range(L), key=lambda i: (-scores[i], i))[:count])
        rest, g = [i for i in range(L) if i not in focal], method.group_size
        parts = [rest[j : j + g] for j in range(0, len(rest), g)]
        return focal, [self._group(part, self.qbar[part[-1]]) for part in parts]

    def importance(self, L):
        """The scores by which the tokens of a prompt of L tokens are ranked, ``[L]``: the mean attention that each gets
        from the sampled queries that see it, the newest and some of the others at random, summed over heads.
        """
        recent = list(range(max(0, L - self.method.num_recent), L))
        drawn = lots(range(recent[0] if recent else L), self.method.seed)
        others = sorted(drawn, key=lambda i: -drawn[i])[: self.method.num_random]
        at, k = torch.tensor(sorted(others + recent), dtype=torch.int64), self.k[:L].detach()
        hidden, total = torch.arange(L) > at[:, None], k.new_zeros(L)
        for head in self.q[:, at].detach():
            total += (head @ k.T * self.scale).masked_fill(hidden, -math.inf).softmax(-1).sum(0)
        return total / (~hidden).sum(0).clamp(min=1)


def share(gamma, count):
    """ceil(gamma * count), with gamma as the decimal that was written."""
    return math.ceil(Decimal(str(gamma)) * count)


def lots(places, seed, names=None):
    """The random score of each place, under its name (default: the place itself)."""
    drawn = scramble(torch.tensor(list(places), dtype=torch.int64), seed).tolist()
    return dict(zip(places if names is None else names, drawn, strict=True))


def seen_keys(method, q, k, v, scale, prompt):
    """For each query of one row and KV head a list of what it sees: key ``[D]``, value ``[Dv]`` and bias. q
    ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``.
    """
    row = Row(method, q, k, scale, len(k) if prompt is None else prompt)
    for exact, groups in map(row.sees, range(len(k))):
        tokens = [(k[i], v[i], k.new_zeros(())) for i in exact]
        yield tokens + [(w @ k[members], w @ v[members], group_bias(method, w)) for members, w in groups]


def group_bias(method, weights):
    """The bias of a group's entry, from the weights of its tokens; a matched one is their entropy."""
    if method.rep_bias == "matched":
        return -(weights * weights.log()).sum()
    return weights.new_tensor(math.log(method.group_size) if method.rep_bias == "log_size" else 0.0)


def seen_and_pooled(method, qbar, k, v, scale):
    """For `eager.eager_attention`, with focal tokens chosen at random: the keys that each query sees, and all groups.

    Per query the numbers of its groups and its exact tokens; the keys and values of each row, head and group. qbar and
    k ``[B, K, L, D]``, v ``[B, K, L, Dv]``.
    """
    assert method.focal == "random"
    (B, K, L, _), pooled = k.shape, []
    for b in range(B):
        rows = [Row(method, qbar[b, h : h + 1], k[b, h], scale, L) for h in range(K)]
        for h, row in enumerate(rows):
            pooled += [(w @ k[b, h, members], w @ v[b, h, members]) for members, w in row.sees(L - 1)[1]]
        # a query's groups are the first ones: they stand in the order in which they become visible
        seen = [(range(len(near)), exact) for exact, near in (rows[0].sees(t) for t in range(L))]
    return seen, pooled
