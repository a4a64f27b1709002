"""The groups that each query of a prompt opens, chosen by kernels block of queries by block.

Scores of a block of queries stand in scratch memory of a fixed size; what is kept is a list of groups per query. No
wait for the host.

Shapes: B rows, H query heads, K KV heads, L queries, G groups, r groups that a query opens, D key width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from condense.ops.recall.choice import Quota
from condense.ops.recall.index import GroupIndex, IndexKind, IndexSettings
from condense.ops.triton.descriptors import descriptor
from condense.ops.triton.device.parts import tile_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_choice_kernels import (
    CHUNK,
    recall_cells_kernel,
    recall_groups_kernel,
    recall_score_kernel,
    recall_score_wide_kernel,
)

_SCORE, _SCORE_WIDE = Launcher(recall_score_kernel), Launcher(recall_score_wide_kernel)
_CELLS, _GROUPS = Launcher(recall_cells_kernel), Launcher(recall_groups_kernel)
# groups of a cell, of which the best score is kept
CELL = 16
# bytes of the scores of a block of queries, which are a multiple of so many
_SCRATCH, _BLOCK = 2**31, 128
# a tile of scores has at most so many groups
_MOST_GROUPS = 128


# queries wider than this are not held in registers
_WIDE = 256


class Tiles(NamedTuple):
    """Rows of a tile of scores and of the index, Triton's options, and columns of a key that are read at a time."""

    rows: int
    columns: int
    options: dict[str, int]
    width: int = 0


@functools.cache
def _tiles(dtype: torch.dtype, is_cuda: bool, width: int, R: int) -> Tiles:
    rows = power_of_2(R)
    if not is_cuda:  # the interpreter
        return Tiles(max(16, rows), 32, {})
    if dtype == torch.float32:
        return Tiles(max(32, rows), 32, {"num_warps": 4, "num_stages": 1})
    return Tiles(128, 64, {"num_warps": 4 if width <= 128 else 8, "num_stages": 1})


def _wide_tiles(dtype: torch.dtype, is_cuda: bool) -> Tiles:
    if not is_cuda:  # the interpreter
        return Tiles(16, 32, {}, 64)
    if dtype == torch.float32:
        return Tiles(32, 64, {"num_warps": 4, "num_stages": 1}, 32)
    return Tiles(128, 256, {"num_warps": 8, "num_stages": 3}, 64)


def queries_per_program(columns: int, is_cuda: bool) -> int:
    """Queries of a program that ranks ``columns`` numbers for each: one warp on a GPU."""
    return max(1, min(32, 512 // columns)) if is_cuda else 16


def _ranking_queries(looked: int, is_cuda: bool) -> int:
    """Queries of a program that ranks ``looked`` groups of cells for each: one beyond 64 groups.

    Then a row of scores has all lanes of the warp. With 2 or 4 queries its lanes would not be adjacent (lanes of a
    cell, queries, cells), and Triton 3.6 reduces such a row over the wrong lanes.
    """
    return 1 if is_cuda and looked > 64 else queries_per_program(looked, is_cuda)


def warps(columns: int) -> int:
    """Warps of such a program."""
    return 1 if columns <= 1024 else 4


class Positions(NamedTuple):
    """Where a call's queries stand: what `condense.ops.triton.attend_call.describe` makes of `RuleSpans`."""

    starts: Tensor | None
    rule: tuple[int, ...]

    @property
    def kind(self) -> str:
        """As `condense.ops.triton.device.rule` names it."""
        return "row" if self.starts is None else "rows"


class _Scratch(NamedTuple):
    """Of n queries: score ``[B * K, cells, n * R, CELL]``, best score of every cell ``[B * K, cells / 4, n * R, 4]``,
    log-sum-exp ``[B * K, n * R]``, all float32; the cells to look into, int32 ``[B * K, n, picked]``, and what their
    groups must reach, int32 ``[B * K, n]``. Room for so many; a block with fewer queries begins at the same places.
    """

    score: Tensor
    cell: Tensor
    lse: Tensor
    picked: Tensor
    floor: Tensor


def _scratch(device: torch.device, heads: int, n: int, R: int, cells: int, picked: int) -> _Scratch:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return _Scratch(
        empty(heads, cells, n * R, CELL), empty(heads, cells // CHUNK.value, n * R, CHUNK.value), empty(heads, n * R),
        empty(heads, n, picked, dtype=torch.int32), empty(heads, n, dtype=torch.int32),
    )  # fmt: skip


def _index_rows(index: GroupIndex, settings: IndexSettings, cells: int, dtype: torch.dtype) -> Tensor:
    """The index of ``cells`` cells as numbers of the dtype of the queries, as `recall_score_kernel` reads it: codes of
    8 bits are exact in all. The last block is repeated up to a power of two.
    """
    m = settings.num_blocks
    codes = index.codes.unflatten(3, (-1, m, index.codes.shape[3] // settings.num_rows))
    if settings.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    codes = F.pad(codes, (0, 0, 0, 0, 0, 0, 0, cells * CELL - codes.shape[2]))
    blocks = torch.arange(power_of_2(m), device=codes.device).clamp(max=m - 1)
    # [B, K, cells, CELL / 4, 2, 2, F / m, m, D] to [B, K * F / m, cells * 2 * m * CELL / 4 * 2, D]
    codes = codes[:, :, :, :, blocks].unflatten(2, (-1, CELL // 4, 2, 2)).permute(0, 1, 6, 2, 4, 7, 3, 5, 8)
    return whole_rows(codes.to(dtype, memory_format=torch.contiguous_format).flatten(3, 7).flatten(1, 2))


def _grid(index: GroupIndex, cells: int, scale: float) -> Tensor:
    """Steps and zeros times the scale, float32 ``[B, K, cells, 2, CELL]``."""
    grid = F.pad(index.grid * scale, (0, 0, 0, cells * CELL - index.num_groups))
    return grid.unflatten(2, (-1, CELL)).mT.contiguous()


class Scoring(NamedTuple):
    """A block of queries to score: what all blocks of a call share, and where the results go.

    rows, grid: the index, as `_index_rows` and `_grid` make it, no grid of 16 bits; sizes: what the kernels take as
    numbers, from K to the rule; scale: of base-2 scores.
    """

    q: Tensor
    rows: Tensor
    grid: Tensor | None
    settings: IndexSettings
    positions: Positions
    scratch: _Scratch
    first: int
    stop: int
    sizes: tuple[int, ...]
    scale: float

    @property
    def heads(self) -> tuple[int, int]:
        """Rows times KV heads, and query heads per KV head."""
        return self.rows.shape[0] * self.sizes[0], self.q.shape[1] // self.sizes[0]

    @property
    def constants(self) -> tuple[bool, bool, str, str]:
        """What the kernels are compiled for: bounds or not, a grid or none, kind of positions, precision."""
        precision = "tf32x3" if self.q.dtype == torch.float32 else "tf32"
        return self.settings.kind == "bounds", self.grid is not None, self.positions.kind, precision

    @property
    def grid_ptr(self) -> Tensor:
        """The grid, or any tensor: kernels that get records cannot get None."""
        return self.scratch.lse if self.grid is None else self.grid


def score(call: Scoring) -> None:
    """Fills the first three of the scratch tensors."""
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
        (R, call.settings.num_blocks, blocks, D, tile_width(D), *call.constants, tiles.rows, groups, CELL),
        tiles.options,
    )  # fmt: skip


def _score_wide(call: Scoring) -> None:
    """The same for wide keys: rows of queries, one behind the other, are made for the block."""
    (heads, R), D, n = call.heads, call.q.shape[3], call.stop - call.first
    # [B, H, n, D] to [B * K, n, R, D]
    q = call.q[:, :, call.first : call.stop].unflatten(1, (-1, R)).transpose(2, 3).flatten(0, 1)
    is_bounds = call.settings.kind == "bounds"
    rows = q.new_empty(heads, 2 if is_bounds else 1, n, R, D)
    if is_bounds:
        torch.clamp(q, max=0, out=rows[:, 0])
        torch.clamp(q, min=0, out=rows[:, 1])
    else:
        rows[:, 0] = q
    tiles, blocks = _wide_tiles(q.dtype, q.is_cuda), power_of_2(call.settings.num_blocks)
    groups = min(_MOST_GROUPS, max(CELL, tiles.columns // blocks))
    _SCORE_WIDE(
        (cdiv(n * R, tiles.rows), heads, 1),
        (
            q.sum(3, dtype=torch.float32).contiguous(),
            descriptor(TensorDescriptor, whole_rows(rows.flatten(2, 3)), [1, 1, tiles.rows, tiles.width]),
            descriptor(TensorDescriptor, call.rows, [1, 1, groups * blocks, tiles.width]), call.grid_ptr,
            call.positions.starts, *call.scratch[:3],
        ),
        (*call.sizes, call.scale),
        (R, call.settings.num_blocks, blocks, cdiv(D, tiles.width), *call.constants, tiles.rows, groups, CELL),
        tiles.options,
    )  # fmt: skip


def choose(
    q: Tensor, index: GroupIndex, settings: IndexSettings, positions: Positions, *, scale: float, quota: Quota,
    closed: int, score: Callable[[Scoring], None] = score,
) -> Tensor:  # fmt: skip
    """The groups that each query opens, in rising order, int32 ``[B, K, L, r]`` with r = ``quota.at(closed)``; G where
    there are fewer.

    q ``[B, H, L, D]``; closed: no query sees more groups as closed; score: the function that scores a block of queries.
    1 <= r; scale > 0.
    """
    q = whole_rows(q)
    (B, H, L, _), (_, K, G, _) = q.shape, index.codes.shape
    R, r, heads = H // K, quota.at(closed), B * K
    check_programs(heads)
    groups = torch.empty(B, K, L, r, dtype=torch.int32, device=q.device)
    cells = cdiv(max(closed, 1), _MOST_GROUPS) * _MOST_GROUPS // CELL
    index, ranked = index.narrow(0, closed), power_of_2(cells)
    rows = _index_rows(index, settings, cells, q.dtype)
    grid = _grid(index, cells, scale * LOG2E) if settings.bits < 16 else None
    picked = power_of_2(min(r, ranked))
    looked = picked * CELL
    of_quota = (r, quota.part, quota.of)
    n = min(L, max(1, _SCRATCH // (heads * R * cells * CELL * 4) // _BLOCK) * _BLOCK)
    scratch = _scratch(q.device, heads, n, R, cells, picked)
    with on_device_of(q):
        for first in range(0, L, n):
            stop = min(first + n, L)
            sizes = (K, L, G, first, stop, cells, *positions.rule)
            score(Scoring(q, rows, grid, settings, positions, scratch, first, stop, sizes, scale * LOG2E))
            _CELLS(
                (cdiv(stop - first, queries_per_program(ranked, q.is_cuda)), heads, 1),
                (scratch.cell, scratch.lse, positions.starts, scratch.picked, scratch.floor), (*sizes, *of_quota),
                (R, positions.kind, CELL, ranked, picked, queries_per_program(ranked, q.is_cuda)),
                {"num_warps": warps(ranked)},
            )  # fmt: skip
            _GROUPS(
                (cdiv(stop - first, _ranking_queries(looked, q.is_cuda)), heads, 1),
                (scratch.score, scratch.lse, scratch.picked, scratch.floor, positions.starts, groups),
                (*sizes, *of_quota),
                (R, positions.kind, CELL, picked, power_of_2(r), _ranking_queries(looked, q.is_cuda)),
                {"num_warps": warps(looked)},
            )  # fmt: skip
    return groups


def choice_operation(name: str, score: Callable[[Scoring], None] = score) -> Callable[..., Tensor]:
    """`choose` with this scoring as a torch operation of `choice_arguments`, so that torch.compile keeps it whole."""

    @torch.library.custom_op(f"condense::{name}", mutates_args=())
    def op(
        q: Tensor, codes: Tensor, grid: Tensor, kind: str, sizes: Sequence[int], starts: Tensor | None,
        rule: Sequence[int], scale: float, quota: Sequence[int], closed: int,
    ) -> Tensor:  # fmt: skip
        index_kind: IndexKind = "bounds" if kind == "bounds" else "sub_means"
        return choose(
            q, GroupIndex(codes, grid), IndexSettings(index_kind, *sizes), Positions(starts, tuple(rule)), scale=scale,
            quota=Quota(*quota), closed=closed, score=score,
        )  # fmt: skip

    @op.register_fake
    def _(q: Tensor, codes: Tensor, *others: Any) -> Tensor:
        *_, quota, closed = others
        return q.new_empty(q.shape[0], codes.shape[1], q.shape[2], Quota(*quota).at(closed), dtype=torch.int32)

    return op


def choice_arguments(
    q: Tensor, index: GroupIndex, settings: IndexSettings, positions: Positions, *, scale: float, quota: Quota,
    closed: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `choose` in types that an operation takes."""
    sizes = [settings.group_size, settings.size, settings.bits]
    return q, *index, settings.kind, sizes, positions.starts, positions.rule, scale, list(quota), closed
