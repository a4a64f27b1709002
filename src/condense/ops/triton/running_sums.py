"""The `triton` backend of `condense.ops.api.running_sums`: sums and means of values after each group of a prompt."""

from typing import Any

import torch
from torch import Tensor

from condense.ops.recall import rest
from condense.ops.triton.attend_call import needs_operation
from condense.ops.triton.host import cdiv, check_programs, dense_rows, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.running_sums_kernels import add_blocks_kernel, block_sums_kernel
from condense.ops.types import Chunks

_BLOCKS, _ADD = Launcher(block_sums_kernel), Launcher(add_blocks_kernel)
# sums and columns of a tile
_TILE = 16, 64
# every program reads the totals of all blocks before its own
_MOST_BLOCKS = 128


def running_sums(before: Tensor, groups: Chunks, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and means, see `condense.ops.recall.rest.running_sums`, which computes them where gradients are needed."""
    v, at = groups.window_v, groups.columns
    if torch.is_grad_enabled() and (v.requires_grad or before.requires_grad):
        return rest.running_sums(before, groups, counts)
    start, columns = (0, at.to(torch.int32).contiguous()) if isinstance(at, Tensor) else (at, None)
    return (_operation if needs_operation(v) else _run)(v, columns, before, counts, start, groups.num, groups.size)


def _run(
    v: Tensor, columns: Tensor | None, before: Tensor, counts: Tensor, start: int, n: int, g: int
) -> tuple[Tensor, Tensor]:
    sums, means = _results(v, columns, before, counts)
    v, before, counts, (B, K, N, D) = dense_rows(v), dense_rows(before), counts.contiguous(), v.shape
    check_programs(B * K)
    BS, BD = _TILE
    tiles = cdiv(cdiv(1 + n, BS), _MOST_BLOCKS)
    blocks = cdiv(1 + n, tiles * BS)
    totals, grid = sums.new_empty(B, K, blocks, D), (blocks * cdiv(D, BD), B * K, 1)
    # all rows may share their columns and counts
    s_columns, s_counts = (0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (columns, counts))
    with on_device_of(v):
        _BLOCKS(
            grid, (v, columns, before, sums, totals),
            (*v.stride()[:3], s_columns, *before.stride()[:2], start, K, N, n, tiles),
            (g, D, BS, BD, min(16, power_of_2(g))), {},
        )  # fmt: skip
        _ADD(grid, (totals, counts, sums, means), (s_counts, K, n, tiles), (D, BS, BD), {})
    return sums, means


# `_run` as a torch operation, into which torch.compile does not trace
_operation = torch.library.custom_op("condense::running_sums", _run, mutates_args=())


@_operation.register_fake
def _results(v: Tensor, columns: Tensor | None, before: Tensor, counts: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = *v.shape[:2], counts.shape[2], v.shape[3]
    return before.new_empty(shape), v.new_empty(shape, dtype=torch.float32)
