"""The cost of a method's attention: keys read per token (DGA's Figure 5, LCA's Table 1), and measured times.

Shapes: B rows (1), H query heads, K KV heads, L tokens, D width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from condense.config import check_int
from condense.functional import attention
from condense.methods import Dense, Method, Recall
from condense.models.stopwatch import now


class Heads(NamedTuple):
    """Heads of one layer: H query heads, K KV heads of width D."""

    H: int
    K: int
    D: int


@dataclass(frozen=True)
class Cost:
    """One method at one length. keys: entries and tokens that the last query reads; mean_keys: the mean over queries.

    seconds: attention over the whole text, median of ``repeats`` calls; None above ``longest`` tokens
    (`measure_cost`).
    """

    method: Method
    length: int
    keys: int
    mean_keys: float
    seconds: float | None


def keys_read(method: Method, seen: int) -> int:
    """Number of entries and tokens that a row's query reads when ``seen`` tokens, its own included, have been read.

    Raises ValueError for a method that reads whole prompts: how many keys it reads depends on more than ``seen``.
    """
    if isinstance(method, Dense):
        return seen
    if method.prompt_reader is not None:
        raise ValueError(f"method must read keys whose number follows from the tokens alone, got {method}")
    read = [hi - lo for lo, hi in method.layout.rule.spans(seen)]
    if isinstance(method, Recall):
        groups, window = read
        opened = method.quota.at(groups)
        read = [groups - opened if method.unchosen == "pool" else 0, opened * method.group_size, window]
    return sum(read)


def measure_cost(
    heads: Heads,
    methods: Sequence[Method],
    lengths: Sequence[int],
    *,
    longest: int = 8192,
    repeats: int = 3,
    device: torch.device | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[Cost]:
    """Keys and times of one layer's attention over random q, k and v, for each method and length.

    longest: the largest length that is timed. on_step is called after every method and length.
    Raises ValueError for counts below 1, and as `keys_read`.
    """
    check_int("repeats", repeats, 1)
    found = []
    for length in lengths:
        check_int("length", length, 1)
        generator = torch.Generator().manual_seed(length)
        shapes = ((heads.H, length), (heads.K, length), (heads.K, length))
        q, k, v = (torch.randn(1, n, L, heads.D, generator=generator).to(device) for n, L in shapes)
        for method in methods:
            seconds = None
            if length <= longest:
                with torch.no_grad():
                    times = [_timed(q, k, v, method) for _ in range(repeats + 1)]
                seconds = statistics.median(times[1:])
            # the mean over queries from a few hundred of them, evenly spread
            seen = range(1, length + 1, max(1, length // 512))
            mean = statistics.fmean(keys_read(method, n) for n in seen)
            found.append(Cost(method, length, keys_read(method, length), mean, seconds))
            on_step()
    return found


def _timed(q: Tensor, k: Tensor, v: Tensor, method: Method) -> float:
    start = now(q.device)
    attention(q, k, v, method=method)
    return now(q.device) - start
