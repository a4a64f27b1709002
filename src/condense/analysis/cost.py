"""Keys that a method's queries read, by length: DGA's Figure 5 and LCA's Table 1."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from condense.config import check_int
from condense.methods import Dense, Method
from condense.state import first_entries


@dataclass(frozen=True)
class Cost:
    """One length. keys: entries and tokens that the last query reads. mean_keys: the mean over queries."""

    length: int
    keys: int
    mean_keys: float


def keys_read(method: Method, seen: int) -> int:
    """Number of entries and tokens that a row's query reads when ``seen`` tokens, its own included, have been read.

    Raises ValueError for a method that makes first entries of a prompt: their number depends on more than ``seen``.
    """
    if isinstance(method, Dense):
        return seen
    if first_entries(method, seen) > 0:
        raise ValueError(f"method must read keys whose number follows from the tokens alone, got {method}")
    read = [hi - lo for lo, hi in method.layout.rule.spans(seen)]
    if (choice := method.layout.choice) is not None:
        groups, window = read
        opened = choice.quota.at(groups)
        read = [groups - opened if choice.pool else 0, opened * method.layout.rule.chunk, window]
    return sum(read)


def measure_cost(method: Method, lengths: Sequence[int]) -> list[Cost]:
    """Keys read at each length; means over a few hundred queries, evenly spread. Raises ValueError as `keys_read`."""
    costs = []
    for length in lengths:
        check_int("length", length, 1)
        seen = range(1, length + 1, max(1, length // 512))
        costs.append(Cost(length, keys_read(method, length), statistics.fmean(keys_read(method, n) for n in seen)))
    return costs
