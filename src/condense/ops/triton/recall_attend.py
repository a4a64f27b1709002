"""The `triton` backend of Recall's attention over a prompt: forward and backward, deterministic.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, G groups of g tokens, N window tokens, r groups that a
query opens, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.recall.choice import Choice, IndexChoice, RecallSources, chosen_groups
from condense.ops.spans import RuleSpans, UniformRule
from condense.ops.triton.attend import attend
from condense.ops.triton.attend_call import backward_operation, describe, needs_operation, operation, results
from condense.ops.triton.host import LOG2E, cdiv, check_programs, on_device_of, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_attend_call import RecallCall, RecallShared, tiles_of
from condense.ops.triton.recall_attend_kernels import recall_fwd_kernel
from condense.ops.triton.recall_backward import backward
from condense.ops.triton.recall_choice import choice_operation, choose

_FORWARD = Launcher(recall_fwd_kernel)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a `RecallCall`."""
    call = RecallCall(*arguments)
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    (B, H, L, D), (K, choosers) = q.shape, call.heads
    check_programs(B * K)
    R = H // K
    tiles = tiles_of("fwd", q.dtype, q.is_cuda, max(D, out.shape[3]), R)
    shared, Q = RecallShared.of(call, tiles.keys), tiles.rows // R
    with on_device_of(q):
        for first, stop, of_tiles in call.blocks(Q):
            _FORWARD(
                (cdiv(stop - first, Q), B * K, 1),
                (q, *shared.sources, *of_tiles.tensors, call.starts, out, lse),
                (
                    q.stride()[:3], shared.s_store, shared.s_bias, call.level * LOG2E, K, choosers, L, first, stop,
                    *of_tiles.numbers, *call.rule, call.scale * LOG2E,
                ),
                (R, call.group_size, *call.constants(call.pool, call.kind, *call.numerics), tiles.rows, tiles.keys),
                tiles.options,
            )  # fmt: skip
    return out, lse


class Kernels(NamedTuple):
    """The functions of a backend.

    forward: attention of a `RecallCall`. operation: the same with gradients. attend: attention over two sources, as
    `condense.ops.attend`.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    operation: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., tuple[Tensor, Tensor | None]]


recall_backward = backward_operation("attend_recall_backward", RecallCall, backward)
_KERNELS = Kernels(_forward, operation("attend_recall", RecallCall, _forward, recall_backward), attend)


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: Choice,
    *,
    scale: float,
    softcap: float,
    pool: bool,
    return_lse: bool,
    kernels: Kernels = _KERNELS,
) -> tuple[Tensor, Tensor | None]:
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
    if r == 0 or (r == closed and isinstance(choice, IndexChoice)):
        if r == 0:
            rule = rule if pool else replace(rule, max_chunks=0)
        else:
            entries, rule = store, replace(rule, entries=sources.group_size)
        return kernels.attend(
            q, [entries, window], replace(spans, rule=rule), scale=scale, softcap=softcap, dropout_p=0.0,
            return_lse=return_lse,
        )  # fmt: skip
    starts, numbers = describe(spans, 2, L, q.device)
    if isinstance(choice, IndexChoice):
        choose_groups = choice_operation if needs_operation(choice.q) else choose
        groups = choose_groups(choice.q, *choice.index, starts, numbers, choice.scale, choice.quota, closed)
    else:
        chosen = choice.at(0, L, spans.at(0, L, q.device)[0].hi, G)
        groups = chosen_groups(chosen, r).to(torch.int32)
    biases, level = (entries.bias, 0.0) if isinstance(entries.bias, Tensor) else (None, float(entries.bias or 0.0))
    call = RecallCall(
        q, [entries.k, store.k, window.k], [entries.v, store.v, window.v], biases, groups, starts, tuple(numbers),
        closed, level, pool, scale, softcap,
    )  # fmt: skip
    others = (*call.k, *call.v) if biases is None else (*call.k, *call.v, biases)
    out, lse = (kernels.operation if needs_operation(q, *others) else kernels.forward)(*call)
    return out, lse if return_lse else None
