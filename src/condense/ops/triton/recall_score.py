"""Index scores of a block of queries of a prompt: arguments and launches of the kernels.

Shapes: B rows, H query heads, K KV heads, R = H / K, n queries of a block, G groups, D key width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from condense.ops.recall.index import GroupIndex, IndexSettings
from condense.ops.triton.descriptors import descriptor
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.host import cdiv, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_score_kernels import ScoreForm, recall_score_kernel, recall_score_wide_kernel

_SCORE, _SCORE_WIDE = Launcher(recall_score_kernel), Launcher(recall_score_wide_kernel)
# groups of a cell; the best of their scores is kept
CELL = 16
# a tile of scores has at most so many groups
MOST_GROUPS = 128
# queries wider than this are not held in registers
_WIDE = 256


class ScoreTiles(NamedTuple):
    """rows: of a tile of scores.

    columns: rows of the index. options: Triton's. width: columns of a key read at a time.
    """

    rows: int
    columns: int
    options: dict[str, int]
    width: int = 0


@functools.cache
def _tiles(dtype: torch.dtype, is_cuda: bool, width: int, R: int) -> ScoreTiles:
    rows = power_of_2(R)
    if not is_cuda:  # the interpreter
        return ScoreTiles(max(16, rows), 32, {})
    if dtype == torch.float32:
        return ScoreTiles(max(32, rows), 32, {"num_warps": 4, "num_stages": 1})
    return ScoreTiles(128, 64, {"num_warps": 4 if width <= 128 else 8, "num_stages": 1})


def _wide_tiles(dtype: torch.dtype, is_cuda: bool) -> ScoreTiles:
    if not is_cuda:  # the interpreter
        return ScoreTiles(16, 32, {}, 64)
    if dtype == torch.float32:
        return ScoreTiles(32, 64, {"num_warps": 4, "num_stages": 1}, 32)
    return ScoreTiles(128, 256, {"num_warps": 8, "num_stages": 3}, 64)


class Positions(NamedTuple):
    """Positions of a call's queries: `RuleSpans` as `condense.ops.triton.attend_call.describe` returns them."""

    starts: Tensor | None
    rule: tuple[int, ...]

    @property
    def kind(self) -> str:
        """As `condense.ops.triton.device.rule` names it."""
        return "row" if self.starts is None else "rows"


class Scratch(NamedTuple):
    """Scratch memory for a block of n queries. A last block with fewer queries fills the beginning of each tensor.

    score: float32 ``[B * K, cells, n * R, CELL]``, of every group. cell: float32 ``[B * K, cells / 4, n * R, 4]``, the
    best score of every cell. lse: float32 ``[B * K, n * R]``, log-sum-exps. picked: int32 ``[B * K, n, picked]``, the
    cells whose groups are ranked. floor: int32 ``[B * K, n]``, a key that every chosen group reaches.
    """

    score: Tensor
    cell: Tensor
    lse: Tensor
    picked: Tensor
    floor: Tensor


def index_rows(index: GroupIndex, settings: IndexSettings, cells: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of the index as `recall_score_kernel` reads them, in the dtype of the queries.

    bfloat16, float16 and float32 hold codes of 8 bits exactly. The last block of a group is repeated up to a power of
    two.
    """
    m = settings.num_blocks
    codes = index.codes.unflatten(3, (2, m, index.codes.shape[3] // settings.num_rows))
    if settings.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    codes = F.pad(codes, (0, 0, 0, 0, 0, 0, 0, cells * CELL - codes.shape[2]))
    blocks = torch.arange(power_of_2(m), device=codes.device).clamp(max=m - 1)
    # [B, K, cells, CELL / 4, 2, 2, 2, m, D] to [B, K * 2, cells * 2 * m * CELL / 4 * 2, D]
    codes = codes[:, :, :, :, blocks].unflatten(2, (-1, CELL // 4, 2, 2)).permute(0, 1, 6, 2, 4, 7, 3, 5, 8)
    return whole_rows(codes.to(dtype, memory_format=torch.contiguous_format).flatten(3, 7).flatten(1, 2))


def index_grid(index: GroupIndex, cells: int, scale: float) -> Tensor:
    """Steps and zeros times the scale, float32 ``[B, K, cells, 2, CELL]``."""
    grid = F.pad(index.grid * scale, (0, 0, 0, cells * CELL - index.num_groups))
    return grid.unflatten(2, (-1, CELL)).mT.contiguous()


class Scoring(NamedTuple):
    """A block of queries ``[first, stop)`` to score.

    rows, grid: the index from `index_rows` and `index_grid`; grid is None for an index of 16 bits. scratch: receives
    the results. sizes: the kernels' numbers from ``K`` to ``first_entries``. scale: of base-2 scores.
    """

    q: Tensor
    rows: Tensor
    grid: Tensor | None
    settings: IndexSettings
    positions: Positions
    scratch: Scratch
    first: int
    stop: int
    sizes: tuple[int, ...]
    scale: float

    @property
    def heads(self) -> tuple[int, int]:
        """``B * K``, and query heads per KV head."""
        return self.rows.shape[0] * self.sizes[0], self.q.shape[1] // self.sizes[0]

    def form(self, groups: int, steps: int = 0) -> ScoreForm:
        """Constants of Triton's kernels. groups: groups per tile. steps: as in `ScoreForm`."""
        precision = "tf32x3" if self.q.dtype == torch.float32 else "tf32"
        return ScoreForm(power_of_2(self.settings.num_blocks), groups, CELL, self.grid is not None, steps, precision)

    @property
    def grid_ptr(self) -> Tensor:
        """The grid, or any tensor if there is none: kernels cannot put None into a record."""
        return self.scratch.lse if self.grid is None else self.grid


def bytes_per_query(q: Tensor, settings: IndexSettings, cells: int) -> int:
    """Bytes of scratch memory per query in all rows and heads: its scores of ``cells`` cells and, for wide keys, its
    copies in `_score_wide`.
    """
    B, H, _, D = q.shape
    copies = 0 if D <= _WIDE else 3
    return B * H * (cells * CELL * 4 + copies * D * q.element_size())


def score(call: Scoring) -> None:
    """Fill the scratch tensors score, cell and lse."""
    if call.q.shape[3] > _WIDE:
        _score_wide(call)
        return
    q, (heads, R), D = call.q, call.heads, call.q.shape[3]
    tiles, blocks = _tiles(q.dtype, q.is_cuda, D, R), power_of_2(call.settings.num_blocks)
    groups = max(CELL, tiles.columns // blocks)
    _SCORE(
        (cdiv(call.stop - call.first, tiles.rows // R), heads, 1),
        (
            q, descriptor(TensorDescriptor, call.rows, [1, 1, groups * blocks, tile_width(D)]), call.grid_ptr,
            call.positions.starts, *call.scratch[:3],
        ),
        (q.stride()[:3], *call.sizes, call.scale),
        (R, D, tile_width(D), call.positions.kind, tiles.rows, call.form(groups)),
        tiles.options,
    )  # fmt: skip


def _score_wide(call: Scoring) -> None:
    """As `score`, for wide keys: copies the block's queries to adjacent rows."""
    (heads, R), D, n = call.heads, call.q.shape[3], call.stop - call.first
    # [B, H, n, D] to [B * K, n, R, D]
    q = call.q[:, :, call.first : call.stop].unflatten(1, (-1, R)).transpose(2, 3).flatten(0, 1)
    rows = q.new_empty(heads, 2, n, R, D)
    torch.clamp(q, max=0, out=rows[:, 0])
    torch.clamp(q, min=0, out=rows[:, 1])
    tiles, blocks = _wide_tiles(q.dtype, q.is_cuda), power_of_2(call.settings.num_blocks)
    groups = min(MOST_GROUPS, max(CELL, tiles.columns // blocks))
    _SCORE_WIDE(
        (cdiv(n * R, tiles.rows), heads, 1),
        (
            q.sum(3, dtype=torch.float32).contiguous(),
            descriptor(TensorDescriptor, whole_rows(rows.flatten(2, 3)), [1, 1, tiles.rows, tiles.width]),
            descriptor(TensorDescriptor, call.rows, [1, 1, groups * blocks, tiles.width]), call.grid_ptr,
            call.positions.starts, *call.scratch[:3],
        ),
        (*call.sizes, call.scale),
        (R, call.positions.kind, tiles.rows, call.form(groups, cdiv(D, tiles.width))),
        tiles.options,
    )  # fmt: skip
