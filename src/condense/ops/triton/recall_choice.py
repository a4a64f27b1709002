"""Choice of the groups that each query of a prompt opens, by kernels, one block of queries after the other; and lists
of the groups that any query of a tile opens, with a word per group that has a bit for each query.

Scratch memory, limited in size, holds the scores of one block of queries; only a list of groups per query is kept. The
host is never waited for.

Shapes: B rows, H query heads, K KV heads, L queries, T tiles of queries, G groups of g tokens, r groups that a query
opens, D key width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.recall.choice import Quota
from condense.ops.recall.index import GroupIndex
from condense.ops.triton import recall_choice_kernels as kernels
from condense.ops.triton.host import LOG2E, cdiv, check_programs, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_score import MOST_GROUPS, Scratch, bytes_rotated, groups_per_cell, in_cells, score
from condense.ops.triton.recall_score_kernels import CELLS_PER_LINE, STRETCH

_CELLS, _GROUPS = Launcher(kernels.recall_cells_kernel), Launcher(kernels.recall_groups_kernel)
_MARK, _LIST = Launcher(kernels.recall_mark_kernel), Launcher(kernels.recall_list_kernel)
# most bytes of scratch memory for a block of queries; blocks are multiples of this many queries
_SCRATCH, _BLOCK = 2**30, 128


def queries_per_program(columns: int, is_cuda: bool) -> int:
    """Queries of a program that ranks ``columns`` numbers for each query; on a GPU 512 numbers in all, for one warp."""
    return max(1, min(32, 512 // columns)) if is_cuda else 16


def _ranking_queries(looked: int, is_cuda: bool) -> int:
    """Queries of a program that ranks ``looked`` groups for each query; on a GPU 1 if there are more than 16 groups.

    Where 2 to 16 queries share a warp, Triton 3.6 may reduce over the wrong lanes: seen on an H100 with 32 groups.
    """
    return 1 if is_cuda and looked > 16 else queries_per_program(looked, is_cuda)


def warps(columns: int) -> int:
    """Warps of a program that ranks ``columns`` numbers per query."""
    return 1 if columns <= 1024 else 4


def _scratch(device: torch.device, heads: int, n: int, R: int, cells: int, C: int, picked: int) -> Scratch:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Scratch(
        empty(heads, cells, n * R, C),
        empty(heads, cells // CELLS_PER_LINE.value if picked else 0, n * R, CELLS_PER_LINE.value),
        empty(heads, cdiv(cells * C, STRETCH.value), n * R),
        empty(heads, n, picked, dtype=torch.int32), empty(heads, n, dtype=torch.int32),
    )  # fmt: skip


def choose(
    q: Tensor, signs: Tensor, steps: Tensor, starts: Tensor | None, rule: Sequence[int], scale: float,
    quota: Sequence[int], closed: int,
) -> Tensor:  # fmt: skip
    """Return the groups that each query opens, in rising order, int32 ``[B, K, L, r]`` with r = ``quota.at(closed)``.

    The list of a query that opens fewer is padded with G. q: ``[B, H, L, D]``. signs, steps: of a `GroupIndex`.
    starts, rule: spans as `condense.ops.triton.attend_call.describe` returns them. quota: the numbers of a `Quota`.
    closed: the most closed groups that a query sees, >= 1.
    r >= 1 and scale > 0.
    """
    index, quota, kind = GroupIndex(signs, steps), Quota(*quota), "row" if starts is None else "rows"
    (B, H, L, D), (_, K, G, _), g = q.shape, index.steps.shape, index.group_size
    R, r, heads, C = H // K, quota.at(closed), B * K, groups_per_cell(g)
    check_programs(heads)
    groups = torch.empty(B, K, L, r, dtype=torch.int32, device=q.device)
    cells = cdiv(closed, MOST_GROUPS) * MOST_GROUPS // C
    tokens, ranked = in_cells(index.narrow(0, closed), cells, C, power_of_2(g), D), power_of_2(cells)
    picked = power_of_2(min(r, ranked))
    # if at least as many groups are opened as there are cells, no cell can be skipped
    looked, some = picked * C, picked < ranked
    of_quota = (r, *quota[1:])
    # scores of all cells, and the rotated query in int8
    bytes_per_query = B * H * cells * C * 4 + bytes_rotated(q)
    n = min(L, max(1, _SCRATCH // bytes_per_query // _BLOCK) * _BLOCK)
    scratch = _scratch(q.device, heads, n, R, cells, C, picked if some else 0)
    with on_device_of(q):
        for first in range(0, L, n):
            stop = min(first + n, L)
            sizes = (K, L, G, first, stop, cells, *rule)
            score(q[:, :, first:stop], tokens, starts, scratch, sizes, scale=scale * LOG2E)
            if some:
                _CELLS(
                    (cdiv(stop - first, queries_per_program(ranked, q.is_cuda)), heads, 1),
                    (scratch.cell, scratch.lse, starts, scratch.picked, scratch.floor), (*sizes, *of_quota),
                    (R, kind, C, ranked, picked, queries_per_program(ranked, q.is_cuda)),
                    {"num_warps": warps(ranked)},
                )  # fmt: skip
            _GROUPS(
                (cdiv(stop - first, _ranking_queries(looked, q.is_cuda)), heads, 1),
                (
                    scratch.score, scratch.lse, *((scratch.picked, scratch.floor) if some else (None, None)),
                    starts, groups,
                ),
                (*sizes, *of_quota),
                (R, kind, C, picked, power_of_2(r), _ranking_queries(looked, q.is_cuda)),
                {"num_warps": warps(looked)},
            )  # fmt: skip
    return groups


# `choose` as a torch operation, into which torch.compile does not trace
choice_operation = torch.library.custom_op("condense::choose_recall", choose, mutates_args=())


@choice_operation.register_fake
def _(q: Tensor, signs: Tensor, *others: Any) -> Tensor:
    *_, quota, closed = others
    return q.new_empty(q.shape[0], signs.shape[1], q.shape[2], Quota(*quota).at(closed), dtype=torch.int32)


class OpenedGroups(NamedTuple):
    """The groups that T tiles of queries open, for every row and KV head.

    groups: int32 ``[B * K, T, room]``, the groups that any query of the tile opens, in rising order.
    words: ``[B * K, T, room]``, the word of each of these groups, with a bit per query of the tile (`marked`).
    counts: int32 ``[B * K, T]``, the number of these groups.
    """

    groups: Tensor
    words: Tensor
    counts: Tensor


def marked(
    groups: Tensor, num_groups: int, closed: int, tile: int, first: int, stop: int, asked: Tensor | None = None
) -> Tensor:
    """Return a word for each of ``closed`` groups and each tile of ``tile`` queries, at most 64, of ``[first, stop)``:
    ``[B * K, T, closed]``. Bit i says whether query i of the tile opens the group.

    groups: from `choose`, padded with ``num_groups``. asked: ``queries`` of a `condense.ops.recall.choice.Askers` if
    queries share lists of groups; None if each query has its own.
    """
    (B, K, L, r), dtype = groups.shape, torch.int32 if tile <= 32 else torch.int64
    words = torch.zeros(B * K, cdiv(stop - first, tile), closed, dtype=dtype, device=groups.device)
    places = power_of_2(r)
    queries = queries_per_program(places, groups.is_cuda)
    strides = (0, 0) if asked is None else (asked.stride(0), 0 if asked.shape[1] == 1 else asked.stride(1))
    with on_device_of(groups):
        _MARK(
            (cdiv(stop - first, queries), B * K, 1), (groups, words, asked),
            (K, L, num_groups, first, stop, closed, r, *strides),
            (tile, places, queries), {"num_warps": warps(places)},
        )  # fmt: skip
    return words


def opened(
    groups: Tensor, num_groups: int, closed: int, tile: int, first: int, stop: int, asked: Tensor | None = None
) -> OpenedGroups:
    """Return the groups that tiles of queries open; the arguments are those of `marked`."""
    words = marked(groups, num_groups, closed, tile, first, stop, asked)
    heads, T, _ = words.shape
    room = min(closed, tile * (groups.shape[3] + (asked is not None)))
    lists = words.new_empty(heads, T, room, dtype=torch.int32), words.new_empty(heads, T, room)
    counts = words.new_empty(heads, T, dtype=torch.int32)
    with on_device_of(groups):
        _LIST((T, heads, 1), (words, *lists, counts), (closed, room), (min(1024, power_of_2(closed)),), {})
    return OpenedGroups(*lists, counts)
