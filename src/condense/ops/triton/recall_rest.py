"""The weight of what each query of a prompt does not open, by a kernel, block of queries by block; and attention with
the one token that has it.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, r groups that a query opens, D
and Dv widths.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from condense.ops.recall.index import GroupIndex
from condense.ops.recall.rest import GroupMeans
from condense.ops.spans import RuleSpans
from condense.ops.triton.descriptors import of_tile
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_choice import marked
from condense.ops.triton.recall_rest_kernels import RestForm, recall_join_kernel, recall_rest_kernel
from condense.ops.triton.recall_score import bytes_turned, centres_of, turned, width_at_once

_REST, _JOIN = Launcher(recall_rest_kernel), Launcher(recall_join_kernel)
# groups of a tile, and of a program that spreads centres
_GROUPS, _SPREAD_GROUPS = 64, 16
# bytes of scratch memory for a block of queries
_SCRATCH = 2**29


def _rows(R: int, is_cuda: bool) -> int:
    """Rows of a tile: no more queries than a word has bits."""
    return 64 if is_cuda else max(16, power_of_2(R))


def rest_weights(
    q: Tensor, signs: Tensor, steps: Tensor, chosen: Sequence[Tensor], starts: Tensor | None, rule: Sequence[int],
    scores: Sequence[float], closed: int,
) -> Tensor:  # fmt: skip
    """Return the weights of `condense.ops.recall.rest.rest_weights` for all queries, float32 ``[B, H, L]``.

    chosen: groups and, if some chose for others, asked, as `condense.ops.triton.recall_choice.marked` takes them.
    q, signs, steps, starts, rule, closed: the arguments of that function. scores: their scale and soft cap.
    """
    scale, softcap = scores
    index = GroupIndex(signs, steps).narrow(0, closed)
    (B, H, L, D), (_, K, G, _), g = q.shape, signs.shape, index.group_size
    R, columns = H // K, cdiv(closed, _GROUPS) * _GROUPS
    check_programs(B * K)
    weights = torch.empty(B, H, L, dtype=torch.float32, device=q.device)
    centres, of_centres = centres_of(index, columns // _SPREAD_GROUPS, _SPREAD_GROUPS, D)
    rows, width = _rows(R, q.is_cuda), width_at_once(D)
    Q, form = rows // R, RestForm(rows, _GROUPS, width, cdiv(D, width))
    # a word takes at most 8 bytes
    n = max(1, _SCRATCH // (bytes_turned(q) * Q + 8 * B * K * closed)) * Q
    with on_device_of(q):
        for first in range(0, L, n):
            stop = min(first + n, L)
            numbers, unit = turned(q[:, :, first:stop], K, scale * LOG2E)
            words = marked(chosen[0], G, closed, Q, first, stop, *chosen[1:])
            _REST(
                (cdiv(stop - first, Q), B * K, 1),
                (unit, of_tile(numbers, [1, rows, width]), centres, of_centres, words, starts, weights),
                (centres.stride(1), math.log2(g), K, L, G, first, stop, closed, columns, *rule),
                (R, D, "row" if starts is None else "rows", softcap * LOG2E, form),
                {"num_stages": 3 if form.parts == 1 else 2},
            )  # fmt: skip
    return weights


# `rest_weights` as a torch operation, which torch.compile keeps whole
rest_operation = torch.library.custom_op("condense::weigh_recall", rest_weights, mutates_args=())


@rest_operation.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def add_rest(out: Tensor, lse: Tensor, weights: Tensor, means: GroupMeans, spans: RuleSpans, g: int) -> None:
    """Add the token of all queries to attention, in place, as `condense.ops.recall.rest.with_rest` joins it.

    out ``[B, H, L, Dv]``; lse and weights, float32 ``[B, H, L]``, contiguous; means as `GroupMeans.as_values` returns
    them.
    """
    (B, H, L, Dv), mean = out.shape, dense_rows(means.means)
    begin = spans.query_start + 1 - means.first * g
    rows = begin.to(out.device, non_blocking=True) if isinstance(begin, Tensor) else None
    tile = max(16, min(128, 8192 // power_of_2(Dv))) if out.is_cuda else 16
    with on_device_of(out):
        _JOIN(
            (cdiv(L, tile) * H, B, 1), (out, lse, weights, mean, rows),
            (out.stride()[:3], mean.stride()[:3], H, L, mean.shape[2], 0 if rows is not None else begin),
            (g, H // mean.shape[1], Dv, tile, power_of_2(Dv)), {},
        )  # fmt: skip
