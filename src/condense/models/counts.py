"""How many entries, tokens and groups a method keeps or reads at a length: the counts of `condense inspect`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from condense.methods import DGA, Dense, Method, Recall
from condense.ops import UniformRule
from condense.state import SLACK, first_entries, first_needed, num_entries


def chooses_from_prompt(method: Method) -> TypeGuard[DGA]:
    """True for DGA that chooses a whole prompt's focal tokens."""
    return isinstance(method, DGA) and method.selection == "prompt"


def first_that(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first number from ``low`` on that holds, with all after it; ``high`` if none below it does.

    `bisect` cannot search lengths beyond 64 bits.
    """
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def sum_closed(rule: UniformRule, length: int, most: int | None) -> int:
    """Number of closed chunks, at most ``most`` (None: all), summed over the queries of a text of ``length`` tokens."""
    if rule.window is None or length <= rule.window:
        return 0
    behind = length - rule.window  # tokens behind the window of the last query; the query before has one less
    counted = behind if most is None else min(behind, most * rule.chunk - 1)
    full, rest = divmod(counted + 1, rule.chunk)
    return rule.chunk * full * (full - 1) // 2 + rest * full + (behind - counted) * (most or 0)


def sum_opened(method: Recall, length: int) -> int:
    """Number of open groups, summed over the queries of a text of ``length`` tokens."""
    rule, quota = method.layout.rule, method.quota
    if quota.part == quota.of:
        return sum_closed(rule, length, quota.most)
    full, rest = divmod(max(0, length - method.window), rule.chunk)
    return rule.chunk * sum(map(quota.at, range(full))) + (rest + 1) * quota.at(full) if full else 0


def cached_counts(method: Method, length: int) -> tuple[int, int]:
    """How many entries and exact tokens, and how many mean queries, a cache keeps on the device, per KV head.

    Exact tokens include those in Recall's store or slots.
    """
    if isinstance(method, Dense):
        return length, 0
    if method.prompt_reader is not None:
        return int(first_entries(method, length)), 0
    exact = min(length, length - int(first_needed(method, length - SLACK)))
    tail = min(length, method.layout.num_summary - 1 + SLACK) if method.layout.num_summary > 1 else 0
    if isinstance(method, Recall):
        exact += method.store_slots * method.group_size
        stored = method.group_size if method.store == "device" else 0
        return int(num_entries(method, length)) * ((method.unchosen == "pool") + stored) + exact, tail
    return int(num_entries(method, length)) + exact, tail


def stored_on_device(method: Recall, length: int) -> int:
    """Tokens per KV head in a store or its slots on the device."""
    groups = int(num_entries(method, length)) if method.store == "device" else method.store_slots
    return groups * method.group_size


def stored_on_host(method: Method, length: int) -> int:
    """Tokens per KV head in host memory."""
    is_there = isinstance(method, Recall) and method.store == "host"
    return int(num_entries(method, length)) * method.layout.rule.chunk if is_there else 0
