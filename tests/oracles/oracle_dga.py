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
        return Group(members, group_weights(summary, self.k[members], self.scale))

    def _split_prompt(self):
        L, method = self.origin, self.method
        count = num_focal(method, L)
        if count == L:
            return list(range(L)), []
        if method.focal == "random":
            scores = lots(range(L), method.seed)
        else:
            scores = dict(enumerate(self.importance(L).tolist()))
        focal = sorted(sorted(range(L), key=lambda i: (-scores[i], i))[:count])
        return focal, [self._group(part, self.qbar[part[-1]]) for part in grouped(method, focal, L)]

    def importance(self, L):
        """The scores by which the tokens of a prompt of L tokens are ranked, ``[L]``."""
        at = torch.tensor(sampled(self.method, L), dtype=torch.int64)
        return importance(self.q[:, at].detach(), self.k[:L].detach(), at, self.scale)


def group_weights(summary, k, scale):
    """Weights of a group's tokens; summary ``[D]``, k ``[g, D]``."""
    return torch.stack([scale * summary @ key for key in k]).softmax(0)


def num_focal(method, L):
    """Focal tokens of a prompt of L tokens, enlarged until the others fill whole groups."""
    count = min(L, max(share(method.gamma, L), method.min_focal))
    while (L - count) % method.group_size:
        count += 1
    return count


def grouped(method, focal, L):
    """The tokens of a prompt that are not focal, in order, group by group."""
    chosen = set(focal)
    rest = [i for i in range(L) if i not in chosen]
    return [rest[j : j + method.group_size] for j in range(0, len(rest), method.group_size)]


def sampled(method, L):
    """Positions of the queries that rank a prompt's tokens: the newest, and some of the others at random."""
    recent = list(range(max(0, L - method.num_recent), L))
    drawn = lots(range(recent[0] if recent else L), method.seed)
    return sorted(sorted(drawn, key=lambda i: -drawn[i])[: method.num_random] + recent)


def importance(q, k, at, scale):
    """The mean attention that each token gets from the sampled queries that see it, summed over heads, ``[L]``.

    q ``[R, S, D]``: the queries at positions ``at`` ``[S]``; k ``[L, D]``. Plain operations in their dtype.
    """
    hidden = torch.arange(len(k), device=k.device) > at[:, None]
    total = k.new_zeros(len(k))
    for head in q:
        total += (head @ k.T * scale).masked_fill(hidden, -math.inf).softmax(-1).sum(0)
    return total / (~hidden).sum(0).clamp(min=1)


def share(gamma, count):
    """ceil(gamma * count), with gamma as the decimal that was written."""
    return math.ceil(Decimal(str(gamma)) * count)


def lots(places, seed, names=None):
    """The random score of each place, under its name (default: the place itself)."""
    drawn = scramble(torch.tensor(list(places), dtype=torch.int64), seed).tolist()
    return dict(zip(places if names is None else names, drawn, strict=True))


def row(method, q, k, v, scale, prompt):
    """One row and KV head: per query out ``[R, Dv]`` and lse ``[R]``; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    visible = Row(method, q, k, scale, len(k) if prompt is None else prompt)
    outs, lses = [], []
    for t in range(len(k)):
        exact, groups = visible.sees(t)
        bias = [group_bias(method, weights)[None] for _, weights in groups]
        keys, values = ([x[i] for i in exact] + [weights @ x[members] for members, weights in groups] for x in (k, v))
        logits = scale * q[:, t] @ torch.stack(keys).T + torch.cat([k.new_zeros(len(exact)), *bias])
        outs.append(logits.softmax(-1) @ torch.stack(values))
        lses.append(logits.logsumexp(-1))
    return outs, lses


def group_bias(method, weights):
    """The bias of a group's entry, from the weights of its tokens; a matched one is their entropy."""
    if method.rep_bias == "matched":
        return -(weights * weights.log()).sum()
    return weights.new_tensor(math.log(method.group_size) if method.rep_bias == "log_size" else 0.0)


def seen_and_pooled(method, qbar, k, v, scale):
    """For `eager.eager_attention`, with focal tokens chosen at random: the keys that each query sees, and all groups.

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
