"""One decode step, in the `torch` backend: any method, any device, traceable as one graph.

Every step does the same work, whatever the buffers hold, as tracing needs: it makes a chunk's entries and stores them
only if a chunk is due, it scores all groups that there is room for, and it reads all slots of the buffers under a mask.

Shapes as in `condense.ops.step.call` and `condense.ops.step.state`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from condense.ops.coarse import CoarseRule, merged
from condense.ops.recall.choice import IndexChoice, choose_groups, chosen_groups, index_scores
from condense.ops.recall.rest import rest_weights, with_rest
from condense.ops.spans import entry_bias, joined_bias
from condense.ops.step.call import StepCall
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StepState
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.tensors.ring import newest_numbers, read_columns, write_columns
from condense.ops.torch.attend import BlockKeys, attend_block, group_tokens
from condense.ops.types import AttendOptions, Chunks


def step(call: StepCall, represent: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """Read one token per row, in place, and return its attention ``[B, H, 1, Dv]``; see `condense.ops.step.call`."""
    (q, k, v, real, counter), state, t = call.token, call.state, call.state.seen
    alive = torch.ones_like(t, dtype=torch.bool) if real is None else real.to(torch.bool)
    seen = t + alive
    write_columns(state.ring_k, t, k, alive)
    write_columns(state.ring_v, t, v, alive)
    if call.settings.num_summary > 0:
        write_columns(state.ring_q, t, head_mean(q, k.shape[1]), alive)
    if state.entries_k.shape[2] > 0 or call.settings.coarse is not None:
        _close(call, t, seen, represent)
    if call.settings.sees_rest:
        _add_to_sums(state, seen, alive, call.settings.rule.chunk)
    out, lse = attend(call, seen, alive)
    state.seen.copy_(seen)
    if counter is not None:
        counter.add_(1)
    return call.extras.finish(out, lse)


def _close(call: StepCall, t: Tensor, seen: Tensor, represent: Callable[..., tuple[Tensor, ...]]) -> None:
    """Make the entries, index and stored tokens of each row's next chunk, and write them where the chunk is due."""
    state, settings = call.state, call.settings
    rule, delay, c = settings.rule, settings.summary_delay, settings.rule.chunk
    chunk = rule.pooled(t, delay)
    first = chunk * rule.entries
    if settings.has_first:
        first = first + state.first[:, 0]
    due, buffers = rule.pooled(seen, delay) > chunk, state.entries(settings)
    if settings.coarse_rule is not None:
        _merge(state, t, seen, settings.coarse_rule)
        buffers = state.fine_k, state.fine_v
    else:
        due &= first + rule.entries <= state.entries_k.shape[2]
    summary = None if settings.num_summary == 0 else newest_mean(state.ring_q, seen, settings.num_summary)
    k, v = (read_columns(ring, chunk * c, c) for ring in (state.ring_k, state.ring_v))
    kept = represent(Chunks(k, v, 0, 1, c, chunk[:, None]), summary, scale=call.scale, backend="torch")
    for buffer, made in zip(buffers, packed(kept, settings), strict=True):
        # the store has a column for each token of a chunk, the other buffers one for each entry
        # a user's method may return biases in a wider dtype than the buffer's
        write_columns(buffer, chunk * c if buffer is state.store else first, made.to(buffer.dtype), due)


def _merge(state: StepState, t: Tensor, seen: Tensor, rule: CoarseRule) -> None:
    """Merge fine entries, all made before this step, into each row's next coarse entry, where it is due."""
    if state.entries_k.shape[2] == 0:
        return
    number, n = rule.made(t), rule.coarse.chunks
    due = (rule.made(seen) > number) & (number < state.entries_k.shape[2])
    k, v = (read_columns(ring, number * n, n) for ring in (state.fine_k, state.fine_v))
    for buffer, made in zip((state.entries_k, state.entries_v), merged(Chunks(k, v, 0, 1, n, 0)), strict=True):
        write_columns(buffer, number, made, due)


def _add_to_sums(state: StepState, seen: Tensor, alive: Tensor, g: int) -> None:
    """Write the sum of the values of all whole groups, in rows whose new token completes a group."""
    count = seen // g
    before = read_columns(state.sums, count - 1, 1)
    new = read_columns(state.ring_v if state.ring_v.shape[3] > 0 else state.ring_k, (count - 1) * g, g)
    total = torch.where((count > 1)[:, None, None, None], before, 0.0) + new.sum(2, keepdim=True, dtype=torch.float64)
    write_columns(state.sums, count, total, alive & (seen % g == 0))


def packed(kept: tuple[Tensor, ...], settings: StepSettings) -> tuple[Tensor, ...]:
    """The tensors that `condense.Method.represent` returned, entries in the format in which they are kept."""
    return settings.entry_format.pack(kept[0]), settings.entry_format.pack(kept[1]), *kept[2:]


def newest_mean(ring_q: Tensor, seen: Tensor, S: int) -> Tensor:
    """Mean of a row's newest S queries, or of all if it has fewer, ``[B, K, 1, D]`` float32 or wider.

    Summed in the order of `condense.ops.torch.pool.summarize`, so that entries are bit-equal.
    """
    wide = torch.promote_types(ring_q.dtype, torch.float32)
    queries = read_columns(ring_q, seen - S, S)
    inside = (seen[:, None] - S + torch.arange(S, device=seen.device) >= 0)[:, None, :, None]
    total = torch.zeros_like(queries[:, :, :1], dtype=wide)
    for s in range(S):
        total = total + queries[:, :, s : s + 1] * inside[:, :, s : s + 1]
    return total / inside.sum(2, keepdim=True).clamp(min=1)


def attend(call: StepCall, seen: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the step's queries. seen: tokens per row with this one; alive: rows whose token counts.

    Under one softmax: entries of closed chunks, or tokens of open groups, and the window.
    """
    (q, *_), state, settings, latent = call.token, call.state, call.settings, call.latent
    (D, Dv), c, M = (state.ring_k.shape[3], state.ring_v.shape[3]), settings.rule.chunk, state.entries_k.shape[2]
    closed, choice = settings.rule.closed(seen), settings.choice
    position = newest_numbers(seen - 1, state.ring_k)
    near = ((position >= closed[:, None] * c) & (position >= 0))[:, None]
    # the far keys (entries, or tokens of open groups), and a mask of those that each row sees, bool ``[B, K|1, n]``
    if choice is None:
        form, p = settings.entry_format, settings.rule.entries
        far_k, far_v = form.unpack(state.entries_k, D, q.dtype), form.unpack(state.entries_v, Dv, q.dtype)
        # first entries, then those of closed chunks as far as the buffer had room for them
        of_first = state.first[:, 0] if settings.has_first else torch.zeros_like(closed)
        visible = settings.rule.visible_entries(closed)
        if settings.coarse_rule is not None:
            (_, visible), (lo, hi), _ = settings.coarse_rule.spans(seen)
        count = of_first + torch.minimum(visible, (M - of_first) // p * p)
        far = (torch.arange(M, device=q.device) < count[:, None])[:, None]
        if settings.coarse_rule is not None:
            last = settings.rule.pooled(seen, settings.summary_delay) - 1
            number = newest_numbers(last, state.fine_k)
            is_fine = (number >= lo[:, None]) & (number < hi[:, None])
            far_k, far_v = torch.cat([far_k, state.fine_k], dim=2), torch.cat([far_v, state.fine_v], dim=2)
            far = torch.cat([far, is_fine[:, None]], dim=2)
    else:
        groups, chosen = _choose(call, closed)
        rows, index = state.store[:, :, : M * c], state.group_index
        if groups.shape[2] < M:
            inside = groups.clamp(max=M - 1)
            rows = group_tokens(state.store, inside, c)
            index = index if choice.store.bits == 16 else index.opened(inside)
        far_k, far_v = settings.store_format.unpack(rows, D, Dv, q.dtype, index)
        far = (groups < M).repeat_interleave(c, -1)
    keys = torch.cat([far_k, state.ring_k], dim=2)
    sees = torch.cat([far, near.expand(-1, far.shape[1], -1)], dim=2)[:, :, None]
    values = keys[..., :latent] if latent else torch.cat([far_v, state.ring_v], dim=2)
    empty = ~(alive[:, None, None, None] & sees.any(-1, keepdim=True))
    of_entries = None if choice is not None else _entry_bias(state, settings)
    biases, sizes = [of_entries], [M]
    if settings.coarse is not None:
        biases, sizes = [settings.coarse.bias, of_entries], [M, state.fine_k.shape[2]]
    bias, own = joined_bias(biases, sizes, q.device), isinstance(of_entries, Tensor)
    block = BlockKeys(keys, values, sees | empty, empty, bias, own)
    options = AttendOptions(call.scale, call.extras.softcap, return_lse=call.extras.needs_lse or settings.sees_rest)
    out, lse = attend_block(q, block, options)
    if choice is None or not choice.mean:
        return out, lse
    hi = (closed.clamp(max=M) * alive)[:, None, None]
    by_index = IndexChoice(q, state.group_index, call.scale, choice.quota)
    weight = rest_weights(by_index, 0, 1, chosen[:, :, None], hi, options.softcap)
    whole = (seen // c)[:, None, None, None]
    mean = read_columns(state.sums, seen // c, 1) / (whole * c).clamp(min=1)
    return with_rest(out, lse, weight, mean[..., : values.shape[3]])


def _entry_bias(state: StepState, settings: StepSettings) -> Tensor | float | None:
    """Biases of the entries, or of the fine ones if there are coarse entries; as in `condense.ops.Source`."""
    if settings.matched:
        return state.biases[..., 0]
    first = (state.first[:, :1], state.first[:, 1:]) if settings.has_first else None
    return entry_bias(settings.biases, state.entries_k.shape[2], state.seen.device, first)


def _choose(call: StepCall, closed: Tensor) -> tuple[Tensor, Tensor]:
    """The groups to open: numbers ``[B, K, r]``, rising, M for none; and which of all they are, bool ``[B, K, M]``."""
    (q, *_), state, choice = call.token, call.state, call.settings.choice
    assert choice is not None
    M, K = state.entries_k.shape[2], state.ring_k.shape[1]
    if choice.quota.at(M) == M:  # all closed groups are open: group j stands in column j
        group = torch.arange(M, device=q.device)
        chosen = (group < closed[:, None])[:, None].expand(-1, K, -1)
        return torch.where(chosen, group, M), chosen
    scores = index_scores(q, state.group_index, call.scale)
    chosen = choose_groups(scores, closed.clamp(max=M)[:, None, None], choice.quota, K)
    return chosen_groups(chosen, choice.quota.at(M))[:, :, 0], chosen[:, :, 0]
