"""Recall by definition: loops over queries, groups and numbers; and the choice of groups over whole tensors.

The loops take one row and KV head and score the keys themselves, as an index of 16 bits of float64 keys does. `choose`
decodes any index, in float64, and also says which queries' choice is clear: where two groups' scores differ by less
than the error of scores computed in float32, either may be opened.

Shapes: B rows, H query heads, K KV heads, R = H / K, L or S queries, G groups of g tokens, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Key(NamedTuple):
    """Something that a query sees: its vectors, what is added to its score, and the positions that it stands for."""

    k: Tensor
    v: Tensor
    bias: Tensor | float
    tokens: list[int]


def score(query: Tensor, keys: Tensor, kind: str, size: int, scale: float) -> float:
    """The index score of a group of keys ``[g, D]`` in blocks of ``size`` tokens for one query ``[D]``."""
    blocks = [keys[i : i + size] for i in range(0, len(keys), size)]
    if kind == "sub_means":
        return math.log(sum(math.exp(scale * float(query @ block.mean(0))) for block in blocks))
    bounds = [[(float(x), float(c.min()), float(c.max())) for x, c in zip(query, b.T, strict=True)] for b in blocks]
    return max(scale * sum(max(x * low, x * high) for x, low, high in block) for block in bounds)


def opened(method: Any, queries: Tensor, k: Tensor, closed: int, scale: float) -> list[int]:
    """Groups that the queries ``[R, D]`` of one KV head open together, of the first ``closed``; k ``[L, D]``."""
    if closed == 0:
        return []
    settings, shares = method.index_settings, []
    groups = k[: closed * settings.group_size].unflatten(0, (closed, -1))
    for query in queries:
        scores = [score(query, keys, settings.kind, settings.size, scale) for keys in groups]
        total = math.log(sum(math.exp(s) for s in scores))
        shares.append([s - total for s in scores])
    best = [max(of_heads) for of_heads in zip(*shares, strict=True)]
    return sorted(sorted(range(closed), key=lambda j: (-best[j], j))[: num_opened(method, closed)])


def num_opened(method: Any, closed: int) -> int:
    """How many of ``closed`` groups a query opens."""
    r = method.num_recall
    return min(r, closed) if isinstance(r, int) else math.ceil(Decimal(str(r)) * closed)


# key, value and bias of a group's entry
Entry = Callable[[int], tuple[Tensor, Tensor, Tensor]]


def seen(method: Any, q: Tensor, k: Tensor, v: Tensor, t: int, scale: float, entry: Entry) -> list[Key]:
    """What the query at position t sees; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
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


def row(method: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, entry: Entry) -> tuple[list[Tensor], list[Tensor]]:
    """One row and KV head: per query out ``[R, Dv]`` and lse ``[R]``; q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``."""
    outs, lses = [], []
    for t in range(len(k)):
        keys = seen(method, q, k, v, t, scale, entry)
        bias = torch.stack([torch.as_tensor(key.bias, dtype=k.dtype) for key in keys])
        scores = scale * q[:, t] @ torch.stack([key.k for key in keys]).T + bias
        outs.append(scores.softmax(-1) @ torch.stack([key.v for key in keys]))
        lses.append(scores.logsumexp(-1))
    return outs, lses


def index_rows(method: Any, codes: Tensor, grid: Tensor, D: int) -> Tensor:
    """The rows of an index (`condense.ops.recall.GroupIndex`) in float64, ``[B, K, G, F, D]``."""
    settings = method.index_settings
    codes = codes.unflatten(3, (settings.num_rows, -1))
    if settings.bits == 16:
        return codes.double()
    if settings.bits == 4:
        codes = torch.cat([codes % 16, codes // 16], dim=-1)
    step, zero = grid.double()[..., None, None].unbind(3)
    assert codes.shape[-1] == D
    return zero + step * codes.double()


def choose(
    method: Any, q: Tensor, codes: Tensor, grid: Tensor, closed: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The groups that queries open by an index, bool ``[B, K, S, G]``, and whose choice is clear, bool ``[B, K, S]``.

    q ``[B, H, S, D]``; codes and grid of G groups; closed int64 ``[B|1, 1, S]``: groups that each query may open.
    """
    K, G = codes.shape[1], codes.shape[2]
    wanted = torch.tensor([num_opened(method, n) for n in range(int(closed.max()) + 1)], device=q.device)[closed]
    settings, rows = method.index_settings, index_rows(method, codes, grid, q.shape[3])
    is_closed = torch.arange(G, device=q.device) < closed[..., None]
    best = q.new_full((q.shape[0], K, q.shape[2], G), -math.inf, dtype=torch.float64)
    largest = 0.0
    for query in q.double().unflatten(1, (K, -1)).unbind(2):
        if settings.kind == "bounds":
            low, high = rows.unflatten(3, (2, -1)).unbind(3)
            scores = scale * (_products(query.clamp(min=0), high) + _products(query.clamp(max=0), low)).amax(-1)
        else:
            scores = (scale * _products(query, rows)).logsumexp(-1)
        scores = scores.masked_fill(~is_closed, -math.inf)
        largest = max(largest, float(scores.masked_fill(~is_closed, 0.0).abs().max()))
        best = torch.maximum(best, scores - scores.logsumexp(-1, keepdim=True))
    best = best.masked_fill(~is_closed, -math.inf)
    values, order = best.sort(dim=-1, descending=True, stable=True)  # ties to the lower group
    place = torch.arange(G, device=q.device).expand_as(order)
    chosen = torch.zeros_like(is_closed.expand_as(best)).scatter_(3, order, place < wanted[..., None]) & is_closed
    if G < 2:
        return chosen, torch.ones_like(chosen[..., 0])
    # sums of D products in float32
    error = 64 * torch.finfo(torch.float32).eps * largest
    at = wanted.clamp(1, G - 1)[..., None].expand(*values.shape[:3], 1)
    gap = (values.gather(3, at - 1) - values.gather(3, at))[..., 0]
    return chosen, (gap > error) | (wanted == 0) | (wanted >= closed)


def _products(query: Tensor, rows: Tensor) -> Tensor:
    """query ``[B, K, S, D]`` and rows ``[B, K, G, m, D]`` as ``[B, K, S, G, m]``."""
    return (query @ rows.flatten(2, 3).mT).unflatten(3, rows.shape[2:4])


def store(method: Any, kept: Sequence[Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The store's keys ``[B, K, G * g, D]`` and values ``[B, K, G * g, Dv]``, in the widths and dtype of k and v.

    kept: the tensors that follow codes and grid of the index in a context's ``extra``.
    """
    (tokens,) = kept
    return method.store_format.unpack(tokens, k.shape[3], v.shape[3], k.dtype)


def _is_stored(method: Any, got: Tensor, x: Tensor, dim: int) -> bool:
    """True if stored numbers are x; with fewer bits, within half a step (rounded up twice) and a rounding of x."""
    if method.store_bits == 16:
        return torch.equal(got, x)
    groups, eps = x.double().unflatten(2, (-1, method.group_size)), torch.finfo(x.dtype).eps
    spread = groups.amax(dim, keepdim=True) - groups.amin(dim, keepdim=True)
    step = spread / (2**method.store_bits - 1) * (1 + eps) ** 2
    error = (got.double().unflatten(2, (-1, method.group_size)) - groups).abs()
    return bool((error <= step * (0.5 + 2**-15) + eps * groups.abs().amax(dim, keepdim=True)).all())


def holds(method: Any, k: Tensor, v: Tensor, kept: tuple[Tensor, ...]) -> bool:
    """True if index and store hold the right numbers of the closed groups of k and v, which are whole rows.

    kept: codes and grid of the index, then the store, as in `condense.methods.Context.extra`. The store must hold the
    tokens themselves or, with fewer bits, numbers near them. Bounds must not lie inside the range of their keys. Bounds
    and means may be off by one step of the index' grid; with 16 bits, by a unit in the last place.
    """
    codes, grid, *tokens = kept
    stored = store(method, tokens, k, v)
    settings, L = method.index_settings, stored[0].shape[2]
    if not all(_is_stored(method, got, x[:, :, :L], dim) for got, x, dim in zip(stored, (k, v), (3, 4), strict=True)):
        return False
    rows = index_rows(method, codes, grid, k.shape[3])
    blocks = k[:, :, :L].double().unflatten(2, (-1, settings.num_blocks, settings.size))
    step = torch.finfo(k.dtype).eps * blocks.abs().amax() if settings.bits == 16 else grid[..., :1, None].double()
    slack = step * (1 + 2**-10)
    if settings.kind == "sub_means":
        return bool(((rows - blocks.mean(4)).abs() <= slack).all())
    below, above = (
        blocks.amin(4) - rows[..., : settings.num_blocks, :],
        rows[..., settings.num_blocks :, :] - blocks.amax(4),
    )
    return all(bool(((x >= 0) & (x <= slack)).all()) for x in (below, above))
