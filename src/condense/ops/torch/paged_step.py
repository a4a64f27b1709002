"""One decode step over pages of records, in the `torch` backend: pages are gathered, and the step in buffers is taken.

Nothing depends on numbers that the host would have to wait for, so a step can be traced and captured. Every step reads
all slots that the tables have columns for.

Shapes: R requests, H query heads, K KV heads, G groups that a table has room for, g tokens per group, D and Dv widths.
"""

import torch
from torch import Tensor

from condense.ops.step.call import NewToken, OwnEntries, StepCall
from condense.ops.step.pages import PagedState, Pages
from condense.ops.step.records import record_format
from condense.ops.step.settings import StepSettings
from condense.ops.step.state import StepState, entry_names
from condense.ops.torch import step
from condense.ops.types import Chunks


def store(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float,
    own: OwnEntries,
) -> None:  # fmt: skip
    """Store one token of each request, and the record of a group that it completes.

    q ``[R, H, D]``, which no record needs, k ``[R, K, D]``, v ``[R, K, Dv]``; seen int ``[R]`` on the device: tokens of
    each request, the new one included; 0 for an unused place, where nothing is stored. own: makes what a record holds.
    """
    g, t = settings.rule.chunk, seen.long() - 1
    _write(state.window, t, torch.cat([k, v], dim=2), t >= 0)
    group = (t + 1) // g - 1
    due = (t >= 0) & ((t + 1) % g == 0)
    position = (group * g)[:, None] + torch.arange(g, device=t.device)
    tokens = _read(state.window, position, due[:, None])
    chunks = Chunks(tokens[..., : k.shape[2]], tokens[..., k.shape[2] :], 0, 1, g, group[:, None])
    kept = step.packed(own.represent(chunks, None, scale=scale, backend="torch"), settings)
    form = record_format(settings, (k.shape[2], v.shape[2]), k.dtype)
    records = form.pack(dict(zip(entry_names(settings), kept, strict=True)))
    _write(state.entries, group, records[:, :, 0], due)


def attend(
    q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor, own: OwnEntries
) -> None:
    """Write the attention of one token q ``[R, H, D]`` of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for
    unused places.
    """
    seen = seen.long()
    buffers = _gathered(state, q.shape[2], seen, settings)
    rows = q[:, :, None]
    call = StepCall(NewToken(rows, rows[:, :0], rows[:, :0]), buffers, settings, scale)
    out.copy_(step.attend(call, seen, seen > 0, own)[0][:, :, 0])


def _gathered(state: PagedState, D: int, seen: Tensor, settings: StepSettings) -> StepState:
    """The buffers that requests of ``seen`` tokens would have: zeros where queries see nothing."""
    rule, cache = settings.rule, state.window.cache
    assert rule.window is not None
    closed, room = rule.closed(seen)[:, None], state.entries.table.shape[1] * state.entries.slots
    group = torch.arange(room, device=seen.device).expand(len(seen), room)
    position = step.ring_positions(seen, rule.window + rule.chunk)
    tokens = _read(state.window, position, position >= closed * rule.chunk)
    form = record_format(settings, (D, cache.shape[3] - D), cache.dtype)
    parts = form.unpack(_read(state.entries, group, group < closed))
    empty = tokens.new_zeros(len(seen), cache.shape[1], 0, 0)
    # parts that no record holds, such as entries that no query sees, have room for groups and no columns
    nothing = tokens.new_zeros(len(seen), cache.shape[1], room, 0)
    buffers = dict.fromkeys(StepState._fields, empty) | dict.fromkeys(entry_names(settings), nothing)
    buffers |= {"ring_k": tokens[..., :D], "ring_v": tokens[..., D:], "seen": seen, "held": empty.flatten(2), **parts}
    return StepState(**buffers)


def _write(pages: Pages, slot: Tensor, new: Tensor, chosen: Tensor) -> None:
    """Write ``new`` ``[R, K, C]`` to slot ``slot`` ``[R]`` of each of the ``chosen`` requests."""
    # a place that is not chosen repeats the write of the first that is: any other slot may be one that is written
    row = torch.where(chosen, torch.arange(len(slot), device=slot.device), chosen.int().argmax())
    slot, new = slot.clamp(min=0)[row], new[row]
    page, at = pages.table[row, slot // pages.slots].long(), slot % pages.slots
    pages.cache[page, :, at] = torch.where(chosen.any(), new, pages.cache[page, :, at])


def _read(pages: Pages, slot: Tensor, inside: Tensor) -> Tensor:
    """Slots ``slot`` ``[R, n]`` of each request, ``[R, K, n, C]``; zeros where not inside."""
    slot = torch.where(inside, slot, 0)
    page = pages.table.gather(1, slot // pages.slots).long()
    rows = torch.where(inside[..., None, None], pages.cache[page, :, slot % pages.slots], 0)
    return rows.transpose(1, 2)
