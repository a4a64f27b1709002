"""The limits of the kernel for Hopper, and a test of when it is the fastest. Does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.recall.choice import Choice
from condense.ops.recall.sources import RecallSources
from condense.ops.triton import limits as triton_limits
from condense.ops.triton.host import gpu_of
from condense.ops.types import Problem

DTYPES = (torch.bfloat16, torch.float16)
# widths of keys and values
WIDTHS = ((64, 64), (96, 64), (128, 128), (192, 128))
NO_SOFTCAP = "has no soft-capped scores"
# rows of a tile: queries times query heads
TILE_ROWS = 128
# of Recall's keys and values; a group is a multiple of 8 tokens (one TMA box) and divides 64 (one block of keys)
RECALL_WIDTHS, RECALL_GROUPS = ((64, 64), (128, 128)), (8, 16, 32, 64)


def attend_obstacle(problem: Problem) -> str | None:
    """Why the kernel cannot take a problem, None if it can."""
    if (obstacle := triton_limits.attend_obstacle(problem)) is not None:
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


def recall_obstacle(q: Tensor, sources: RecallSources, choice: Choice, *, softcap: float) -> str | None:
    """Why the kernels cannot run `condense.ops.attend_recall` with these arguments, None if they can."""
    if softcap:
        return f"{NO_SOFTCAP}, got a cap of {softcap}"
    if (obstacle := triton_limits.recall_obstacle(q, sources, choice)) is not None:
        return obstacle
    bias, window = sources.entries.bias, sources.window
    if isinstance(bias, Tensor):
        return f"takes one bias for all entries, got a tensor of shape {tuple(bias.shape)}"
    widths, R = (q.shape[3], window.v.shape[3]), q.shape[1] // window.k.shape[1]
    if q.device.type != "cuda" or gpu_of(q.device).capability != (9, 0):
        return "needs a GPU of compute capability 9.0 (H100, H200)"
    if q.dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {q.dtype}"
    if widths not in RECALL_WIDTHS:
        return f"takes keys and values of widths {', '.join(map(str, RECALL_WIDTHS))}, got {widths}"
    if R < 2:
        return "takes at least 2 query heads per KV head, got 1"
    if sources.group_size not in RECALL_GROUPS:
        return f"takes groups of {', '.join(map(str, RECALL_GROUPS))} tokens, got {sources.group_size}"
    return None
