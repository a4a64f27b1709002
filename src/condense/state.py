"""The state that one layer keeps between calls, and how much of it a method needs.

Shapes: B rows, K KV heads, M condensed entries, N tokens of the window, Q mean queries, D and Dv widths.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.methods import NO_FIRST, FirstEntries, Method
from condense.ops.checks import check_float64
from condense.ops.tensors.per_row import PerRow, at_least, max_row

# Exact tokens and mean queries kept beyond those that the next token needs, so that as many tokens can be taken back
# (`crop` of growing caches): assisted decoding proposes up to 20 at once by default.
SLACK = 20


class LayerState(NamedTuple):
    """The tensors and numbers that one layer keeps between calls; numbers are on the host, so nothing waits for them.

    entries: keys ``[B, K, M, D]`` and values ``[B, K, M, Dv]`` of the condensed entries, left-aligned, or rows of bytes
    if they have fewer than 16 bits (`condense.ops.EntryFormat`); then the method's own tensors as
    `condense.Method.represent` makes them. window_k ``[B, K, N, D]``, window_v ``[B, K, N, Dv]``: exact tokens,
    right-aligned. mean_q ``[B, K, Q, D]``: the newest queries, each the mean over the heads of its KV head,
    right-aligned; a group's summary query is a mean of these. sums float64 ``[B, K, n, Dv]``: sums of the values of a
    row's first groups, right-aligned; the last sum is of all whole groups (`condense.ops.step.StepState`); empty where
    no query sees them. first: entries that stand before those of chunk 0. seen: real tokens per row without those that
    ``first`` stands for; an int if all rows agree, else int64 CPU ``[B]``. fine: keys and values of the newest fine
    entries, rings of `fine_slots` slots; empty for a method without coarse entries.
    """

    entries: tuple[Tensor, ...]
    window_k: Tensor
    window_v: Tensor
    mean_q: Tensor
    sums: Tensor
    seen: PerRow
    first: FirstEntries
    fine: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return *self.entries, self.window_k, self.window_v, self.mean_q, self.sums, *self.fine

    def map(self, change: Callable[[Tensor], Tensor], change_number: Callable[[PerRow], PerRow]) -> Self:
        """The state with ``change`` applied to all tensors and ``change_number`` to the numbers per row."""
        entries, fine = (tuple(map(change, kept)) for kept in (self.entries, self.fine))
        window_k, window_v, mean_q, sums = map(change, (self.window_k, self.window_v, self.mean_q, self.sums))
        seen, first = change_number(self.seen), FirstEntries(*map(change_number, self.first))
        return type(self)(entries, window_k, window_v, mean_q, sums, seen, first, fine)


def empty_state(k: Tensor, v: Tensor) -> LayerState:
    """The state before the first token; k ``[B, K, L, D]`` and v ``[B, K, L, Dv]`` give shapes, dtype and device.

    Raises ValueError for a device without float64.
    """
    check_float64(k.device)
    no_k, no_v = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (k, v))
    sums = k.new_empty((*k.shape[:2], 0, v.shape[3] or k.shape[3]), dtype=torch.float64)
    return LayerState((no_k, no_v), no_k, no_v, no_k, sums, 0, NO_FIRST)


def kept_sums(group_size: int) -> int:
    """Number of sums of values to keep, so that `SLACK` tokens can be taken back."""
    return SLACK // group_size + 2


def fine_slots(method: Method) -> int:
    """Number of fine entries that a method with coarse entries keeps; 0 for other methods."""
    layout = method.layout
    return 0 if layout.coarse_rule is None else layout.coarse_rule.fine_slots(layout.summary_delay, SLACK)


def first_needed(method: Method, seen: PerRow) -> PerRow:
    """Position of the earliest token that the window must still hold once ``seen`` tokens have been read."""
    rule = method.layout.rule
    return rule.closed(at_least(seen, 0)) * rule.chunk


def first_entries(method: Method, tokens: PerRow) -> PerRow:
    """Number of first entries if ``tokens`` tokens (int or int64 CPU ``[B]``) are read at once; in most methods 0."""
    return method.num_entries(tokens) if method.reads_prompt else tokens * 0


def num_entries(method: Method, seen: PerRow, first: PerRow = 0) -> PerRow:
    """Number of entries once ``seen`` tokens have been read: ``first`` first entries, and the entries of chunks.

    The result, seen and first are each an int or int64 CPU ``[B]``.
    """
    rule, delay = method.layout.made
    return rule.pooled(seen, delay) * rule.entries + first


def most_entries(method: Method, tokens: int) -> int:
    """The largest number of condensed entries in a row of up to ``tokens`` tokens, however long its prompt is."""
    return _most_after_prompts(method, tokens) if method.reads_prompt else max_row(num_entries(method, tokens))


@lru_cache(maxsize=64)  # computed once for all layers of a model
def _most_after_prompts(method: Method, tokens: int) -> int:
    prompts = torch.arange(tokens + 1, device="cpu")
    return max_row(num_entries(method, tokens - prompts, first_entries(method, prompts)))
