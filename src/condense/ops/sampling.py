"""Random choices that are a function of seed and place alone: alike in every call, row, head and device.

Shapes: B rows, L columns, S sampled queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 64
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def scramble(places: Tensor, seed: int) -> Tensor:
    """An int64 >= 0 per place (int64, any shape): the mixing function of splitmix64, computed on their device."""
    x = (places + 1) * _signed(_STEP) + _signed(_STEP * seed * seed + _MIX[0][1] * seed)
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 1)


def sampled_queries(start: Tensor, L: int, num_recent: int, num_random: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which queries of right-aligned rows are asked: their columns int64 ``[B, S]``, and which of these exist, bool.

    start int64 ``[B, 1]``: the column of each row's first token. The newest ``num_recent`` queries, and ``num_random``
    of the others, whose places in the row alone decide about them.
    """
    recent = torch.arange(max(0, L - num_recent), L, device=start.device).expand(len(start), -1)
    column = torch.arange(L - recent.shape[1], device=start.device)
    lots = scramble(column - start, seed).masked_fill(column < start, -1)
    drawn, others = lots.topk(min(num_random, len(column)))
    return torch.cat([others, recent], 1), torch.cat([drawn >= 0, recent >= start], 1)


def _signed(word: int) -> int:
    """The int64 with the lowest 64 bits of ``word``."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros, as int64 has no unsigned one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
