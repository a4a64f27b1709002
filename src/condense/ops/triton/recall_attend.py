"""The `triton` backend of Recall's attention over a prompt: the groups that queries open, attention with these, and the
one token that stands for the others.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, N window tokens, D and Dv widths.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from condense.ops.recall.choice import SHARED, IndexChoice, RecallSources
from condense.ops.recall.rest import GroupMeans, with_rest
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.tensors.per_row import at_least
from condense.ops.triton.attend import ATTENTION
from condense.ops.triton.attend_call import Attention, call_of, describe, needs_operation
from condense.ops.triton.recall_choice import choice_operation, choose
from condense.ops.triton.recall_rest import add_rest, rest_operation, rest_weights
from condense.ops.types import AttendOptions


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: IndexChoice,
    options: AttendOptions,
    means: GroupMeans | None,
    *,
    attention: Attention = ATTENTION,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend_recall`.

    If every query opens all of its groups, this is attention over store and window.
    """
    store, window, spans = sources
    L, G, g = q.shape[2], sources.num_groups, sources.group_size
    assert isinstance(spans.rule, UniformRule), "as of the sources"
    closed = min(spans.hulls([(0, L)])[0][0].hi, G)
    # if a share of `closed` groups rounds up to all of them, it does so for every smaller number too
    if choice.quota.at(closed) == closed:
        all_open = replace(spans, rule=replace(spans.rule, entries=g))
        return attention.run(call_of(q, [store, window], all_open, options.scale, options.softcap))
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
    weights = weigh(asked, *choice.index, chosen, call.spans, call.rule, scores, closed)
    if not needs_operation(out, means.means):
        add_rest(out, lse, weights, means, spans, g)
        return out, lse
    return with_rest(out, lse, weights, means.at(0, L, spans, g))


def _choose_shared(choice: IndexChoice, spans: RuleSpans, closed: int, choose_groups: Callable[..., Tensor]) -> Tensor:
    """The groups that each asker opens, as `choose` returns them, int32 ``[B, K, A, r]``.

    Of those that ask for others too, each sees `SHARED` closed groups more than the one before it.
    """
    q, askers, rule = choice.q.detach(), choice.askers, spans.rule
    assert askers is not None
    assert isinstance(rule, UniformRule)
    assert rule.window is not None
    shared = q.take_along_dim(askers.columns[:, None, : askers.num_shared, None], 2)
    first = q.shape[2] - (askers.columns.shape[1] - askers.num_shared)
    block = (spans.query_start + (1 - rule.window)) // (SHARED * rule.chunk)
    # All rows get as many askers as the one that needs most. In another row the last asker stands at the next choice,
    # for which more groups are closed than the scores have room for; no query takes its choice
    sees = UniformRule(1, 0, entries=SHARED, max_chunks=closed // SHARED)
    parts = (
        (shared, RuleSpans(sees, block - 1, 0, 0)),
        (q[:, :, first:], RuleSpans(rule, spans.query_start + first, 0, at_least(spans.padding - first, 0))),
    )
    numbers = choice.scale, choice.quota, closed
    chosen = [
        choose_groups(asked, *choice.index, *describe(seen, 2, asked.shape[2], q.device), *numbers)
        for asked, seen in parts
    ]
    return torch.cat(chosen, dim=2)
