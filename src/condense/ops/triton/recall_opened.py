"""What tiles of queries open: words with a bit per query, and the groups that any query of a tile opens.

Shapes: B rows, K KV heads, L queries, T tiles of queries, r groups that a query opens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.triton.host import cdiv, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_choice import queries_per_program, warps
from condense.ops.triton.recall_choice_kernels import WORDS, recall_list_kernel, recall_mark_kernel

_MARK, _LIST = Launcher(recall_mark_kernel), Launcher(recall_list_kernel)


class Opened(NamedTuple):
    """What T tiles of queries open, for every row and KV head.

    words ``[B * K, T, n]``: bit i of a word says that query i of the tile opens the group; n is the number of closed
    groups, rounded up to a multiple of 64, and the words at the end are 0. groups int32 and of_groups
    ``[B * K, T, room]``: those that any query opens, in rising order, with their words; counts int32 ``[B * K, T]``.
    closed: no query sees more groups as closed.
    """

    words: Tensor
    groups: Tensor
    of_groups: Tensor
    counts: Tensor
    closed: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, as kernels take them."""
        return self[:4]

    @property
    def numbers(self) -> tuple[int, int]:
        """Words that count and room for groups, as kernels take them."""
        return self.closed, self.groups.shape[2]


def opened(groups: Tensor, num_groups: int, closed: int, tile: int, first: int, stop: int) -> Opened:
    """What tiles of ``tile`` queries, 64 at most, of queries ``[first, stop)`` open.

    groups: as `condense.ops.triton.recall_choice.choose` gives them, of ``num_groups`` groups; closed: no query sees
    more groups as closed.
    """
    B, K, L, r = groups.shape
    T, closed = cdiv(stop - first, tile), max(closed, 1)
    room = min(closed, tile * r)
    dtype = torch.int32 if tile <= 32 else torch.int64
    words = torch.zeros(B * K, T, cdiv(closed, WORDS.value) * WORDS.value, dtype=dtype, device=groups.device)
    lists = words.new_empty(B * K, T, room, dtype=torch.int32), words.new_empty(B * K, T, room)
    counts = torch.empty(B * K, T, dtype=torch.int32, device=groups.device)
    with on_device_of(groups):
        places = power_of_2(r)
        queries = queries_per_program(places, groups.is_cuda)
        _MARK(
            (cdiv(stop - first, queries), B * K, 1), (groups, words), (L, num_groups, first, stop, closed, r),
            (tile, places, queries), {"num_warps": warps(places)},
        )  # fmt: skip
        _LIST((T, B * K, 1), (words, *lists, counts), (closed, room), (min(1024, power_of_2(closed)),), {})
    return Opened(words, *lists, counts, closed)
