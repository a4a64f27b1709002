"""State and plan of one decode step at fixed addresses.

Shapes: B rows, K KV heads, M entries of capacity, W ring slots, Q summary queries, D and Dv widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from condense.ops.api import Pooling
from condense.ops.bounds import UniformRule


class StepState(NamedTuple):
    """What a step reads and writes in place.

    prefix_k ``[B, K, M, D]``, prefix_v ``[B, K, M, Dv]``: entries, left-aligned. ring_k ``[B, K, W, D]``,
    ring_v ``[B, K, W, Dv]``: the token at position t of a row in slot ``t % W``, W >= window + chunk.
    ring_q ``[B, K, Q, D]``: mean query of the KV head's heads at position t, in slot ``t % Q``. seen int64 ``[B]``.
    """

    prefix_k: Tensor
    prefix_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_q: Tensor
    seen: Tensor


@dataclass(frozen=True)
class StepPlan:
    """What a method says about a step: who sees what, and how a chunk becomes an entry."""

    rule: UniformRule
    lag: int
    num_summary: int
    key_pooling: Pooling | None
    value_pooling: Pooling | None
    group_bias: float
