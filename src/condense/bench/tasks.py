"""Tasks of the kernel benchmark: a call to time, its check, and its amount of work; nothing runs until `prepare`.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from condense.bench import gate, gate_prompt
from condense.bench.baselines import dense_attention
from condense.bench.flex import flex_attention, joined_keys
from condense.bench.problems import (
    Inputs,
    Setting,
    attention_flops,
    pooled,
    pooling_bytes,
    ranking_flops,
    reads_at_once,
    sampled,
    visible_pairs,
)
from condense.functional import attention
from condense.methods import Context, Dense, Method
from condense.ops import Source
from condense.testing.budget import Verdict


@dataclass(frozen=True)
class Work:
    """Calls to be timed (several: in turn, each with inputs of its own), and the FLOPs and bytes of one of them.

    pairs: keys that the queries of one row and head see, summed over queries.
    """

    calls: Sequence[Callable[[], Any]]
    check: Callable[[], Verdict] | None = None
    flops: int | None = None
    nbytes: int | None = None
    pairs: int | None = None


@dataclass(frozen=True)
class Task:
    """A row before it is measured. ``method``: whose mask it has (None: dense); ``runner``: method label or baseline.

    backend: the requested one, for operations that have several.
    """

    op: str
    runner: str
    method: Method | None
    condensed: bool
    length: int
    prepare: Callable[[], Work]
    backend: str | None = None


def has_op(op: str, method: Method, length: int) -> bool:
    """True if there is something to time of a method's ``op`` at that length.

    Pooling exists for methods that make entries, importance for those that rank tokens. A prompt that is read at once
    has no backward (it is for inference) and no decode rows, as its decode is the streaming method's.
    """
    match op:
        case "importance":
            return reads_at_once(method, length) and method.focal == "top"
        case "pooling":
            makes_entries = method.layout.rule.window is not None and method.layout.rule.max_chunks is None
            return reads_at_once(method, length) if method.prompt is not None else makes_entries
        case "backward" | "decode":
            return method.prompt is None
    return True


def baseline_task(setting: Setting, inputs: Inputs, op: str, name: str) -> Task:
    """A dense baseline on whole sequences. PyTorch's own operations are not checked."""

    def prepare() -> Work:
        length = inputs.q.shape[2]
        attend = dense_attention(name, inputs)
        call = _call(op, attend, tuple(inputs), setting)
        return _attending([call], None, setting, pooled(Dense(), inputs), length, op)

    return Task(op, name, None, False, inputs.q.shape[2], prepare)


def method_task(setting: Setting, inputs: Inputs, op: str, label: str, method: Method, backend: str) -> Task:
    """A condensed row on whole sequences."""
    L, scale = inputs.q.shape[2], inputs.scale

    def importance() -> Work:
        assert reads_at_once(method, L)

        def call() -> Tensor:
            return gate_prompt.ranked(method, inputs, backend)

        positions = sampled(method, 1, L, setting.device).columns[0]
        flops = ranking_flops(setting.shape, setting.batch, positions)
        return Work([call], lambda: gate_prompt.check_ranking(method, inputs, call()), flops=flops)

    def pooling() -> Work:
        def check() -> Verdict:
            sources = pooled(method, inputs, backend)
            if method.prompt is not None:
                return gate_prompt.check_prompt(method, inputs, sources, backend)
            return gate.check_entries(method, inputs, sources)

        return Work(
            [lambda: pooled(method, inputs, backend)], check, nbytes=pooling_bytes(method, setting.shape, inputs)
        )

    def layer() -> Work:
        def call() -> Any:
            return attention(*inputs, method=method, backend=backend)

        def check() -> Verdict:
            sources = pooled(method, inputs, backend)
            if L > gate.WHOLE:
                return gate.check_output(call(), inputs.q, sources, scale=scale)
            if reads_at_once(method, L):
                made = gate_prompt.around(method, gate.mean_queries(inputs), gate_prompt.chosen(sources))
            else:
                made = gate.exact_and_plain(method, inputs, sources)
            return gate.check_layer(call(), inputs, *made)

        return _attending([call], check, setting, pooled(method, inputs, backend), L, op)

    def attend() -> Work:
        sources = pooled(method, inputs, backend)
        leaves = (inputs.q, *sources.tensors)

        def run(q: Tensor, entries_k: Tensor, entries_v: Tensor, window_k: Tensor, window_v: Tensor) -> Tensor:
            entries = Source(entries_k, entries_v, sources.entries.bias)
            parts = Context((entries, Source(window_k, window_v)), sources.spans)
            return method.attend(q, parts, scale=scale, backend=backend)[0]

        def check() -> Verdict:
            if op == "forward":
                return gate.check_output(run(*leaves), inputs.q, sources, scale=scale)
            return gate.check_gradients(
                lambda upstream: _gradients(run, leaves, upstream), inputs.q, sources, scale=scale
            )

        return _attending([_call(op, run, leaves, setting)], check, setting, sources, L, op)

    prepare = {"importance": importance, "pooling": pooling, "layer": layer}.get(op, attend)
    return Task(op, label, method, True, L, prepare, backend)


def flex_mask_task(setting: Setting, inputs: Inputs, op: str, method: Method) -> Task:
    """FlexAttention over one method's entries and tokens. The mask is ours, so its output is checked."""
    L, scale = inputs.q.shape[2], inputs.scale

    def prepare() -> Work:
        sources = pooled(method, inputs)
        attend = flex_attention(sources, L, scale=scale)
        tensors = (inputs.q, *joined_keys(sources))

        def check() -> Verdict:
            return gate.check_output(attend(*tensors), inputs.q, sources, scale=scale)

        return _attending([_call(op, attend, tensors, setting)], check, setting, sources, L, op)

    return Task(op, "flex_mask", method, False, L, prepare)


def _attending(
    calls: Sequence[Callable[[], Any]],
    check: Callable[[], Verdict] | None,
    setting: Setting,
    sources: Context,
    length: int,
    op: str,
) -> Work:
    """The work of attention of ``length`` queries over their context."""
    pairs = visible_pairs(sources.spans, length, setting.device)
    flops = attention_flops(setting.shape, setting.batch, pairs, backward=op == "backward")
    return Work(calls, check, flops=flops, pairs=pairs)


def _call(op: str, attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], setting: Setting) -> Callable[[], Any]:
    if op != "backward":
        return lambda: attend(*tensors)
    upstream = setting.normal(setting.shape.num_q, tensors[0].shape[2], setting.shape.value_width, draw=3)
    return lambda: _gradients(attend, tensors, upstream)


def _gradients(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward; a tensor that no query sees has gradient 0."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, upstream, allow_unused=True, materialize_grads=True)
