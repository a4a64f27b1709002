"""The contract of one decode step over a static cache: the state that it changes in place, and its fixed settings.

A backend's ``step(q, k, v, state, plan, *, scale, real, represent) -> out`` reads one token per row:

1. k, v and the head-mean of q (`condense.ops.aligned.head_mean`) go into the rings, at ``seen % size``;
2. with ``n = seen + 1``, chunk j is due if ``rule.ready(n, lag) = j + 1 > rule.ready(seen, lag)``; its entries, made
   of its tokens and the mean of the newest ``num_summary`` queries, go to ``[p * j, p * (j + 1))`` of the prefix;
3. the query attends to prefix entries ``[0, rule.visible_entries(closed))`` and to the tokens from position
   ``closed * c`` on, ``closed = rule.closed(n)``, as `condense.ops.attend` does;
4. seen becomes n.

A row that is not ``real`` changes nothing and gets 0; a query that sees nothing gets 0. What depends on data is a
predicate on the device: no host synchronisation and no branch, so that a step can be traced and captured.
Entries beyond the prefix's capacity are dropped and never seen.

Shapes: B rows, H query heads, K KV heads, M prefix entries, W ring slots, Q summary queries, c tokens per chunk,
p entries per chunk, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from condense.ops.bounds import UniformRule

if TYPE_CHECKING:
    from condense.ops.api import Pooling

# `condense.methods.Method.represent`
Represent = Callable[..., tuple[Tensor, Tensor]]


class StepState(NamedTuple):
    """Buffers at fixed addresses. Whatever stands in them, seen or not, is finite.

    prefix_k ``[B, K, M, D]``, prefix_v ``[B, K, M, Dv]``: entries, left-aligned, made at once when they can be.
    ring_k ``[B, K, W, D]``, ring_v ``[B, K, W, Dv]``: the token at position t of its row stands in slot ``t % W``;
    W is window + chunk, or the most tokens that a row can have if that is less.
    ring_q ``[B, K, Q, D]``: head-mean queries in the dtype of q, position t in slot ``t % Q``; Q = num_summary.
    seen int64 ``[B]`` on the device: real tokens per row.
    """

    prefix_k: Tensor
    prefix_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_q: Tensor
    seen: Tensor


@dataclass(frozen=True)
class StepPlan:
    """What a method is, as far as a step must know it.

    key_pooling, value_pooling: how a chunk becomes its one entry, or None where only ``represent`` knows.
    group_bias: natural log added to the scaled score of every prefix entry, 0.0 for none.
    """

    rule: UniformRule
    lag: int
    num_summary: int
    key_pooling: Pooling | None
    value_pooling: Pooling | None
    group_bias: float
