"""Entries of a prompt that is read at once: all its tokens, chosen ones, or DGA's focal tokens and groups.

Shapes: B rows, H query heads, K KV heads, L tokens, E entries, N tokens in groups, G groups of g tokens, D and Dv
widths. Rows are right-aligned: row b's tokens are its last ``tokens[b]`` columns. focal: bool ``[B, K, L]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from condense.methods.base import Context, Prompt
from condense.methods.layout import FirstEntries
from condense.ops import ArraySpans, RuleSpans, Source, Span, UniformRule, group_scores, pool
from condense.ops.tensors.per_row import broadcast_rows, int_if_equal


class FocalTokens(NamedTuple):
    """focal: bool ``[B, K, L]``; num_focal and tokens: focal and real tokens of each row, int64 CPU ``[B]``."""

    focal: Tensor
    num_focal: Tensor
    tokens: Tensor


class Grouping(NamedTuple):
    """The grouping of tokens that are not focal: ``size`` per group, weighed by scores times ``scale``.

    complementary: as in `condense.DGA`. bias: added to the scaled score of a group.
    """

    size: int
    scale: float
    complementary: bool
    bias: float


def take(x: Tensor, index: Tensor) -> Tensor:
    """The vectors ``[..., n, D]`` of x ``[..., L, D]`` at ``index`` ``[..., n]``."""
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def highest(scores: Tensor, num_focal: Tensor, tokens: Tensor) -> Tensor:
    """The ``num_focal[b]`` tokens of each row with the highest scores >= 0 ``[B, K, L]``, ties to the earlier."""
    is_chosen = torch.arange(scores.shape[2], device=scores.device) < broadcast_rows(num_focal, 3, scores.device)
    scores = scores.masked_fill(~_real(tokens, scores.shape[2], scores.device), -1)
    order = scores.argsort(stable=True, descending=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, order, is_chosen.expand_as(scores))


def exact_prompt(k: Tensor, v: Tensor, tokens: Tensor) -> Prompt:
    """A prompt whose tokens are all focal: plain causal attention, and all tokens are kept as entries."""
    L = k.shape[2]
    start = int_if_equal(tokens) - L
    spans = RuleSpans(UniformRule(chunk=1, window=None, max_chunks=0), start, start)

    def kept() -> tuple[Tensor, Tensor]:
        return kept_tokens(k, v, _real(tokens, L, k.device).expand(-1, k.shape[1], -1), int(tokens.max()))

    context = Context((Source(k[:, :, :0], v[:, :, :0]), Source(k, v)), spans)
    return Prompt(context, FirstEntries.of(tokens, tokens), kept)


def kept_tokens(k: Tensor, v: Tensor, kept: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens where kept ``[B, K, L]`` is True, at most ``most`` per row and head, detached."""
    columns = _columns(kept, most)
    return take(k.detach(), columns), take(v.detach(), columns)


def focal_prompt(q: Tensor, k: Tensor, v: Tensor, chosen: FocalTokens, grouping: Grouping, *, backend: str) -> Prompt:
    """DGA's prompt of focal tokens and groups (Algorithms 1 and 2).

    Entries: both, in order of their last token. Window: the grouped tokens.

    Query t sees the entries whose last token is at or before t, and those tokens of the window that are at or before t
    and in a group that is not complete at t. So it sees each token up to t once. If not ``grouping.complementary``, it
    sees at most its own token of the window.
    """
    g, L = grouping.size, k.shape[2]
    focal, num_focal, tokens = chosen
    grouped = _real(tokens, L, k.device) & ~focal
    focal_seen, grouped_seen = focal.cumsum(2), grouped.cumsum(2)
    complete = grouped_seen // g
    closing = grouped & (grouped_seen % g == 0)
    first = complete * g if grouping.complementary else grouped_seen - (grouped & ~closing).long()
    last_entry = focal_seen + complete
    spans = ArraySpans((Span(torch.zeros_like(last_entry), last_entry), Span(first, grouped_seen)))

    members = _columns(grouped, int((tokens - num_focal).max()))
    window_k, window_v = take(k, members), take(v, members)
    num_groups = (tokens - num_focal) // g
    summary = _mean_queries(q, members[:, :, g - 1 :: g], num_groups)
    members_k, members_v = (x.unflatten(2, (-1, g)) for x in (window_k, window_v))
    scores = group_scores(summary, members_k, scale=grouping.scale, backend=backend)
    groups_k = pool(members_k, scores, how="weighted", backend=backend)
    groups_v = pool(members_v, scores, how="weighted", backend=backend)

    num_entries = num_focal + num_groups
    ends = _columns(focal | closing, int(num_entries.max()))
    is_group = closing.gather(2, ends)
    number = (complete.gather(2, ends) - 1).clamp(min=0)
    entries_k, entries_v = (
        torch.where(is_group[..., None], take(groups, number), take(exact, ends))
        for groups, exact in ((groups_k, k), (groups_v, v))
    )
    bias = is_group.double() * grouping.bias if grouping.bias else None

    def kept() -> tuple[Tensor, Tensor]:
        # Later queries see all of these entries, so their order is free: focal tokens first, so that a number is enough
        # to tell them from groups (`condense.methods.FirstEntries`).
        past_end = torch.arange(is_group.shape[2], device=k.device) >= broadcast_rows(num_entries, 3, k.device)
        order = is_group.to(torch.int8).masked_fill(past_end, 2).argsort(stable=True)
        return take(entries_k.detach(), order), take(entries_v.detach(), order)

    context = Context((Source(entries_k, entries_v, bias), Source(window_k, window_v)), spans)
    return Prompt(context, FirstEntries.of(num_entries, num_focal), kept)


def _mean_queries(q: Tensor, columns: Tensor, num_groups: Tensor) -> Tensor:
    """Summary queries ``[B, K, G, D]`` in the dtype of q: the query in ``columns`` ``[B, K, G]``, averaged over heads.

    num_groups: groups of each row, int64 CPU ``[B]``. In rows with fewer than G the others get 0: their column may be
    padding, which may hold NaN.
    """
    K, G = columns.shape[1:]
    queries = take(q.unflatten(1, (K, -1)), columns[:, :, None].expand(-1, -1, q.shape[1] // K, -1))
    mean = queries.mean(2, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    absent = torch.arange(G, device=q.device) >= broadcast_rows(num_groups, 3, q.device)
    return mean.masked_fill(absent[..., None], 0)


def _real(tokens: Tensor, L: int, device: torch.device) -> Tensor:
    """Columns that hold real tokens, bool ``[B, 1, L]``."""
    return torch.arange(L, device=device) >= L - broadcast_rows(tokens, 3, device)


def _columns(mask: Tensor, size: int) -> Tensor:
    """The columns where mask ``[B, K, L]`` is True, in order: int64 ``[B, K, size]``, filled up with 0."""
    place = (mask.cumsum(2) - 1).masked_fill(~mask, size)
    column = torch.arange(mask.shape[2], device=mask.device).expand_as(place)
    return place.new_zeros(*mask.shape[:2], size + 1).scatter_(2, place, column)[..., :size]
