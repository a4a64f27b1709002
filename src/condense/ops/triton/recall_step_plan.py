"""Launch arguments of a decode step of Recall other than tensors: grids, numbers, constants, sizes of scratch memory.

Shapes as in `condense.ops.triton.recall_step`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from condense.ops.step.settings import numbered_settings
from condense.ops.triton import latent_groups_kernels as latent_groups
from condense.ops.triton.device.sign_pieces import in_pieces, query_bytes
from condense.ops.triton.device.signs import block_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, gpu_of, power_of_2
from condense.ops.triton.recall_close_kernels import close_options
from condense.ops.triton.recall_score import UNFUSED
from condense.ops.triton.recall_step_choice_kernels import Ranking
from condense.ops.triton.recall_step_tiles import is_early, num_splits, splits_of, tiles_of
from condense.ops.triton.recall_store_kernels import Form
from condense.ops.triton.step_plan import StepShape

# ranking fewer groups than this takes no less time
_FEW_RANKED = 1024
# groups per thread of the kernel that chooses; twice as many if a multiprocessor runs more than one program
_OF_THREAD = 16
# scores that such a thread holds at once, in half of its registers
_SCORES_OF_THREAD = 64
# fewest splits of scores in a tile of that kernel: with one width for most batch sizes, it is compiled once for them
_LEAST_SPLITS = 128
# scores of centres that a warp reads at once
_GATHERED = 512


def apart(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of pieces of memory, in elements of 4 bytes, rounded up so that each begins at a multiple of 128 bytes."""
    return tuple(cdiv(n, 32) * 32 for n in sizes)


class Plan(NamedTuple):
    """Launch arguments of a step's kernels, without tensors and strides: grid, numbers, constants, options of each.

    scratch: sizes of the float32 and of the int32 tensors of `condense.ops.triton.recall_step.StepScratch`. rotate: the
    kernel that rotates queries, None if ``score`` does it. opened: the kernel that reads open groups, None if
    ``attend`` does it.
    """

    scratch: tuple[tuple[int, ...], tuple[int, ...]]
    close: tuple[Any, ...]
    rotate: tuple[Any, ...] | None
    score: tuple[Any, ...]
    choose: tuple[Any, ...]
    opened: tuple[Any, ...] | None
    attend: tuple[Any, ...]
    join: tuple[Any, ...]


@functools.lru_cache(maxsize=4096)
def close_of(shape: StepShape) -> tuple[Any, ...]:
    """The launch arguments of the kernel that closes a group in each of B rows."""
    (B, K, widths, G, W, _, N, T, _), settings = shape.sizes, numbered_settings(shape.number)
    form = Form.of(settings.store_format, shape.dtype, widths, shape.latent)
    return (
        # programs of a KV head; the fourth adds the values of a group to the running sums
        (B * K, 4 if settings.sees_rest else 3, 1),
        (K, G, W, N, T, settings.summary_delay),
        (form, shape.has_real, is_early(shape.device), shape.near, shape.far),
        close_options(form.D, in_step=True),
    )


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step
def plan_of(shape: StepShape) -> Plan:
    """The launch arguments of a step."""
    device, dtype, H, sizes, latent, (scale, softcap), number, has_real, S, near, far, *_ = shape
    (B, K, (D, Dv), G, W, _, N, T, _), settings = sizes, numbered_settings(number)
    check_programs(B * K)
    choice, g, window = settings.choice, settings.rule.chunk, settings.rule.window
    assert choice is not None
    form = Form.of(settings.store_format, dtype, (D, Dv), latent)
    tiles = tiles_of(shape, form)
    if not choice.store.on_host:
        tiles = tiles._replace(weight=0)  # every split reads both the ring and open groups
    R, V, early, is_apart = H // K, latent or Dv, tiles.early, tiles.opened is not None
    r, GROUPS = choice.quota.at(G), power_of_2(max(G, 4))
    of_quota, has_mean = (r, *choice.quota[1:]), choice.mean and r < G
    # groups per tile of scores
    GS = max(1, tiles.score.rows // power_of_2(g))
    score_tiles = cdiv(R, tiles.score_heads)
    S0, *few0 = num_splits(device, B * K * score_tiles, cdiv(G, GS), tiles.score.waves)
    splits = splits_of(shape, tiles, r * g, has_mean)
    # scores of centres that the program of the mean reads at once
    BM = max(1, _GATHERED * tiles.attend.num_warps // tiles.heads) if has_mean else 0
    # splits that are joined at once, and columns per program: a block of the rotation, if they are rotated back
    joined = splits.ahead + splits.attend
    BS = 64 if is_apart else min(256, max(64, power_of_2(joined)))
    BC = block_width(D) if is_apart else min(4096 // BS, power_of_2(V))
    ranking, ranking_options = _ranking_of(shape, GROUPS, r, S0)
    # row stride of scratch memory that has one number per group
    row = G if far is None else shape.all
    scale, precision = scale * LOG2E, "ieee" if dtype == torch.float32 else "tf32"
    chained = {"launch_pdl": True} if early else {}
    return Plan(
        _scratch_of(shape, (S0, joined)),
        close_of(shape),
        (
            (B * K, cdiv(R, tiles.score_heads), 1),
            (K, R),
            (D, tiles.score_heads, early),
            {"num_warps": tiles.score.num_warps} | chained,
        ) if in_pieces(D) else None,
        (
            (S0, B * K, score_tiles),
            (K, R, row, *few0, window, scale, *of_quota),
            (g, D, tiles.score_heads, GS, GROUPS, softcap * LOG2E if has_mean else 0.0, has_real, early, far),
            tiles.score.options | UNFUSED | chained,
        ),
        (
            (B * K, 1, 1),
            (K, R, row, S0, window, *of_quota),
            (g, GROUPS, ranking, has_real, early, far),
            ranking_options | chained,
        ),
        (
            (splits.ahead, B, cdiv(R, latent_groups.HEADS.value)),
            (R, row, N, window, *of_quota, joined, S, scale),
            (S > 0, form, has_real, far),
            tiles.opened.options | chained,
        ) if tiles.opened is not None else None,
        (
            (splits.attend, B * K, cdiv(R, tiles.heads)),
            (
                K, R, row, W, N, T, window, *of_quota, splits.own, splits.ahead, splits.mean_tiles,
                GROUPS if far is None else row, S0, S, scale,
            ),
            (
                S > 0, form, tiles.heads, tiles.attend.rows, BM, is_apart, has_real, precision, softcap * LOG2E, early,
                near, far,
            ),
            tiles.attend.options | chained,
        ),
        (
            (B * H, cdiv(V, BC), 1),
            (H, joined),
            (V, BC, BS, D if is_apart else 0, has_real, early, None),
            chained,
        ),
    )  # fmt: skip


def _ranking_of(shape: StepShape, groups: int, r: int, splits: int) -> tuple[Ranking, dict[str, int]]:
    """The constants and launch options of the kernel that chooses.

    groups: groups that a KV head has room for, as a power of two. r: most open groups. splits: splits of the scores.
    """
    device, H, B, K, slots = shape.device, shape.H, shape.sizes.rows, shape.sizes.heads, shape.slots
    shared = device.type == "cuda" and gpu_of(device).multiprocessors < B * K
    warps = max(4, min(16, power_of_2(max(groups // (_OF_THREAD << shared), slots)) // 32))
    ranking = Ranking(
        groups, max(0, (groups // _FEW_RANKED).bit_length() - 1), power_of_2(slots) if slots else 0,
        power_of_2(max(r, 1)) if slots else 1, power_of_2(max(splits, _LEAST_SPLITS)),
        max(1, min(16, power_of_2(H // K), _SCORES_OF_THREAD * 32 * warps // groups)),
    )  # fmt: skip
    most = {"maxnreg": 128} if device.type == "cuda" else {}  # the most per thread for 16 warps
    return ranking, {"num_warps": warps, **most}


def _scratch_of(shape: StepShape, splits: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of scratch memory (`Plan.scratch`). splits: number of splits of the scores, and of attention."""
    (B, K, (D, Dv), G, *_), H, S, latent = shape.sizes, shape.H, shape.slots, shape.latent
    choice = numbered_settings(shape.number).choice
    assert choice is not None
    r, queries, pairs, rotates = choice.quota.at(G), B * H, B * K, choice.store.bits < 16
    if shape.far is None:
        of_scores, of_bases = queries * power_of_2(max(G, 4)), queries * r
        of_lists, of_slots = pairs * r, pairs * G
    else:  # rows share arrays that have one number per group
        of_scores = of_bases = H * shape.all
        of_lists = of_slots = K * shape.all
    of_splits, parts = queries * splits[0], queries * splits[1]
    floats = (
        parts * (latent or Dv), parts, of_scores, of_splits, of_splits,
        *((of_scores, of_splits, of_splits) if choice.mean and r < G else (0, 0, 0)),
        queries * D if rotates else 0, queries * query_bytes(D) // 4 if in_pieces(D) else 0,
        of_bases * (2 if latent else 1) if rotates else 0,
    )  # fmt: skip
    integers = of_lists, *((pairs * r, of_slots, pairs * S, pairs * S) if S else (0, 0, 0, 0))
    return apart(floats), apart(integers)
