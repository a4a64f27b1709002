"""The limits of the kernel for Hopper, and a test of when it is the fastest. Does not import Triton."""

import torch
from torch import Tensor

from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.triton import limits as triton_limits
from condense.ops.triton.host import gpu_of
from condense.ops.types import Problem

DTYPES = (torch.bfloat16, torch.float16)
# widths of keys and values
WIDTHS = ((64, 64), (96, 64), (128, 128), (192, 128))
# rows of a tile: queries times query heads
TILE_ROWS = 128
# widths of Recall's keys and values, and sizes of its groups: multiples of 8 (a TMA box) that divide 64 (a block)
RECALL_WIDTHS, RECALL_GROUPS = ((64, 64), (128, 128)), (8, 16, 32, 64)


def attend_obstacle(problem: Problem) -> str | None:
    """All reasons why the kernel cannot take a problem, None if it can."""
    found = [*_absence(problem.device, problem.softcap), *triton_limits.among("takes", DTYPES, problem.dtype)]
    found += triton_limits.among("takes keys and values of widths", WIDTHS, problem.widths)
    if problem.ratio > TILE_ROWS:
        found.append(f"takes up to {TILE_ROWS} query heads per KV head, got {problem.ratio}")
    return triton_limits.clauses(found + triton_limits.call_obstacles(problem))


def _absence(device: torch.device, softcap: float) -> list[str]:
    """The obstacles to any kernel for Hopper on a device."""
    found = triton_limits.absence_of_triton()
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if not on_gpu or gpu_of(device).capability != (9, 0):
        found.append("needs a GPU of compute capability 9.0 (H100, H200)")
    if softcap:
        found.append(f"has no soft-capped scores, got a cap of {softcap}")
    return found


def fills_gpu(problem: Problem) -> bool:
    """True if there is a tile for every multiprocessor; with fewer, Triton's smaller tiles are faster.

    False if the problem does not say how many rows and heads there are.
    """
    tiles = -(-problem.num_queries // (TILE_ROWS // problem.ratio))
    return tiles * problem.rows * problem.kv_heads >= gpu_of(problem.device).multiprocessors


def recall_obstacle(q: Tensor, sources: RecallSources, choice: IndexChoice, *, softcap: float) -> str | None:
    """All reasons why the kernels cannot run `condense.ops.attend_recall` with these arguments, None if they can."""
    found = [*_absence(q.device, softcap), *triton_limits.among("takes", DTYPES, q.dtype)]
    window = sources.window
    found += triton_limits.among("takes keys and values of widths", RECALL_WIDTHS, (q.shape[3], window.v.shape[3]))
    if q.shape[1] // window.k.shape[1] < 2:
        found.append("takes at least 2 query heads per KV head, got 1")
    found += triton_limits.among("takes groups of these numbers of tokens:", RECALL_GROUPS, sources.group_size)
    return triton_limits.clauses(found + triton_limits.recall_call_obstacles(q, sources, choice))
