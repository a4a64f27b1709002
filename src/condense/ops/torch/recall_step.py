"""One decode step of Recall, in the `torch` backend: any device, traceable as one graph.

Every step does the same work, whatever the buffers hold, as tracing needs: it makes a group's entry and index but
stores them only if the group closes, and it scores all groups that there is room for.

Shapes as in `condense.ops.recall.state`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.recall.choice import choose_groups, chosen_groups, index_scores
from condense.ops.recall.index import build_index
from condense.ops.recall.state import RecallSettings, RecallState
from condense.ops.torch.attend import attend_block
from condense.ops.torch.step import _read, _write


def recall_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    real: Tensor | None = None,
    latent: int = 0,
) -> Tensor:
    """Read one token per row, in place, and return its attention ``[B, H, 1, Dv]``; see `condense.ops.recall.state`.

    q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]`` in the dtype of the state; real bool or integer ``[B]``,
    None: all rows are. latent: if > 0, values are the first ``latent`` columns of the keys, Dv is 0 (absorbed MLA).
    """
    t = state.seen
    alive = torch.ones_like(t, dtype=torch.bool) if real is None else real.to(torch.bool)
    seen = t + alive
    _write(state.ring_k, t, k, alive)
    _write(state.ring_v, t, v, alive)
    if state.entries_k.shape[2] > 0:
        _close_group(state, settings, t, seen)
    out = _attend(q, state, settings, seen, alive, scale, latent)
    state.seen.copy_(seen)
    return out


def _close_group(state: RecallState, settings: RecallSettings, t: Tensor, seen: Tensor) -> None:
    """Entry, index and store of the group that the newest token closes, if it closes one."""
    g, group = settings.rule.chunk, settings.rule.closed(t)
    closes = (settings.rule.closed(seen) > group) & (group < state.entries_k.shape[2])
    for ring, entries, store in (
        (state.ring_k, state.entries_k, state.store_k),
        (state.ring_v, state.entries_v, state.store_v),
    ):
        tokens = _read(ring, group * g, g)
        mean = tokens.mean(2, keepdim=True, dtype=torch.promote_types(ring.dtype, torch.float32))
        _write(entries, group, mean.to(ring.dtype), closes)
        _write(store, group * g, tokens, closes)
    index = build_index(_read(state.ring_k, group * g, g)[:, :, None], settings.index)
    _write(state.codes, group, index.codes, closes)
    if state.grid.shape[3] > 0:
        _write(state.grid, group, index.grid, closes)


def _attend(
    q: Tensor,
    state: RecallState,
    settings: RecallSettings,
    seen: Tensor,
    alive: Tensor,
    scale: float,
    latent: int,
) -> Tensor:
    K, G, W, g = state.ring_k.shape[1], state.entries_k.shape[2], state.ring_k.shape[2], settings.rule.chunk
    all_closed = settings.rule.closed(seen)
    closed = all_closed.clamp(max=G)
    scores = index_scores(q, state.group_index, settings.index, scale)
    chosen = choose_groups(scores, closed[:, None, None], settings.num_recall, K)
    groups = chosen_groups(chosen, settings.num_recall)[:, :, 0]
    token = (groups.clamp(max=max(G - 1, 0))[..., None] * g + torch.arange(g, device=q.device)).flatten(2)[..., None]
    opened = [x.gather(2, token.expand(-1, -1, -1, x.shape[3])) for x in (state.store_k, state.store_v)]
    last = (seen - 1)[:, None]
    # the newest position stored in each slot; negative: the slot is empty
    position = last - (last - torch.arange(W, device=q.device)) % W
    near = (position >= all_closed[:, None] * g) & (position >= 0)
    pooled = (torch.arange(G, device=q.device) < closed[:, None])[:, None] & ~chosen[:, :, 0] & settings.pool
    sees = torch.cat([pooled, (groups < G).repeat_interleave(g, -1), near[:, None].expand(-1, K, -1)], dim=2)[
        :, :, None
    ]
    empty = ~(alive[:, None, None, None] & sees.any(-1, keepdim=True))
    keys = torch.cat([state.entries_k, opened[0], state.ring_k], dim=2)
    bias = torch.full((1, 1, G), settings.bias, dtype=torch.float64, device=q.device) if settings.bias != 0.0 else None
    return attend_block(
        q,
        keys,
        keys[..., :latent] if latent else torch.cat([state.entries_v, opened[1], state.ring_v], dim=2),
        sees | empty,
        empty,
        bias,
        scale=scale,
    )[0]
