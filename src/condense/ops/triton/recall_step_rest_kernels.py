"""The one token that stands for all closed groups that are not open (`condense.ops.recall.rest`), in a decode step.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device.parts import parts, tile_width
from condense.ops.triton.device.softmax import Softmax
from condense.ops.triton.device.sums import sum_columns


class Centres(namedtuple("Centres", "score top total")):
    """Scores of centres as `condense.ops.triton.recall_step_score_kernels` writes them, of one KV head.

    score: pointers ``[BR]`` to the scores of each query head. top, total: pointers to the largest scores and sums of
    all splits of the first query head.
    """


@triton.jit
def _log_rest(centres, splits, groups_ptr, count, r, R, BM: tl.constexpr):
    """Base 2 logarithm ``[BR]`` of the sum of ``2 ** score`` of the centres of all groups but the ``count`` open ones;
    -inf where nothing is left. Query heads are r, of R; BM of the splits, or open groups, are read at once.
    """
    inside, n = (r < R)[None, :], tl.arange(0, BM)
    top = tl.full([BM, r.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([BM, r.shape[0]], tl.float32)
    for start in range(0, splits, BM):
        at = r[None, :] * splits + (start + n)[:, None]
        there = inside & (start + n < splits)[:, None]
        own = tl.load(centres.top + at, mask=there, other=float("-inf"))  # [BM, BR]
        larger = tl.maximum(top, own)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total *= tl.exp2(top - safe)
        total += tl.load(centres.total + at, mask=there, other=0.0) * tl.exp2(own - safe)
        top = larger
    largest = tl.max(top, 0)  # [BR]
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    rest = tl.sum(total * tl.exp2(top - largest[None, :]), 0)  # [BR]
    total = tl.zeros([BM, r.shape[0]], tl.float32)
    # read one tile ahead, so that scores need not wait for lists
    group = tl.load(groups_ptr + n, mask=n < count, other=0)  # [BM]
    for start in range(0, count, BM):
        there, behind = (start + n < count)[:, None], start + BM + n
        next_group = tl.load(groups_ptr + behind, mask=behind < count, other=0)
        score = tl.load(centres.score[None, :] + group[:, None], mask=inside & there, other=float("-inf"))  # [BM, BR]
        total += tl.exp2(score - largest[None, :])
        group = next_group
    # the difference has the rounding error of the sum over all groups, so it may lie below 0. That error is small in
    # the end: the tokens of the groups that are taken out weigh about as much as these do, and attention sees them
    rest -= tl.sum(total, 0)
    return tl.where(rest > 0, largest + tl.log2(tl.where(rest > 0, rest, 1.0)), float("-inf"))


@triton.jit
def _load_mean(sums, j, there, FORM: tl.constexpr, LO: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr):
    """Columns ``[LO, LO + N)`` of the mean of the values of the first j groups, float32 ``[1, P]``; 0 if not there."""
    d = LO + tl.arange(0, tile_width(N))
    there = there & (d < LO + N)
    WIDTH: tl.constexpr = FORM.DV if FORM.DV > 0 else FORM.D
    ptr = sum_columns(sums, j, d, there, WIDTH, FORM.g, NEAR)  # [P]
    return (tl.load(ptr, mask=there, other=0.0) / tl.maximum(FORM.g * j, 1).to(tl.float64)).to(tl.float32)[None, :]


@triton.jit
def rest_of(
    centres, splits, sums, groups_ptr, count, closed, j, r, R,
    BM: tl.constexpr, FORM: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The `Softmax` of BR query heads over the one token, which has no weight where all closed groups are open.

    groups: the ``count`` open groups. sums: `condense.ops.triton.device.sums.HeadSums`, of which that of the first j
    groups is read. Others as of `_log_rest`.
    """
    # nothing is written of the scores where all closed groups are open
    some, one = count < closed, tl.full([r.shape[0]], 1.0, tl.float32)
    weight = _log_rest(centres, tl.where(some, splits, 0), groups_ptr, tl.where(some, count, 0), r, R, BM)
    mean = one[:, None] * _load_mean(sums, j, some, FORM, 0, FORM.V0, NEAR)  # [BR, P]
    mean = parts(mean, one[:, None] * _load_mean(sums, j, some, FORM, FORM.V0, FORM.V1, NEAR) if FORM.V1 > 0 else None)
    return Softmax(mean, weight + tl.log2(one * FORM.g), one)
