"""The arguments that operations share; and the contract of one decode step: its state, changed in place, its settings.

A backend's ``step(token, state, settings, *, scale, latent, extras) -> out`` reads one token per row
(that of the torch backend also takes `OwnEntries`, for methods whose settings do not say how entries are made):

1. k, v and the head-mean of q (`condense.ops.tensors.right_aligned.head_mean`) go into the rings, at ``seen % size``;
2. with ``n = seen + 1`` and d the rule's ``summary_delay``, chunk j is due if ``rule.pooled(n, d) = j + 1 >
   rule.pooled(seen, d)``; its entries, made of its tokens and the mean of the newest ``num_summary`` queries, go to
   ``[a + p * j, a + p * (j + 1))`` of the entries (and of their biases), after the row's a first entries;
3. the query attends to entries ``[0, a + rule.visible_entries(closed))`` and to the tokens from position
   ``closed * c`` on, ``closed = rule.closed(n)``, as `condense.ops.attend` does;
4. seen becomes n.

A row that is not ``real`` changes nothing and gets 0; a query that sees nothing gets 0. Every decision that depends on
data is a mask on the device: no host synchronisation and no branch, so that a step can be traced and captured.
A chunk whose entries do not all fit into the buffers is dropped and never seen.

Shapes: B rows, H query heads, K KV heads, M entries of capacity, W and Q slots of the rings of tokens and of queries,
c tokens per chunk, p entries per chunk, D and Dv widths.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from condense.ops.entries import EntryFormat
from condense.ops.spans import UniformRule
from condense.ops.tensors.per_row import PerRow, as_rows, int_if_equal
from condense.ops.tensors.right_aligned import chunks

Pooling = Literal["weighted", "mean", "max", "select"]
POOLINGS: tuple[Pooling, ...] = ("weighted", "mean", "max", "select")


class Chunks(NamedTuple):
    """G chunks of ``size`` tokens each in the window, window_k ``[B, K, N, D]`` and window_v ``[B, K, N, Dv]``.

    columns: where in the window each chunk begins, >= 0. numbers: how many chunks come before it in its row or packed
    document. Both are int64 ``[B|1, G]`` on the device of the window; or an int, the value of the first chunk, if the
    chunks follow one another without gaps and alike in all rows.
    """

    window_k: Tensor
    window_v: Tensor
    columns: int | Tensor
    num: int
    size: int
    numbers: int | Tensor

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, G, c, D]`` and values ``[B, K, G, c, Dv]``."""
        k, v = (chunks(x, self.columns, self.num, self.size) for x in (self.window_k, self.window_v))
        return k, v


# `condense.Method.represent`
Represent = Callable[..., tuple[Tensor, ...]]


class NewToken(NamedTuple):
    """A new token of every row: q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]`` in the dtype of the state.

    For latents Dv is 0: their values are columns of their keys. real: rows whose token counts, bool or integer ``[B]``;
    None: all. counter: int64 ``[]`` on the device, to which the step adds 1, whichever rows are real; None: nothing is
    counted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None = None
    counter: Tensor | None = None


class OwnEntries(NamedTuple):
    """How a method makes its entries, for methods that `StepSettings` cannot describe.

    represent: `condense.Method.represent`. bias: float ``[B|1, 1, M]``, used in place of the bias in the settings;
    None: the settings' bias is used.
    """

    represent: Represent
    bias: Tensor | None = None


class SummarySpans(NamedTuple):
    """Queries whose means are summaries: span j holds positions ``[start + stride * j, start + stride * j + size)``.

    start: where span 0 begins. Positions below 0 do not count. before, after: real tokens of the row before and after
    the new queries were read. num: number of spans G >= 1.
    """

    start: PerRow
    before: PerRow
    after: PerRow
    num: int
    size: int
    stride: int

    def int_if_equal(self) -> tuple[int, int, int] | None:
        """start, before and after if they are the same in all rows."""
        start, before, after = (int_if_equal(x) for x in self[:3])
        if isinstance(start, Tensor) or isinstance(before, Tensor) or isinstance(after, Tensor):
            return None
        return start, before, after

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """start, before and after of each row, int64 CPU ``[B]``."""
        return as_rows(self.start, num_rows), as_rows(self.before, num_rows), as_rows(self.after, num_rows)


class SummaryColumns(NamedTuple):
    """Queries whose means are summaries, in one row of packed documents: span j holds columns ``[lo[j], hi[j])`` of q.

    lo, hi: int64 ``[G]`` on the device of q, hi > lo; neither ever decreases. size: the most columns in any span.
    """

    lo: Tensor
    hi: Tensor
    size: int

    @property
    def num(self) -> int:
        """Number of spans G."""
        return self.lo.shape[0]


class Problem(NamedTuple):
    """The sizes of a call that a backend may have limits for.

    widths: of keys and values. rows, heads: of q; rows is 0 if they are not known. kv_heads: of k. softcap: as in
    `condense.ops.Extras`.
    """

    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, ...]
    num_queries: int = 2
    dropout_p: float = 0.0
    rows: int = 0
    heads: int = 1
    kv_heads: int = 1
    num_sources: int = 2
    softcap: float = 0.0

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class StepState(NamedTuple):
    """Buffers of decode steps, at fixed addresses. All their values are finite, also those that no query sees.

    entries_k ``[B, K, M, D]``, entries_v ``[B, K, M, Dv]``: entries, left-aligned, made by the step that pools a chunk;
    with fewer than 16 ``entry_bits`` rows of bytes, uint8 ``[B, K, M, C]`` (`condense.ops.entries.EntryFormat`).
    ring_k ``[B, K, W, D]``, ring_v ``[B, K, W, Dv]``: the token at position t of its row stands in slot ``t % W``;
    W is at least window + chunk, or the most tokens that a row can have if that is less.
    ring_q ``[B, K, Q, D]``: head-mean queries in the dtype of q, position t in slot ``t % Q``; Q >= num_summary.
    With larger rings, up to ``W - window - chunk`` tokens and ``Q - num_summary + 1`` queries can be taken back by
    lowering ``seen``: slots and entries past it are overwritten before they are seen again.
    seen int64 ``[B]`` on the device: real tokens per row, but for those of first entries; positions count them.
    first int64 ``[B, 2]`` on the device: the first entries, which stand before those of chunk 0, and how many of these
    stand for single tokens and have no bias (`condense.methods.FirstEntries`); zeros for most methods.
    arrived int32 ``[B, K + 1]`` on the device: counters of the parts of a step that are done; 0 between steps.
    biases float32 or wider ``[B, K, M, 1]``, contiguous: each entry's own bias; ``[B, K, 0, 1]`` if they have none
    (`StepSettings.matched`).
    """

    entries_k: Tensor
    entries_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_q: Tensor
    seen: Tensor
    first: Tensor
    arrived: Tensor
    biases: Tensor

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """All that is kept of entries, in the order in which `condense.Method.represent` makes it."""
        return tuple(getattr(self, name) for name in self.entry_names)

    @property
    def entry_names(self) -> tuple[str, ...]:
        """The names of the `entries`."""
        return ("entries_k", "entries_v", "biases")[: 3 if self.biases.shape[2] > 0 else 2]


class Numbered:
    """Mixin for frozen dataclasses of settings: gives each a number, because a torch operation cannot take an object.

    The operation gets the number and finds the settings by `numbered_settings`.
    """

    def __post_init__(self) -> None:
        """Enter the settings into the table that `numbered_settings` reads."""
        assert _NUMBERED.setdefault(self.number, self) == self

    @functools.cached_property
    def number(self) -> int:
        """An int that stands for these settings in a torch operation's arguments; the same in every process."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest())

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Unpickle by calling the class, so that the settings enter the table of that process."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepSettings(Numbered):
    """The settings of a method that a decode step needs.

    key_pooling, value_pooling: how a chunk's last entry is made; None if only ``represent`` can make it.
    bias: added to the scaled score of every pooled entry, 0.0 for none.
    num_focal: how many tokens of a chunk become entries of their own: those with the highest scores, ties to the
    earlier; they come first, in order of position. The others are pooled. weight_scale: scale of a chunk's scores,
    None: attention's. has_first: True if rows may have first entries, so that ``StepState.first`` is read.
    matched: each entry has a bias of its own (`condense.methods.base.matched_bias`) in place of ``bias``.
    entry_bits: of `condense.ops.entries.EntryFormat`; of 8 or 4 bits, an entry is rounded when it is made.
    """

    rule: UniformRule
    summary_delay: int
    num_summary: int
    key_pooling: Pooling | None
    value_pooling: Pooling | None
    bias: float
    num_focal: int = 0
    weight_scale: float | None = None
    has_first: bool = False
    matched: bool = False
    entry_bits: int = 16

    @property
    def entry_format(self) -> EntryFormat:
        """How entries are kept."""
        return EntryFormat(self.entry_bits)

    @property
    def bias_differs(self) -> bool:
        """True if some entries have ``bias`` and others none."""
        return self.bias != 0.0 and (self.num_focal > 0 or self.has_first)


_NUMBERED: dict[int, Any] = {}


def numbered_settings(number: int) -> Any:
    """The settings that have this number (`Numbered`)."""
    return _NUMBERED[number]
