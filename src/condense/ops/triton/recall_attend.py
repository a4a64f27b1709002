"""The `triton` backend of Recall's attention over a prompt: the groups that queries open, and attention with these.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, N window tokens, D and Dv widths.
"""

from dataclasses import replace

import torch
from torch import Tensor

from condense.ops.recall.choice import Choice, IndexChoice, RecallSources, chosen_groups
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.triton.attend import ATTENTION
from condense.ops.triton.attend_call import Attention, call_of, needs_operation
from condense.ops.triton.recall_choice import choice_operation, choose
from condense.ops.types import AttendOptions


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: Choice,
    options: AttendOptions,
    *,
    pool: bool,
    attention: Attention = ATTENTION,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend_recall`. pool: queries see the entries of closed groups that they do not open.

    If every query opens no group, or all of them, this is attention over two sources: entries or store, and the window.
    """
    entries, store, window, spans = sources
    L, G = q.shape[2], entries.k.shape[2]
    assert isinstance(spans, RuleSpans), "the backend's limits"
    rule = spans.rule
    assert isinstance(rule, UniformRule), "the backend's limits"
    closed = min(spans.hulls([(0, L)])[0][0].hi, G)
    # if a share of `closed` groups rounds up to all of them, it does so for every smaller number too: then every query
    # opens all its groups
    r = choice.most(closed)
    opens = r > 0 and not (r == closed and isinstance(choice, IndexChoice))
    if r == 0:
        rule = rule if pool else replace(rule, max_chunks=0)
    elif not opens:
        entries, rule = store, replace(rule, entries=sources.group_size)
    spans = replace(spans, rule=rule)
    call = call_of(q, [entries, window], spans, options.scale, options.softcap, store=store if opens else None)
    if opens and isinstance(choice, IndexChoice):
        choose_groups = choice_operation if needs_operation(choice.q) else choose
        groups = choose_groups(choice.q, *choice.index, call.spans, call.rule, choice.scale, choice.quota, closed)
        call = call._replace(groups=groups, closed=closed, pool=pool)
    elif opens:
        chosen = choice.at(0, L, spans.at(0, L, q.device)[0].hi, G)
        call = call._replace(groups=chosen_groups(chosen, r).to(torch.int32), closed=closed, pool=pool)
    return attention.run(call)
