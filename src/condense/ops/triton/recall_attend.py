"""The `triton` backend of Recall's attention over a prompt: choice of the groups that queries open, attention to them,
and the one token that stands for all other closed groups.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, r groups that a query opens, N
window tokens, D and Dv widths.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.ops.recall.choice import SHARED, IndexChoice, RecallSources
from condense.ops.recall.index import GroupIndex
from condense.ops.recall.rest import GroupMeans, with_rest
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.tensors.per_row import at_least
from condense.ops.triton.attend import ATTENTION
from condense.ops.triton.attend_call import Attention, blocks, call_of, describe, needs_operation
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher, of_tile
from condense.ops.triton.recall_choice import choice_operation, choose, marked
from condense.ops.triton.recall_score import bytes_rotated, in_cells, rotated, width_at_once
from condense.ops.triton.recall_score_kernels import RestForm, recall_join_kernel, recall_rest_kernel
from condense.ops.types import AttendOptions

_REST, _JOIN = Launcher(recall_rest_kernel), Launcher(recall_join_kernel)
# groups per tile of `recall_rest_kernel`, and per program of `recall_spread_kernel`
_GROUPS, _SPREAD_GROUPS = 64, 16
# most bytes of scratch memory for a block of queries
_SCRATCH = 2**29


def _tile(R: int, is_cuda: bool) -> tuple[int, dict[str, int]]:
    """Rows of a tile of `recall_rest_kernel`, and Triton's launch options; at most 64 queries, a bit of a word each."""
    if not is_cuda:
        return max(16, power_of_2(R)), {}
    return (64, {"maxnreg": 128}) if R == 1 else (128, {"maxnreg": 168})


def rest_weights(
    q: Tensor, signs: Tensor, steps: Tensor, chosen: Sequence[Tensor], starts: Tensor | None, rule: Sequence[int],
    scores: Sequence[float], sizes: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the weights of `condense.ops.recall.rest.rest_weights` for all queries, float32 ``[B, H, L]``.

    chosen: ``groups`` of `condense.ops.triton.recall_choice.marked`, and ``asked`` if queries share lists of groups.
    q, signs, steps, starts, rule: as in `condense.ops.triton.recall_choice.choose`. scores: their scale and soft cap.
    sizes: closed and lead of `condense.ops.triton.attend_call.AttendCall`.
    """
    (scale, softcap), (closed, lead) = scores, sizes
    index = GroupIndex(signs, steps).narrow(0, closed)
    (B, H, L, D), (_, K, G, _), g = q.shape, signs.shape, index.group_size
    R, columns = H // K, cdiv(closed, _GROUPS) * _GROUPS
    check_programs(B * K)
    weights = torch.empty(B, H, L, dtype=torch.float32, device=q.device)
    _, _, centres, of_centres, _ = in_cells(index, columns // _SPREAD_GROUPS, _SPREAD_GROUPS, 0, D)
    (rows, options), width = _tile(R, q.is_cuda), width_at_once(D)
    Q, form = rows // R, RestForm(rows, _GROUPS, width, cdiv(D, width))
    # a word takes at most 8 bytes
    n = max(1, _SCRATCH // (bytes_rotated(q) * Q + 8 * B * K * columns)) * Q
    with on_device_of(q):
        for first, stop in blocks(L, n, lead):
            numbers, unit = rotated(q[:, :, first:stop], K, scale * LOG2E)
            words = marked(chosen[0], G, columns, Q, first, stop, *chosen[1:])
            _REST(
                (cdiv(stop - first, Q), B * K, 1),
                (unit, of_tile(numbers, [1, rows, width]), centres, of_centres, words, starts, weights),
                (centres.stride(1), math.log2(g), K, L, G, first, stop, columns, *rule),
                (R, D, "row" if starts is None else "rows", softcap * LOG2E, form),
                options | {"num_stages": 3 if form.parts == 1 else 2},
            )  # fmt: skip
            del words, numbers  # before those of the next block are made
    return weights


# `rest_weights` as a torch operation, into which torch.compile does not trace
rest_operation = torch.library.custom_op("condense::weigh_recall", rest_weights, mutates_args=())


@rest_operation.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def add_rest(out: Tensor, lse: Tensor, weights: Tensor, means: GroupMeans, spans: RuleSpans, g: int) -> None:
    """Add the token that stands for unopened groups to attention, in place, as `condense.ops.recall.rest.with_rest`.

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
            (g, H // mean.shape[1], Dv, tile, power_of_2(Dv)), {"num_warps": 2},
        )  # fmt: skip


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: IndexChoice,
    options: AttendOptions,
    means: GroupMeans | None,
    *,
    attention: Attention = ATTENTION,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of Recall's attention, see `condense.ops.attend_recall`."""
    store, window, spans = sources
    L, G, g = q.shape[2], sources.num_groups, sources.group_size
    assert isinstance(spans.rule, UniformRule), "as of the sources"
    closed = min(spans.hulls([(0, L)])[0][0].hi, G)
    call = call_of(q, [store, window], spans, options.scale, options.softcap)
    asked = choice.q.detach()
    as_operation, by, lead = needs_operation(asked), None, 0
    if choice.askers is not None:
        by, lead = choice.askers.queries, choice.askers.lead
    choose_groups = choice_operation if as_operation else choose
    if by is None:
        groups = choose_groups(asked, *choice.index, call.spans, call.rule, choice.scale, choice.quota, closed)
    else:
        groups = _choose_shared(choice, spans, closed, choose_groups)
    out, lse = attention.run(call._replace(groups=groups, closed=closed, asked=by, lead=lead))
    if means is None:
        return out, lse
    weigh = rest_operation if as_operation else rest_weights
    scores = choice.scale, options.softcap
    chosen = [groups] if by is None else [groups, by]
    weights = weigh(asked, *choice.index, chosen, call.spans, call.rule, scores, [closed, lead])
    if not needs_operation(out, means.means):
        add_rest(out, lse, weights, means, spans, g)
        return out, lse
    return with_rest(out, lse, weights, means.at(0, L, spans, g))


def _choose_shared(choice: IndexChoice, spans: RuleSpans, closed: int, choose_groups: Callable[..., Tensor]) -> Tensor:
    """The groups that each of A askers (queries that choose) opens, int32 ``[B, K, A, r]``, padded with G.

    Each asker that also chooses for later queries has `SHARED` more closed groups than the asker before it.
    """
    q, askers, rule = choice.q.detach(), choice.askers, spans.rule
    assert askers is not None
    assert isinstance(rule, UniformRule)
    assert rule.window is not None
    shared = q.take_along_dim(askers.columns[:, None, : askers.num_shared, None], 2)
    first, G = askers.first_own, choice.index.steps.shape[2]
    block = (spans.query_start + (1 - rule.window)) // (SHARED * rule.chunk)
    # All rows get as many askers as the row that needs most. In other rows the last asker may have more closed groups
    # than the scores have room for, hence max_chunks; no query uses its choice
    sees = UniformRule(1, 0, entries=SHARED, max_chunks=closed // SHARED)
    parts = (
        (shared, RuleSpans(sees, block - 1, 0, 0), choice.quota.shared),
        (
            q[:, :, first:],
            RuleSpans(rule, spans.query_start + first, 0, at_least(spans.padding - first, 0)), choice.quota,
        ),
    )  # fmt: skip
    of_others, own = (
        choose_groups(asked, *choice.index, *describe(seen, 2, asked.shape[2], q.device), choice.scale, quota, closed)
        for asked, seen, quota in parts
    )
    return torch.cat([F.pad(of_others, (0, own.shape[3] - of_others.shape[3]), value=G), own], dim=2)
