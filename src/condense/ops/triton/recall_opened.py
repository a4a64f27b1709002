"""The groups that tiles of queries open: words with a bit per query, and lists of the groups that any query opens.

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


class OpenedGroups(NamedTuple):
    """The groups that T tiles of queries open, for every row and KV head.

    words: ``[B * K, T, n]``, a word per group; bit i says whether query i of the tile opens it. n is ``closed`` rounded
    up to a multiple of 64; the words at the end are 0.
    groups: int32 ``[B * K, T, room]``, the groups that any query of the tile opens, in rising order.
    of_groups: ``[B * K, T, room]``, the words of these groups.
    counts: int32 ``[B * K, T]``, how many these are.
    closed: the most closed groups that a query sees.
    """

    words: Tensor
    groups: Tensor
    of_groups: Tensor
    counts: Tensor
    closed: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which kernels take them."""
        return self[:4]

    @property
    def numbers(self) -> tuple[int, int]:
        """``closed`` and ``room``, in the order in which kernels take them."""
        return self.closed, self.groups.shape[2]


def opened(groups: Tensor, num_groups: int, closed: int, tile: int, first: int, stop: int) -> OpenedGroups:
    """Return the groups that tiles of ``tile`` queries open, 64 at most, for queries ``[first, stop)``.

    groups: from `condense.ops.triton.recall_choice.choose`, where ``num_groups`` stands for none. closed: the most
    closed groups that a query sees.
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
    return OpenedGroups(words, *lists, counts, closed)
