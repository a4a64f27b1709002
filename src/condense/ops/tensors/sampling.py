"""Random choices that depend on a seed and a position only, so they agree in every call, row, head and device.

Shapes: B rows, L columns, S sampled queries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 1 << 64
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def scramble(places: Tensor, seed: int) -> Tensor:
    """A pseudo-random int64 >= 0 for each of ``places`` (int64, any shape), by splitmix64's mixing function."""
    x = (places + 1) * _signed(_STEP) + _signed(_STEP * seed * seed + _MIX[0][1] * seed)
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 1)


class Sample(NamedTuple):
    """The sampled queries of right-aligned rows.

    start int64 ``[B, 1]``: the column of each row's first token. columns int64 ``[B, S]``: the queries' columns,
    ascending, -1 where a row has fewer. num_later float32 ``[B, L]``: sampled queries at a column or after it.
    """

    start: Tensor
    columns: Tensor
    num_later: Tensor


@torch.inference_mode(False)
def sample_queries(tokens: Tensor, L: int, num_recent: int, num_random: int, seed: int, device: torch.device) -> Sample:
    """The newest ``num_recent`` queries and ``num_random`` of the others, chosen by seed and position in the row.

    tokens int64 CPU ``[B]``: real tokens per row of L.
    """
    start = (L - tokens).to(device)[:, None]
    recent = torch.arange(max(0, L - num_recent), L, device=device).expand(len(tokens), -1)
    column = torch.arange(L - recent.shape[1], device=device)
    scores = scramble(column - start, seed).masked_fill(column < start, -1)
    drawn, others = scores.topk(min(num_random, len(column)))
    known = torch.cat([drawn >= 0, recent >= start], 1)
    columns = torch.cat([others, recent], 1)
    num_later = torch.zeros(len(tokens), L, dtype=torch.float32, device=device).scatter_add_(1, columns, known.float())
    num_later = num_later.flip(1).cumsum(1).flip(1)
    return Sample(start, columns.masked_fill(~known, -1).sort(dim=1).values, num_later)


def _signed(word: int) -> int:
    """The int64 with the lowest 64 bits of ``word``."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros, as int64 has no unsigned one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
