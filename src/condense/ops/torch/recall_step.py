"""One decode step of Recall, in the `torch` backend: any device, traceable as one graph.

Every step does the same work, whatever the buffers hold, as tracing needs: it makes a group's entry and index but
stores them only if the group closes, and it scores all groups that there is room for.

Shapes as in `condense.ops.recall.state`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.recall.choice import choose_groups, chosen_groups, index_scores
from condense.ops.recall.index import build_index
from condense.ops.recall.state import RecallSettings, RecallState
from condense.ops.tensors.bias import per_entry
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.torch.attend import BlockKeys, attend_block
from condense.ops.torch.pool import group_scores, pool
from condense.ops.torch.step import newest_mean, read_columns, ring_positions, write_columns
from condense.ops.types import NewToken


def recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row, in place, and return its attention ``[B, H, 1, Dv]``; see `condense.ops.recall.state`.

    latent: if > 0, values are the first ``latent`` columns of the keys, Dv is 0 (absorbed MLA).
    """
    (q, k, v, real, counter), t = token, state.seen
    alive = torch.ones_like(t, dtype=torch.bool) if real is None else real.to(torch.bool)
    seen = t + alive
    write_columns(state.ring_k, t, k, alive)
    write_columns(state.ring_v, t, v, alive)
    if settings.entries.num_summary > 0:
        write_columns(state.ring_q, t, head_mean(q, k.shape[1]), alive)
    if state.entries_k.shape[2] > 0:
        _close_group(state, settings, t, seen, scale)
    out, lse = _attend(q, state, settings, (seen, alive), scale, latent, extras)
    state.seen.copy_(seen)
    if counter is not None:
        counter.add_(1)
    return extras.finish(out, lse)


def _close_group(state: RecallState, settings: RecallSettings, t: Tensor, seen: Tensor, scale: float) -> None:
    """Write the entry, the index and the tokens of the group that the newest token closes, in rows where it does."""
    g, group = settings.rule.chunk, settings.rule.closed(t)
    closes = (settings.rule.closed(seen) > group) & (group < state.entries_k.shape[2])
    k, v = (read_columns(ring, group * g, g) for ring in (state.ring_k, state.ring_v))
    if settings.pool:
        _put_entry(state, settings, (k, v), seen, scale, group, closes)
    write_columns(state.store, group * g, settings.store_format.pack(k[:, :, None], v[:, :, None]), closes)
    index = build_index(k[:, :, None], settings.index)
    write_columns(state.codes, group, index.codes, closes)
    if state.grid.shape[3] > 0:
        write_columns(state.grid, group, index.grid, closes)


def _put_entry(
    state: RecallState,
    settings: RecallSettings,
    tokens: tuple[Tensor, Tensor],
    seen: Tensor,
    scale: float,
    group: Tensor,
    closes: Tensor,
) -> None:
    """Write the pooled key and value of ``tokens`` as the entry of ``group``, and its bias if matched."""
    (k, v), of_entries, g = tokens, settings.entries, settings.rule.chunk
    form = of_entries.format
    scores = torch.zeros(k.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)[:, :, None]
    if of_entries.num_summary > 0:
        summary = newest_mean(state.ring_q, seen, of_entries.num_summary, g)
        scores = group_scores(summary, k[:, :, None], scale=scale)
    entry = pool(k[:, :, None], scores, how=of_entries.key_pooling)
    value = pool(v[:, :, None], scores, how=of_entries.value_pooling)
    write_columns(state.entries_k, group, form.pack(entry), closes)
    write_columns(state.entries_v, group, form.pack(value), closes)
    if of_entries.matched:
        bias = scores.logsumexp(-1) - group_scores(summary, entry[..., None, :], scale=scale)[..., 0]
        write_columns(state.biases, group, bias[..., None], closes)


def _attend(
    q: Tensor,
    state: RecallState,
    settings: RecallSettings,
    rows: tuple[Tensor, Tensor],
    scale: float,
    latent: int,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the step's queries; rows: tokens seen, and whether the row's token counts."""
    seen, alive = rows
    (_, K, W, D), G, g = state.ring_k.shape, state.entries_k.shape[2], settings.rule.chunk
    all_closed = settings.rule.closed(seen)
    closed = all_closed.clamp(max=G)
    scores = index_scores(q, state.group_index, settings.index, scale)
    chosen = choose_groups(scores, closed[:, None, None], settings.quota, K)
    groups = chosen_groups(chosen, settings.quota.at(G))[:, :, 0]
    opened = _open_groups(state, groups, (groups < G) & alive[:, None, None], g)
    position = ring_positions(seen, W)
    near = (position >= all_closed[:, None] * g) & (position >= 0)
    opened_k, opened_v = settings.store_format.unpack(opened, D, state.ring_v.shape[3], q.dtype)
    sources = [
        (opened_k, opened_v, (groups < G).repeat_interleave(g, -1)),
        (state.ring_k, state.ring_v, near[:, None].expand(-1, K, -1)),
    ]
    if settings.pool:
        pooled = (torch.arange(G, device=q.device) < closed[:, None])[:, None] & ~chosen[:, :, 0]
        form, Dv = settings.entries.format, state.ring_v.shape[3]
        entries = form.unpack(state.entries_k, D, q.dtype), form.unpack(state.entries_v, Dv, q.dtype)
        sources.insert(0, (*entries, pooled))
    k, v, masks = zip(*sources, strict=True)
    keys, sees = torch.cat(k, dim=2), torch.cat(masks, dim=2)[:, :, None]
    empty = ~(alive[:, None, None, None] & sees.any(-1, keepdim=True))
    bias = None
    if settings.pool and settings.entries.matched:
        bias = state.biases[..., 0]
    elif settings.pool and settings.entries.bias != 0.0:
        bias = per_entry(settings.entries.bias, G, q.device)
    values = keys[..., :latent] if latent else torch.cat(v, dim=2)
    block = BlockKeys(keys, values, sees | empty, empty, bias)
    return attend_block(q, block, scale=scale, softcap=extras.softcap, return_lse=extras.needs_lse)


def _open_groups(state: RecallState, groups: Tensor, is_open: Tensor, g: int) -> Tensor:
    """Stored tokens of ``groups`` ``[B, K, r]`` where ``is_open``, ``[B, K, r * g, C]``; undefined for other groups.

    Open groups that are in a slot are read from it; the others are read from the store and take slots, while there are
    some whose groups are not open.
    """
    slots, S = state.slots, state.held.shape[2]
    stored = _tokens(state.store, groups.clamp(max=max(state.entries_k.shape[2] - 1, 0)), g)
    if S == 0 or groups.shape[2] == 0:
        return stored
    slot, is_new = _take_slots(state, groups, is_open)
    in_slot = ((slot >= 0) & ~is_new).repeat_interleave(g, 2)[..., None]
    opened = torch.where(in_slot, _tokens(slots, slot.clamp(min=0), g), stored)
    # groups without a slot are written behind the last slot, into columns that are dropped
    column = _columns(torch.where(slot >= 0, slot, S), g).expand_as(opened)
    slots.copy_(F.pad(slots, (0, 0, 0, g)).scatter(2, column, opened)[:, :, :-g])
    return opened


def _take_slots(state: RecallState, groups: Tensor, is_open: Tensor) -> tuple[Tensor, Tensor]:
    """The slot of each of ``groups`` ``[B, K, r]``, -1 for none, and whether the group takes that slot now.

    Changes ``state.held`` and ``state.order`` as `RecallState` says.
    """
    held, order = state.held.long(), state.order.long()
    found = (groups[..., None] == held[:, :, None]) & is_open[..., None]
    has_slot = found.any(3)
    # from here on, slots in the order in which they are given away
    is_used = found.any(2).gather(2, order)
    is_missing = is_open & ~has_slot
    is_taken = ~is_used & ((~is_used).cumsum(2) <= is_missing.sum(2, keepdim=True))
    takes = is_missing[..., None] & is_taken[:, :, None]
    takes &= is_missing.cumsum(2)[..., None] == is_taken.cumsum(2)[:, :, None]
    is_new = takes.any(3)
    slot = torch.where(is_new, order.gather(2, takes.int().argmax(3)), -1)
    slot = torch.where(has_slot, found.int().argmax(3), slot)
    now = torch.where(is_taken, groups.gather(2, takes.int().argmax(2)), held.gather(2, order))
    state.held.copy_(held.scatter(2, order, now))
    state.order.copy_(order.gather(2, (is_used.int() + 2 * is_taken.int()).argsort(dim=2, stable=True)))
    return slot, is_new


def _columns(numbers: Tensor, g: int) -> Tensor:
    """The columns ``[B, K, r * g, 1]`` of groups or slots, g columns each, by their ``numbers`` ``[B, K, r]``."""
    return (numbers[..., None] * g + torch.arange(g, device=numbers.device)).flatten(2)[..., None]


def _tokens(x: Tensor, numbers: Tensor, g: int) -> Tensor:
    """The tokens ``[B, K, r * g, width]`` of groups or slots by number, from x ``[B, K, N, width]``."""
    return x.gather(2, _columns(numbers, g).expand(-1, -1, -1, x.shape[3]))
