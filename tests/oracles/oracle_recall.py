"""Recall by definition: loops over queries, groups and numbers.

They take one row and KV head and score the keys themselves, as an index of 16 bits of float64 keys does.

Shapes: R query heads of a KV head, L queries, groups of g tokens, D and Dv widths.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

import torch
from torch import Tensor


class Key(NamedTuple):
    """Something that a query sees: its vectors, what is added to its score, and the positions that it stands for."""

    k: Tensor
    v: Tensor
    bias: Tensor | float
    tokens: list[int]


def score(query, keys, size, scale):
    """The index score of a group of keys ``[g, D]`` in blocks of ``size`` tokens for one query ``[D]``."""
    blocks = [keys[i : i + size] for i in range(0, len(keys), size)]
    bounds = [[(float(x), float(c.min()), float(c.max())) for x, c in zip(query, b.T, strict=True)] for b in blocks]
    return max(scale * sum(max(x * low, x * high) for x, low, high in block) for block in bounds)


def opened(method, queries, k, closed, scale):
    """Groups that the queries ``[R, D]`` of one KV head open together, of the first ``closed``; k ``[L, D]``."""
    if closed == 0:
        return []
    settings, shares = method.index_settings, []
    groups = k[: closed * settings.group_size].unflatten(0, (closed, -1))
    for query in queries:
        scores = [score(query, keys, settings.size, scale) for keys in groups]
        total = math.log(sum(math.exp(s) for s in scores))
        shares.append([s - total for s in scores])
    best = [max(of_heads) for of_heads in zip(*shares, strict=True)]
    return sorted(sorted(range(closed), key=lambda j: (-best[j], j))[: num_opened(method, closed)])


def num_opened(method, closed):
    """Number of groups that a query opens, of ``closed``."""
    r = method.num_recall
    return min(r, closed) if isinstance(r, int) else math.ceil(Decimal(str(r)) * closed)


# key, value and bias of a group's entry
Entry = Callable[[int], tuple[Tensor, Tensor, Tensor]]


def seen(method, q, k, v, t, scale, entry):
    """The keys that the query at position t sees; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    g = method.group_size
    closed = max(0, t + 1 - method.window) // g
    chosen = opened(method, q[:, t].detach(), k.detach(), closed, scale)
    keys = []
    for j in range(closed):
        tokens = list(range(j * g, (j + 1) * g))
        if j in chosen:
            keys += [Key(k[i], v[i], 0.0, [i]) for i in tokens]
        elif method.unchosen == "pool":
            keys.append(Key(*entry(j), tokens))
    return keys + [Key(k[i], v[i], 0.0, [i]) for i in range(closed * g, t + 1)]


def row(method, q, k, v, scale, entry):
    """One row and KV head: per query out ``[R, Dv]`` and lse ``[R]``; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    outs, lses = [], []
    for t in range(len(k)):
        keys = seen(method, q, k, v, t, scale, entry)
        bias = torch.stack([torch.as_tensor(key.bias, dtype=k.dtype) for key in keys])
        scores = scale * q[:, t] @ torch.stack([key.k for key in keys]).T + bias
        outs.append(scores.softmax(-1) @ torch.stack([key.v for key in keys]))
        lses.append(scores.logsumexp(-1))
    return outs, lses
