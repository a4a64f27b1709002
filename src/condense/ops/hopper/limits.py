"""The limits of the kernel for Hopper, and when it is the fastest. Does not import Triton."""

from __future__ import annotations

import torch

from condense.ops.triton.host import gpu_of
from condense.ops.triton.limits import attend_obstacle as triton_obstacle
from condense.ops.types import Problem

DTYPES = (torch.bfloat16, torch.float16)
# of keys and values
WIDTHS = ((64, 64), (96, 64), (128, 128), (192, 128))
NO_SOFTCAP = "has no soft-capped scores"
# query heads times queries in a tile
TILE_ROWS = 128


def attend_obstacle(problem: Problem) -> str | None:
    """Why the kernel cannot take a problem, None if it can."""
    if (obstacle := triton_obstacle(problem)) is not None:
        return obstacle
    on_gpu = problem.device.type == "cuda" and torch.cuda.is_available()
    if not on_gpu or gpu_of(problem.device).capability != (9, 0):
        return "needs a GPU of compute capability 9.0 (H100, H200)"
    if problem.softcap:
        return f"{NO_SOFTCAP}, got a cap of {problem.softcap}"
    if problem.dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {problem.dtype}"
    if problem.widths not in WIDTHS:
        return f"takes keys and values of widths {', '.join(map(str, WIDTHS))}, got {problem.widths}"
    if problem.ratio > TILE_ROWS:
        return f"takes up to {TILE_ROWS} query heads per KV head, got {problem.ratio}"
    return None


def fills_gpu(problem: Problem) -> bool:
    """True if there is a tile for every multiprocessor; with fewer, Triton's smaller tiles are faster.

    False if the problem does not say how many rows and heads there are.
    """
    tiles = -(-problem.num_queries // (TILE_ROWS // problem.ratio))
    return tiles * problem.rows * problem.kv_heads >= gpu_of(problem.device).multiprocessors
