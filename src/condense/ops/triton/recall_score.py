"""Index scores of a block of queries of a prompt: arguments and launch of the kernel.

Shapes: B rows, H query heads, K KV heads, R = H / K, n queries of a block, G groups of g tokens, cells of C groups, D
key width.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.recall.index import GroupIndex, rotation
from condense.ops.triton.descriptors import of_tile
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.host import cdiv, dense_rows, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_score_kernels import ScoreForm, recall_score_kernel, recall_turn_kernel

_SCORE, _TURN = Launcher(recall_score_kernel), Launcher(recall_turn_kernel)
# a tile of scores has at most so many groups; a cell has at most so many tokens, and groups
MOST_GROUPS, _CELL_TOKENS, _CELL = 128, 128, 16
# a program holds queries up to this width; it reads wider ones again for every tile of scores, part by part
_WIDE = 128
# products are rounded before they are added, as on a CPU
UNFUSED = {"enable_fp_fusion": False}


class ScoreTiles(NamedTuple):
    """rows, tokens: of a tile of scores. width: columns of keys that are read at a time. options: Triton's."""

    rows: int
    tokens: int
    width: int
    options: dict[str, int]


@functools.cache
def _tiles(D: int, is_cuda: bool) -> ScoreTiles:
    rows, width = 128 if is_cuda else 16, width_at_once(D)  # the interpreter
    if width >= D:
        # as few registers as let a multiprocessor hold three programs: while one multiplies, others find largest scores
        options = {"num_warps": 4, "num_stages": 3, "maxnreg": 168} if is_cuda else {}
        return ScoreTiles(rows, 128, width, UNFUSED | options)
    return ScoreTiles(rows, 256, width, UNFUSED | {"num_warps": 8, "num_stages": 3})


def width_at_once(D: int) -> int:
    """Columns of queries that a program reads at a time."""
    return max(32, tile_width(D)) if D <= _WIDE else 64


class Scratch(NamedTuple):
    """Scratch memory for a block of n queries. A last block with fewer queries fills the beginning of each tensor.

    score: float32 ``[B * K, cells, n * R, C]``, of every group. cell: float32 ``[B * K, cells / 4, n * R, 4]``, the
    best score of every cell; no cells if nobody asks for it. lse: float32 ``[B * K, n * R]``, log-sum-exps. picked:
    int32 ``[B * K, n, picked]``, the cells whose groups are ranked. floor: int32 ``[B * K, n]``, a key that every
    chosen group reaches.
    """

    score: Tensor
    cell: Tensor
    lse: Tensor
    picked: Tensor
    floor: Tensor


def groups_per_cell(g: int) -> int:
    """Groups of a cell, C, the best of whose scores is kept: no more than a tile of scores has."""
    return min(_CELL, _CELL_TOKENS // power_of_2(g))


class CellIndex(NamedTuple):
    """An index of whole cells as `recall_score_kernel` reads it.

    signs int8 ``[B * K, tokens, D]``, 1 and -1; their steps float32 ``[B * K, tokens]``. The tokens of a cell are
    ordered as ``[group, C]``, so that a thread holds all or many tokens of its groups. centres int8 ``[B * K, groups,
    D]``, in steps; of_centres: these, float32 ``[B * K, groups]``. group: tokens per group, a power of two.
    """

    signs: Tensor
    steps: Tensor
    centres: Tensor
    of_centres: Tensor
    group: int


def in_cells(index: GroupIndex, cells: int, D: int) -> CellIndex:
    """The index as `recall_score_kernel` reads it: the last token of a group is repeated up to a power of two."""
    G, g = index.steps.shape[2], index.group_size
    C, group = groups_per_cell(g), power_of_2(g)
    token = torch.arange(group, device=index.steps.device).clamp(max=g - 1)

    def arranged(x: Tensor) -> Tensor:
        """``[B, K, G, g, n]`` to ``[B * K, tokens, n]``, ordered as the kernel says."""
        x = F.pad(x, (0, 0, 0, 0, 0, cells * C - G))[:, :, :, token]
        return x.unflatten(2, (cells, C)).transpose(3, 4).flatten(2, 4).flatten(0, 1)

    signs, steps = index.turned(D, torch.int8), index.steps.float()
    of_tokens = whole_rows(arranged(signs)), arranged(steps[..., :g, None])[..., 0]
    return CellIndex(*of_tokens, *centres_of(index, cells * C, D), group)


def centres_of(index: GroupIndex, count: int, D: int) -> tuple[Tensor, Tensor]:
    """The centres of an index and what one of their steps stands for, int8 ``[B * K, count, D]`` and float32 ``[B * K,
    count]``; those of groups that are not there are 0.
    """
    (_, _, G, _), g = index.steps.shape, index.group_size
    centres = F.pad(index.centres(D, torch.int8), (0, 0, 0, count - G)).flatten(0, 1)
    return whole_rows(centres), F.pad(index.steps[..., g].float(), (0, count - G)).flatten(0, 1)


def bytes_turned(q: Tensor) -> int:
    """Bytes of a query in all rows and heads as `turned` makes it."""
    B, H, _, D = q.shape
    return B * H * (_stride(D) + 4)


def _stride(D: int) -> int:
    """Bytes of a row of whole numbers: as tensor descriptors need it."""
    return cdiv(D, 16) * 16


def turned(q: Tensor, K: int, scale: float) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, n, D]`` as `recall_score_kernel` reads them, int8 ``[B * K, n * R, D]``, the heads of a KV head
    side by side; and what one of their whole numbers stands for, times the scale, float32 ``[B * K, n * R]``.
    """
    (B, H, n, D), q = q.shape, dense_rows(q)
    heads, rows, R, width = B * K, n * H // K, H // K, _stride(D)
    numbers = torch.empty(heads, rows, width, dtype=torch.int8, device=q.device)
    unit = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    tile = 64 if q.is_cuda else 16
    _TURN(
        (cdiv(rows, tile), heads, 1), (q, rotation(D, q.device), numbers, unit),
        (q.stride()[:3], K, n, width, scale), (R, D, tile), {},
    )  # fmt: skip
    return numbers[..., :D], unit


def score(
    q: Tensor, index: CellIndex, starts: Tensor | None, scratch: Scratch, sizes: tuple[int, ...], *, scale: float
) -> None:
    """Fill the scratch tensors score, lse and, if it has any cells, cell for a block of queries ``[B, H, n, D]``.

    starts: as of `condense.ops.triton.recall_choice.choose`. sizes: the kernel's numbers. scale: of base-2 scores.
    """
    (B, H, n, D), (signs, steps, centres, of_centres, group) = q.shape, index
    K = signs.shape[0] // B
    R, tiles = H // K, _tiles(D, q.is_cuda)
    numbers, unit = turned(q, K, scale)
    groups, parts = min(MOST_GROUPS, tiles.tokens // group), cdiv(D, tiles.width)
    form = ScoreForm(group, groups, groups_per_cell(group), tiles.rows, tiles.width, parts, scratch.cell.numel() > 0)
    _SCORE(
        (cdiv(n * R, tiles.rows), B * K, 1),
        (
            unit,
            of_tile(numbers, [1, tiles.rows, tiles.width]),
            of_tile(signs, [1, groups * group, tiles.width]), steps, centres, of_centres,
            starts, *scratch[:3],
        ),
        (centres.stride(1), *sizes),
        (R, D, "row" if starts is None else "rows", form),
        tiles.options,
    )  # fmt: skip
