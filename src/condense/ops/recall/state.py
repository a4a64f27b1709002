"""The contract of one decode step of Recall: the state that it changes in place, and its fixed settings.

A backend's ``recall_step(token, state, settings, *, scale, extras) -> out`` reads one token per row, q, k and v:

1. k and v go into the rings, at ``seen % W``, and the head-mean of q, if entries need it, at ``seen % Q``;
2. with ``n = seen + 1``, group j closes if ``rule.closed(n) = j + 1 > rule.closed(seen)``: if queries see entries, its
   pooled key and value become entry j, as `condense.ops.pool_groups` makes them; its index goes to column j of
   ``codes`` and ``grid``, and its tokens are copied from the rings to columns ``[j * g, (j + 1) * g)`` of the store;
3. the query opens the best ``quota.at(closed)`` of the ``closed = rule.closed(n)`` closed groups, as
   `condense.ops.recall.choose_groups` does;
4. it attends to entries of the other closed groups, to tokens of open groups, and to the tokens from position
   ``rule.closed(n) * g`` on, as `condense.ops.recall.attend_recall` does; where the store has slots, `RecallState` says
   from where tokens of open groups are read;
5. seen becomes n.

A row that is not ``real`` changes nothing and gets 0. Every decision that depends on data is a mask on the device: no
host synchronisation and no branch, so that a step can be traced and captured. A group that closes beyond the capacity
is dropped and never seen.

Shapes: B rows, H query heads, K KV heads, G groups of capacity, g tokens per group, W slots of the rings, S slots of
the store, D and Dv widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.entries import EntryFormat
from condense.ops.recall.choice import Quota
from condense.ops.recall.index import GroupIndex, IndexSettings
from condense.ops.recall.store import StoreFormat
from condense.ops.spans import UniformRule
from condense.ops.types import NewToken, Numbered, Pooling


class RecallState(NamedTuple):
    """Buffers of decode steps, at fixed addresses. All their values are finite, also those that no query sees.

    entries_k ``[B, K, G, D]``, entries_v ``[B, K, G, Dv]``: an entry per closed group, left-aligned; of width 0
    where no query sees them (`RecallSettings.pool`); with fewer than 16 bits rows of bytes, uint8 ``[B, K, G, C]``
    (`condense.ops.entries.EntryFormat`).
    codes, grid: the groups' index, `condense.ops.recall.GroupIndex` with room for G.
    store ``[B, K, N, C]``, N >= G * g: the exact tokens of closed groups, left-aligned, as `StoreFormat` packs them: of
    16 bits a key and its value side by side, C = D + Dv. On the device of the other buffers or in pinned host memory.
    ring_k ``[B, K, W, D]``, ring_v ``[B, K, W, Dv]``: the token at position t of its row stands in slot ``t % W``;
    W is at least window + g, or the most tokens that a row can have if that is less.
    seen int64 ``[B]`` on the device: real tokens per row.
    slots ``[B, K, S * g, C]``: copies of groups that were open lately, for a store in host memory; S may be 0.
    held int32 ``[B, K, S]``: the group in each slot, -1 for none. order int32 ``[B, K, S]``: all slots, the one whose
    group was open the longest ago first. A step reads an open group from its slot if it has one. The other open groups,
    in ascending order, each take the first slot of ``order`` whose group is not open now, while there is one. Then the
    slots that were read move to the end of ``order``, and behind them those that were taken. A row that is not real
    leaves all as it is. Slots decide from where numbers are read, never which numbers.
    ring_q ``[B, K, Q, D]``: head-mean queries in the dtype of q, position t in slot ``t % Q``; Q >= num_summary.
    biases float32 or wider ``[B, K, G, 1]``: the entries' own; ``[B, K, 0, 0]`` unless they are matched.
    """

    entries_k: Tensor
    entries_v: Tensor
    codes: Tensor
    grid: Tensor
    store: Tensor
    ring_k: Tensor
    ring_v: Tensor
    seen: Tensor
    slots: Tensor
    held: Tensor
    order: Tensor
    ring_q: Tensor
    biases: Tensor

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """All that is kept of groups, in the order in which `condense.Recall.represent` makes it."""
        return tuple(getattr(self, name) for name in self.entry_names)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """The names of the `entries`; the store is the last."""
        biases = ("biases",) if self.biases.shape[3] > 0 else ()
        return "entries_k", "entries_v", *biases, "codes", "grid", "store"

    @property
    def group_index(self) -> GroupIndex:
        """The index of all groups."""
        return GroupIndex(self.codes, self.grid)


class EntrySettings(NamedTuple):
    """How the entries of groups are made and weighed.

    key_pooling, value_pooling: as in `condense.ops.pool_groups`; bias: added to the scaled score of every entry, 0.0
    for none; num_summary: queries whose mean scores the tokens of a group, 0 for none; matched: each entry has a bias
    of its own (`condense.methods.base.matched_bias`) in place of ``bias``; bits: of
    `condense.ops.entries.EntryFormat`: of 8 or 4, an entry is rounded when it is made.
    """

    key_pooling: Pooling = "mean"
    value_pooling: Pooling = "mean"
    bias: float = 0.0
    num_summary: int = 0
    matched: bool = False
    bits: int = 16

    @property
    def format(self) -> EntryFormat:
        """How entries are kept."""
        return EntryFormat(self.bits)


@dataclass(frozen=True)
class RecallSettings(Numbered):
    """The settings of the method that a decode step needs.

    rule: one entry per group, none left out. pool: entries of groups that are not open are seen. store_bits: of
    `StoreFormat`.
    """

    rule: UniformRule
    index: IndexSettings
    quota: Quota
    entries: EntrySettings
    pool: bool = True
    store_bits: int = 16

    @property
    def store_format(self) -> StoreFormat:
        """How the tokens of groups are stored."""
        return StoreFormat(self.store_bits, self.rule.chunk)


def check_step(token: NewToken, state: RecallState, settings: RecallSettings) -> None:
    """Raise ValueError for tensors of a step that do not fit together, or a state that is not contiguous."""
    (q, k, v, real, _), (B, K, G, _), entries = token, state.entries_k.shape, settings.entries
    g, D, Dv, form = settings.rule.chunk, k.shape[3], v.shape[3], settings.store_format
    num_codes, num_grid = settings.index.widths(D)
    W, S, codes = state.ring_k.shape[2], state.held.shape[2], q.dtype if settings.index.bits == 16 else torch.uint8
    width, stored = form.width(D, Dv, q.dtype.itemsize), form.dtype(q.dtype)
    of_entries = [entries.format.width(x, q.dtype.itemsize) if settings.pool else 0 for x in (D, Dv)]
    of_entry = entries.format.dtype(q.dtype)
    for name, x, shape, dtype in (
        ("q", q, (B, q.shape[1] // K * K, 1, D), q.dtype),
        ("k", k, (B, K, 1, D), q.dtype),
        ("v", v, (B, K, 1, Dv), q.dtype),
        ("entries_k", state.entries_k, (B, K, G, of_entries[0]), of_entry),
        ("entries_v", state.entries_v, (B, K, G, of_entries[1]), of_entry),
        ("codes", state.codes, (B, K, G, num_codes), codes),
        ("grid", state.grid, (B, K, G, num_grid), torch.float32),
        ("store", state.store, (B, K, max(G * g, state.store.shape[2]), width), stored),
        ("ring_k", state.ring_k, (B, K, W, D), q.dtype),
        ("ring_v", state.ring_v, (B, K, W, Dv), q.dtype),
        ("seen", state.seen, (B,), torch.int64),
        ("slots", state.slots, (B, K, S * g, width), stored),
        ("held", state.held, (B, K, S), torch.int32),
        ("order", state.order, (B, K, S), torch.int32),
        ("ring_q", state.ring_q, (B, K, max(entries.num_summary, state.ring_q.shape[2]), D), q.dtype),
        ("biases", state.biases, (B, K, *((G, 1) if entries.matched else (0, 0))), torch.float32),
    ):
        is_pinned = x is state.store and x.device.type == "cpu" and (x.numel() == 0 or x.is_pinned())
        if x.shape != shape or x.dtype != dtype or not (x.device == q.device or is_pinned):
            raise ValueError(f"{name} must be {shape} in {dtype} on {q.device}, got {tuple(x.shape)} in {x.dtype}")
    for name, x in zip(state._fields, state, strict=True):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
    if real is not None and (real.shape != (B,) or real.is_floating_point() or real.device != q.device):
        raise ValueError(f"real must be bool or integer of shape ({B},) on {q.device}, got {real}")
