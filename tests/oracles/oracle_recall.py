"""Recall by definition: loops over queries, groups and numbers of one row and KV head, with keys in float64, in which a
token's step in the index is not rounded.

Shapes: R query heads of a KV head, L queries, groups of g tokens, D and Dv widths.
"""

import functools
import math
import operator
import random
from decimal import Decimal

import torch


@functools.cache
def block(width):
    """Columns that the rotation mixes: as many as the largest power of two, up to 128, that divides the width."""
    return max(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if width % n == 0)


@functools.cache
def rotation(width):
    """The rotation, number by number: a sign per row, times 1 or -1 by the bits that row and column share."""
    drawn, size = random.Random(0), block(width)
    signs = [1 if drawn.random() < 0.5 else -1 for _ in range(width)]

    def number(i, j):
        shared = (i % size & j % size).bit_count()
        return signs[i] * (-1) ** shared if i // size == j // size else 0

    return torch.tensor([[number(i, j) for j in range(width)] for i in range(width)], dtype=torch.float64)


def centre(rotated):
    """The centre of rotated keys, a list of numbers per key: their mean, each number one of 16 evenly around 0."""
    mean = [sum(column) / len(rotated) for column in zip(*rotated, strict=True)]
    digits, power = math.frexp(max(map(abs, mean)) / 15)
    unit = math.ldexp(math.ceil(16 * digits) / 16, power)
    return [unit * (2 * min(15, math.floor(x / (2 * unit) + 8)) - 15) if unit else 0.0 for x in mean]


def rounded(query):
    """The rotated query ``[D]`` in whole numbers, and what 1 of these stands for."""
    rotated = (query.double() @ rotation(len(query))).tolist()
    unit = max(map(abs, rotated)) / 127
    return [round(x / unit) for x in rotated], unit / block(len(query))


def score(query, keys, scale):
    """The largest estimated score of keys ``[g, D]`` for one query ``[D]``, and the score of their centre."""
    whole, unit = rounded(query)
    keys = (keys.double() @ rotation(len(query))).tolist()
    middle = centre(keys)
    estimates = [middle]
    for key in keys:
        rest = [x - y for x, y in zip(key, middle, strict=True)]
        step = sum(x * x for x in rest) / sum(map(abs, rest)) if any(rest) else 0.0
        estimates.append([y + (step if x >= 0 else -step) for x, y in zip(rest, middle, strict=True)])
    of_centre, *of_tokens = (scale * unit * sum(map(operator.mul, whole, numbers)) for numbers in estimates)
    return max(of_tokens), of_centre


def opened(method, queries, k, closed, scale):
    """Groups that the queries ``[R, D]`` of one KV head open together, of the first ``closed``; k ``[L, D]``."""
    if closed == 0:
        return []
    groups, shares = k[: closed * method.group_size].unflatten(0, (closed, -1)), []
    for query in queries:
        scores = [score(query, keys, scale)[0] for keys in groups]
        total = math.log(sum(math.exp(s) for s in scores))
        shares.append([s - total for s in scores])
    best, r = [max(of_heads) for of_heads in zip(*shares, strict=True)], method.num_recall
    count = r if isinstance(r, int) else max(method.min_recall, math.ceil(Decimal(str(r)) * closed))
    return sorted(sorted(range(closed), key=lambda j: (-best[j], j))[:count])


def rest(method, queries, k, v, t, groups, scale):
    """Key ``[D]``, value ``[Dv]`` and bias ``[R]`` of the one token that stands for some groups at position t."""
    g, keys = method.group_size, k.detach()
    weights = [
        sum(g * math.exp(score(query, keys[j * g : (j + 1) * g], scale)[1]) for j in groups)
        for query in queries.detach()
    ]
    whole = (t + 1) // g * g
    return torch.zeros_like(k[0]), v[:whole].sum(0) / whole, k.new_tensor(weights).log()


def seen_keys(method, q, k, v, scale, prompt):
    return (seen(method, q, k, v, t, scale) for t in range(len(k)))


def seen(method, q, k, v, t, scale):
    """What the query at position t sees: key, value and bias of each. q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    g, tokens = method.group_size, [(*pair, k.new_zeros(())) for pair in zip(k, v, strict=True)]
    closed = max(0, t + 1 - method.window) // g
    chosen = opened(method, q[:, t].detach(), k.detach(), closed, scale)
    keys, others = [], [j for j in range(closed) if j not in chosen]
    for j in chosen:
        keys += tokens[j * g : (j + 1) * g]
    if others and method.unchosen == "mean":
        keys.append(rest(method, q[:, t], k, v, t, others, scale))
    return keys + tokens[closed * g : t + 1]
