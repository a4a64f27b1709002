"""The definition of attention over pages: token by token, one request after another, made for float64 on the CPU.

Shapes: H query heads, K KV heads, R = H / K, D and Dv widths, g tokens per group, S queries in a summary query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.reference.attend import attend
from condense.ops.reference.pool import group_scores, pool
from condense.ops.spans import ArraySpans, Source, Span
from condense.ops.step.pages import NewTokens, PagedState, Pages
from condense.ops.step.settings import StepSettings


def read_paged(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, new: NewTokens, settings: StepSettings, *, scale: float
) -> Tensor:
    """See `condense.ops.paged.read_paged`. One token at a time, in three rounds over all requests."""
    tokens = [
        (i, row, seen - (new.starts[row + 1] - i))
        for row, seen in enumerate(new.seen)
        for i in range(new.starts[row], new.starts[row + 1])
    ]
    for i, row, t in tokens:
        _slot(state.window, row, t)[:] = torch.cat([k[i], v[i]], -1)
    for i, row, t in tokens:
        _pool(_mean_query(q[i], k.shape[1]), row, t, state, settings, scale)
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    for i, row, t in tokens:
        out[i] = _attend(q[i], row, t, state, settings, scale)
    return out


def _pool(mean: Tensor, row: int, t: int, state: PagedState, settings: StepSettings, scale: float) -> None:
    """Store the mean query ``[K, D]`` of position t, and make the entry of the group that is due at t, if one is."""
    rule, delay, D = settings.rule, settings.summary_delay, mean.shape[1]
    if state.ring is not None:
        _ring_slot(state.ring, row, t, D)[:] = mean
    group = rule.pooled(t, delay)
    if rule.pooled(t + 1, delay) > group:
        tokens = torch.stack([_slot(state.window, row, group * rule.chunk + i) for i in range(rule.chunk)], dim=1)
        entry = _entry(tokens, _summary(mean, row, t, state.ring, settings), D, settings, scale)
        _slot(state.entries, row, group + delay // rule.chunk)[:] = entry


def _attend(q: Tensor, row: int, t: int, state: PagedState, settings: StepSettings, scale: float) -> Tensor:
    """Attention ``[H, Dv]`` of the query ``[H, D]`` at position t."""
    rule, shift = settings.rule, settings.summary_delay // settings.rule.chunk
    closed = rule.closed(t + 1)
    entries = [_slot(state.entries, row, j + shift) for j in range(rule.visible_entries(closed))]
    window = [_slot(state.window, row, p) for p in range(closed * rule.chunk, t + 1)]
    like, D = state.window.cache[0, :, 0], q.shape[1]
    bias = settings.bias or None
    sources = [Source(*_keys_and_values(x, like, D), b) for x, b in ((entries, bias), (window, None))]
    sizes = [torch.full((1, 1, 1), len(x), device=q.device) for x in (entries, window)]
    spans = ArraySpans(tuple(Span(torch.zeros_like(size), size) for size in sizes))
    return attend(q[None, :, None], sources, spans, scale=scale, dropout_p=0.0, return_lse=False)[0][0, :, 0]


def _slot(pages: Pages, row: int, position: int) -> Tensor:
    """The slot of a position, ``[K, C]``, a view."""
    return pages.cache[int(pages.table[row, position // pages.slots]), :, position % pages.slots]


def _ring_slot(ring: Pages, row: int, t: int, width: int) -> Tensor:
    """The mean query of position t, ``[K, D]``, a view."""
    return ring.cache[int(ring.table[row, 0]), :, t % ring.slots, :width]


def _mean_query(q: Tensor, num_kv_heads: int) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide).unflatten(0, (num_kv_heads, -1)).mean(1).to(q.dtype)


def _summary(mean: Tensor, row: int, t: int, ring: Pages | None, settings: StepSettings) -> Tensor:
    """Mean of the newest S mean queries, the last of which is ``mean``, float32 or wider ``[1, K, 1, D]``."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    queries = [mean]
    if ring is not None:
        queries = [_ring_slot(ring, row, t - i, mean.shape[1]) for i in range(settings.num_summary)]
    return torch.stack(queries).to(wide).mean(0)[None, :, None]


def _entry(tokens: Tensor, summary: Tensor, width: int, settings: StepSettings, scale: float) -> Tensor:
    """The entry ``[K, D + Dv]`` of a group's tokens ``[K, g, D + Dv]``."""
    assert settings.key_pooling is not None
    assert settings.value_pooling is not None
    k, v = tokens[None, :, None, :, :width], tokens[None, :, None, :, width:]
    scores = group_scores(summary, k, scale=scale)
    pooled = pool(k, scores, how=settings.key_pooling), pool(v, scores, how=settings.value_pooling)
    return torch.cat(pooled, dim=-1)[0, :, 0]


def _keys_and_values(slots: list[Tensor], like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys ``[1, K, n, D]`` and values ``[1, K, n, Dv]`` of slots ``[K, D + Dv]``."""
    x = torch.stack(slots, dim=1) if slots else like[:, None][:, :0]
    return x[None, :, :, :width], x[None, :, :, width:]
