"""One decode step, in the `torch` backend: any method, any device, traceable as one graph.

Every step does the same work, whatever the buffers hold, as tracing needs: it makes a chunk's entries and stores them
only if a chunk is due, and it reads all slots of the buffers under a mask.

Shapes as in `condense.ops.types`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.torch.attend import BlockKeys, attend_block
from condense.ops.types import Chunks, NewToken, OwnEntries, Represent, StepSettings, StepState


def step(
    token: NewToken,
    state: StepState,
    settings: StepSettings,
    *,
    scale: float,
    own: OwnEntries,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row, in place, and return its attention ``[B, H, 1, Dv]``; see `condense.ops.types`.

    latent: if > 0, values are the first ``latent`` columns of the keys.
    """
    (q, k, v, real, counter), t = token, state.seen
    alive = torch.ones_like(t, dtype=torch.bool) if real is None else real.to(torch.bool)
    seen = t + alive
    write_columns(state.ring_k, t, k, alive)
    write_columns(state.ring_v, t, v, alive)
    if settings.num_summary > 0:
        write_columns(state.ring_q, t, head_mean(q, k.shape[1]), alive)
    if state.entries_k.shape[2] > 0:
        _append_entry(state, settings, t, seen, scale, own.represent)
    entry_bias = own.bias
    if settings.matched:
        entry_bias = state.biases[..., 0]
    elif entry_bias is None and settings.bias != 0.0:
        entry_bias = _bias(state, settings)
    out, lse = _attend(q, state, settings, (seen, alive), scale, entry_bias, latent, extras)
    state.seen.copy_(seen)
    if counter is not None:
        counter.add_(1)
    return extras.finish(out, lse)


def write_columns(buffer: Tensor, position: Tensor, new: Tensor, chosen: Tensor) -> None:
    """Write ``new`` ``[B, K, n, D]`` to n columns from ``position`` ``[B]`` on, in the ``chosen`` rows only.

    Behind the buffer's last column comes its first.
    """
    slot = (position[:, None] + torch.arange(new.shape[2], device=new.device)) % buffer.shape[2]
    index = slot[:, None, :, None].expand_as(new)
    buffer.scatter_(2, index, torch.where(chosen[:, None, None, None], new, buffer.gather(2, index)))


def read_columns(ring: Tensor, start: Tensor, count: int) -> Tensor:
    """The ``count`` columns from ``start`` ``[B]`` on, ``[B, K, count, D]``; behind the last column comes the first."""
    slot = (start[:, None] + torch.arange(count, device=ring.device)) % ring.shape[2]
    return ring.gather(2, slot[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3]))


def _append_entry(
    state: StepState, settings: StepSettings, t: Tensor, seen: Tensor, scale: float, represent: Represent
) -> None:
    """Make the entries of each row's next chunk, and store them in the rows where it is due."""
    rule, summary_delay = settings.rule, settings.summary_delay
    chunk = rule.pooled(t, summary_delay)
    first = state.first[:, 0] + chunk * rule.entries
    due = (rule.pooled(seen, summary_delay) > chunk) & (first + rule.entries <= state.entries_k.shape[2])
    summary = None if settings.num_summary == 0 else newest_mean(state.ring_q, seen, settings.num_summary, rule.chunk)
    due_k, due_v = (read_columns(ring, chunk * rule.chunk, rule.chunk) for ring in (state.ring_k, state.ring_v))
    new = represent(Chunks(due_k, due_v, 0, 1, rule.chunk, chunk[:, None]), summary, scale=scale, backend="torch")
    kept = settings.entry_format.pack(new[0]), settings.entry_format.pack(new[1]), *new[2:]
    for buffer, entries in zip(state.entries, kept, strict=True):
        write_columns(buffer, first, entries, due)


def ring_positions(seen: Tensor, size: int) -> Tensor:
    """The newest position stored in each slot of a ring, int64 ``[B, size]``, after ``seen`` ``[B]`` tokens.

    Negative: the slot is empty.
    """
    last = (seen - 1)[:, None]
    return last - (last - torch.arange(size, device=seen.device)) % size


def newest_mean(ring_q: Tensor, seen: Tensor, S: int, chunk: int) -> Tensor:
    """Mean of a row's newest S queries, or of all if it has fewer, ``[B, K, 1, D]`` float32 or wider.

    Summed in the order of `condense.ops.torch.pool.summarize`, so that entries are bit-equal.
    """
    wide = torch.promote_types(ring_q.dtype, torch.float32)
    queries = read_columns(ring_q, seen - S, S)
    if chunk == S:
        return queries.mean(2, keepdim=True, dtype=wide)
    inside = (seen[:, None] - S + torch.arange(S, device=seen.device) >= 0)[:, None, :, None]
    total = torch.zeros_like(queries[:, :, :1], dtype=wide)
    for s in range(S):
        total = total + queries[:, :, s : s + 1] * inside[:, :, s : s + 1]
    return total / inside.sum(2, keepdim=True).clamp(min=1)


def _seen_entries(state: StepState, settings: StepSettings, closed: Tensor) -> Tensor:
    """Number of first entries and those of ``closed`` chunks, without chunks that did not fit into the buffer."""
    first_entries, p = state.first[:, 0], settings.rule.entries
    room = (state.entries_k.shape[2] - first_entries) // p * p
    return first_entries + torch.minimum(settings.rule.visible_entries(closed), room)


def _bias(state: StepState, settings: StepSettings) -> Tensor:
    """``settings.bias`` for pooled entries, 0 for single tokens, float64 ``[B|1, 1, M]``."""
    M, p = state.entries_k.shape[2], settings.rule.entries
    if not settings.bias_differs:
        return torch.full((1, 1, M), settings.bias, dtype=torch.float64, device=state.seen.device)
    entry = torch.arange(M, device=state.seen.device)
    first_entries, first_single = state.first[:, :1], state.first[:, 1:]
    pooled = torch.where(entry < first_entries, entry >= first_single, (entry - first_entries) % p == p - 1)
    return (pooled.double() * settings.bias)[:, None]


def _attend(
    q: Tensor,
    state: StepState,
    settings: StepSettings,
    rows: tuple[Tensor, Tensor],
    scale: float,
    entry_bias: Tensor | None,
    latent: int,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the step's queries; rows: tokens seen, and whether the row's token counts."""
    seen, alive = rows
    M, W = state.entries_k.shape[2], state.ring_k.shape[2]
    closed = settings.rule.closed(seen)
    num_entries, first_token = _seen_entries(state, settings, closed)[:, None], (closed * settings.rule.chunk)[:, None]
    position = ring_positions(seen, W)
    sees_token = (position >= first_token) & (position >= 0)
    sees = torch.cat([torch.arange(M, device=q.device) < num_entries, sees_token], dim=1)
    empty = ~(alive & sees.any(1))[:, None, None, None]
    form, D, Dv = settings.entry_format, state.ring_k.shape[3], state.ring_v.shape[3]
    keys = torch.cat([form.unpack(state.entries_k, D, q.dtype), state.ring_k], dim=2)
    if latent:
        values = keys[..., :latent]
    else:
        values = torch.cat([form.unpack(state.entries_v, Dv, q.dtype), state.ring_v], dim=2)
    block = BlockKeys(keys, values, sees[:, None, None] | empty, empty, entry_bias)
    return attend_block(q, block, scale=scale, softcap=extras.softcap, return_lse=extras.needs_lse)
