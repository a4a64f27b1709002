"""Launch of the kernel that computes index scores for a block of queries of a prompt, and of those that prepare it.

Shapes: B rows, H query heads, K KV heads, R = H / K, n queries of a block, G groups of g tokens, cells of C groups, D
key width.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.recall.index import GroupIndex, rotation
from condense.ops.triton import recall_score_kernels as kernels
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.host import cdiv, dense_rows, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher, of_tile

_SCORE, _ROTATE = Launcher(kernels.recall_score_kernel), Launcher(kernels.recall_rotate_kernel)
_SPREAD = Launcher(kernels.recall_spread_kernel)
# most groups of a tile of scores; most tokens, and most groups, of a cell
MOST_GROUPS, _CELL_TOKENS, _CELL = 128, 128, 16
# a program keeps queries up to this width; wider ones it reads again for every tile of scores, part by part
_WIDE = 128
# no fused multiply-add: products are rounded before they are added, as on a CPU
UNFUSED = {"enable_fp_fusion": False}


class ScoreTiles(NamedTuple):
    """Rows and tokens of a tile of scores, columns of keys that are read at a time, and Triton's launch options."""

    rows: int
    tokens: int
    width: int
    options: dict[str, int]


@functools.cache
def _tiles(D: int, is_cuda: bool) -> ScoreTiles:
    rows, width = 128 if is_cuda else 16, width_at_once(D)  # the interpreter
    if width >= D:
        # few enough registers for three programs per multiprocessor: while one multiplies, others find largest scores
        options = {"num_warps": 4, "num_stages": 3, "maxnreg": 168} if is_cuda else {}
        return ScoreTiles(rows, 128, width, UNFUSED | options)
    return ScoreTiles(rows, 256, width, UNFUSED | {"num_warps": 8, "num_stages": 3})


def _rotation_tile(dtype: torch.dtype, is_cuda: bool) -> tuple[int, torch.dtype]:
    """Rows per tile of `recall_rotate_kernel`, and dtype of the rotation: float32 where the interpreter multiplies."""
    return (64 if dtype == torch.float32 else 128, dtype) if is_cuda else (16, torch.float32)


def width_at_once(D: int) -> int:
    """Columns of queries of width D that a program reads at a time."""
    return max(32, tile_width(D)) if D <= _WIDE else 64


class Scratch(NamedTuple):
    """Scratch memory for a block of n queries. A last block with fewer queries fills the beginning of each tensor.

    score: float32 ``[B * K, cells, n * R, C]``, of every group. cell: float32 ``[B * K, cells / 4, n * R, 4]``, the
    best score of every cell; empty if it is not needed. lse: float32 ``[B * K, stretches, n * R]``, log-sum-exp of the
    scores of each stretch of `STRETCH` groups. picked: int32 ``[B * K, n, picked]``, the cells whose groups are ranked.
    floor: int32 ``[B * K, n]``, a lower bound of the sort keys of all chosen groups.
    """

    score: Tensor
    cell: Tensor
    lse: Tensor
    picked: Tensor
    floor: Tensor


def groups_per_cell(g: int) -> int:
    """Groups per cell, C, for groups of g tokens: few enough that a tile of scores holds whole cells."""
    return min(_CELL, _CELL_TOKENS // power_of_2(g))


class CellIndex(NamedTuple):
    """An index of whole cells as `recall_score_kernel` reads it, zeros for groups past the last.

    signs: int8 ``[B * K, tokens, D]``, 1 and -1. steps: float32 ``[B * K, tokens]``, quantization step of each token.
    The tokens of a cell are ordered ``[token of the group, group]``, so that a thread holds many tokens of its groups.
    centres: int8 ``[B * K, groups, D]``, in steps. of_centres: float32 ``[B * K, groups]``, step of each centre.
    group: tokens per group, rounded up to a power of two; 0 if there are only centres.
    """

    signs: Tensor
    steps: Tensor
    centres: Tensor
    of_centres: Tensor
    group: int


def in_cells(index: GroupIndex, cells: int, C: int, group: int, D: int) -> CellIndex:
    """Expand an index to a `CellIndex` in cells of C groups. group: tokens per group there, to which a group's last
    token is repeated; 0 for centres alone.
    """
    (B, K, G, _), (signs, steps), device = index.steps.shape, (dense_rows(x) for x in index), index.steps.device
    heads, groups, width = B * K, cells * C, _stride(D)
    numbers = [torch.empty(heads, n, width, dtype=torch.int8, device=device) for n in (groups * group, groups)]
    units = [torch.empty(heads, n, dtype=torch.float32, device=device) for n in (groups * group, groups)]
    with on_device_of(steps):
        _SPREAD(
            (cells, heads, 1), (signs, steps, numbers[0], units[0], numbers[1], units[1]),
            (signs.stride()[:3], steps.stride()[:3], K, G, width),
            (index.group_size, group, C, D, power_of_2(4 * cdiv(D, 8))), {},
        )  # fmt: skip
    return CellIndex(numbers[0][..., :D], units[0], numbers[1][..., :D], units[1], group)


def bytes_rotated(q: Tensor) -> int:
    """Bytes that `rotated` returns for one query position, over all rows and heads."""
    B, H, _, D = q.shape
    return B * H * (_stride(D) + 4)


def _stride(D: int) -> int:
    """Stride in bytes of int8 rows of D columns: a multiple of 16, as tensor descriptors need."""
    return cdiv(D, 16) * 16


def rotated(q: Tensor, K: int, scale: float) -> tuple[Tensor, Tensor]:
    """Queries ``[B, H, n, D]`` rotated and rounded to int8 ``[B * K, n * R, D]`` for `recall_score_kernel`, the R heads
    of a query adjacent; and their quantization scales times ``scale``, float32 ``[B * K, n * R]``.
    """
    (B, H, n, D), q = q.shape, dense_rows(q)
    heads, rows, R, width = B * K, n * H // K, H // K, _stride(D)
    numbers = torch.empty(heads, rows, width, dtype=torch.int8, device=q.device)
    unit = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    tile, dtype = _rotation_tile(q.dtype, q.is_cuda)
    _ROTATE(
        (cdiv(rows, tile), heads, 1), (q, rotation(D, q.device, dtype), numbers, unit),
        (q.stride()[:3], K, n, width, scale), (R, D, tile), {"num_warps": 8},
    )  # fmt: skip
    return numbers[..., :D], unit


def score(
    q: Tensor, index: CellIndex, starts: Tensor | None, scratch: Scratch, sizes: tuple[int, ...], *, scale: float
) -> None:
    """Fill the scratch tensors score, lse and, if it has any cells, cell for a block of queries ``[B, H, n, D]``.

    starts: as in `condense.ops.triton.recall_choice.choose`. sizes: the kernel's numbers from K to ``first_entries``.
    scale: of scores, base 2.
    """
    (B, H, n, D), (signs, steps, centres, of_centres, group) = q.shape, index
    K = signs.shape[0] // B
    R, tiles = H // K, _tiles(D, q.is_cuda)
    numbers, unit = rotated(q, K, scale)
    groups, parts, best = min(MOST_GROUPS, tiles.tokens // group), cdiv(D, tiles.width), scratch.cell.numel() > 0
    form = kernels.ScoreForm(group, groups, groups_per_cell(group), tiles.rows, tiles.width, parts, best)
    _SCORE(
        (cdiv(n * R, tiles.rows), B * K, scratch.lse.shape[1]),
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
