"""Rows of the kernel benchmark: a call to time, its check, and its amount of work; nothing runs until `prepare`.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from condense.bench import gate
from condense.bench.baselines import dense_attention, dense_step
from condense.bench.budget import Verdict
from condense.bench.flex import flex_attention, joined_keys
from condense.bench.problems import (
    Inputs,
    Setting,
    attention_flops,
    index_bytes,
    pooled,
    pooling_bytes,
    saved_bytes,
    step_bytes,
    visible_pairs,
)
from condense.bench.rows import op_kind
from condense.caches import CondensedLayer, StaticCondensedLayer, StaticRecallLayer, read_request
from condense.functional import attention
from condense.methods import Context, Dense, Method, Recall
from condense.ops import Source
from condense.state import num_entries

MIN_CACHES = 8
# room for one token per timed replay: more than the clock makes
_ROOM = 512

Attend = Callable[..., Tensor]


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
class Problem:
    """Inputs of one length, made when first asked for and shared by all rows."""

    setting: Setting
    length: int

    @cached_property
    def inputs(self) -> Inputs:
        """q, k and v of whole sequences."""
        return self.setting.inputs(self.length)


@dataclass(frozen=True)
class Task:
    """A row before it is measured. ``method``: whose mask it has (None: dense); ``runner``: method label or baseline.

    backend: the requested one, for operations that have several.
    """

    op: str
    runner: str
    problem: Problem
    method: Method | None = None
    condensed: bool = False
    backend: str | None = None

    def prepare(self) -> Work:
        """Make inputs and sources. PyTorch's own operations are not checked, FlexAttention with our mask is."""
        problem, method, op = self.problem, self.method, op_kind(self.op)
        if method is None:
            return _dense_step(problem, self.runner) if op == "decode" else _dense(problem, op, self.runner)
        if not self.condensed:
            return _flex(problem, op, method)
        backend = self.backend or "auto"
        match op:
            case "decode":
                return _step(problem, method)
            case "pooling":
                return _pooling(problem, method, backend)
            case "layer":
                return _layer(problem, method, backend)
        return _attention(problem, op, method, backend)


def has_op(op: str, method: Method, length: int) -> bool:
    """True if there is something to time of a method's ``op`` at that length.

    Pooling exists for methods that make entries of groups, backward for those that can be trained. A prompt that is
    read at once has rows of its attention and its layer alone: its decode is the streaming method's.
    """
    op = op_kind(op)
    if op in ("forward", "layer"):
        return True
    if method.prompt_reader is not None:
        return False
    if op == "pooling":
        rule = method.layout.rule
        makes_entries = rule.window is not None and rule.max_chunks is None
        return makes_entries and bool(num_entries(method, torch.tensor([length])) > 0)
    if op == "backward":
        with contextlib.suppress(ValueError):
            method.check_gradients()
            return True
    return op == "decode"


def _dense(problem: Problem, op: str, name: str) -> Work:
    inputs = problem.inputs
    call = _call(op, dense_attention(name, inputs), tuple(inputs), problem)
    return _attending(call, None, problem, Dense(), pooled(Dense(), inputs), op)


def _flex(problem: Problem, op: str, method: Method) -> Work:
    inputs = problem.inputs
    sources = pooled(method, inputs)
    attend = flex_attention(sources, problem.length, scale=inputs.scale)
    tensors = (inputs.q, *joined_keys(sources))

    def check() -> Verdict:
        return gate.check_output(attend(*tensors), inputs.q, sources, scale=inputs.scale, method=method)

    return _attending(_call(op, attend, tensors, problem), check, problem, method, sources, op)


def _pooling(problem: Problem, method: Method, backend: str) -> Work:
    inputs = problem.inputs
    call = partial(pooled, method, inputs, backend)
    return Work(
        [call],
        lambda: gate.check_entries(method, inputs, call()),
        nbytes=pooling_bytes(method, problem.setting, inputs),
    )


def _layer(problem: Problem, method: Method, backend: str) -> Work:
    inputs = problem.inputs
    call = partial(attention, *inputs, method=method, backend=backend)
    sources = pooled(method, inputs, backend)

    def check() -> Verdict:
        out = call()
        assert isinstance(out, Tensor)
        verdict = gate.check_output(out, inputs.q, sources, scale=inputs.scale, method=method)
        if problem.length > gate.WHOLE or not has_op("pooling", method, problem.length):
            return verdict
        return verdict.and_also(gate.check_entries(method, inputs, sources))

    return _attending(call, check, problem, method, sources, "layer")


def _attention(problem: Problem, op: str, method: Method, backend: str) -> Work:
    """Attention alone, forward or forward and backward, over sources that are there."""
    inputs, scale = problem.inputs, problem.inputs.scale
    sources = pooled(method, inputs, backend)
    extra, store = (sources.extra[:2], sources.extra[2:]) if isinstance(method, Recall) else (sources.extra, ())
    leaves = (inputs.q, *sources.tensors[:2], *store, *sources.tensors[2:])

    def run(q: Tensor, entries_k: Tensor, entries_v: Tensor, *others: Tensor) -> Tensor:
        *opened, window_k, window_v = others
        entries = Source(entries_k, entries_v, sources.entries.bias)
        parts = Context((entries, Source(window_k, window_v)), sources.spans, (*extra, *opened))
        return method.attend(q, parts, scale=scale, backend=backend)[0]

    def check() -> Verdict:
        if op == "forward":
            return gate.check_output(run(*leaves), inputs.q, sources, scale=scale, method=method)
        gradients = partial(_gradients, run, leaves)
        return gate.check_gradients(gradients, inputs.q, sources, scale=scale, method=method)

    return _attending(_call(op, run, leaves, problem), check, problem, method, sources, op)


def _attending(
    call: Callable[[], Any],
    check: Callable[[], Verdict] | None,
    problem: Problem,
    method: Method,
    sources: Context,
    op: str,
) -> Work:
    """The work of attention over sources."""
    pairs = visible_pairs(method, sources, problem.length)
    flops = attention_flops(problem.setting.shape, problem.setting.batch, pairs, backward=op == "backward")
    return Work([call], check, flops=flops, pairs=pairs)


def _call(op: str, attend: Attend, tensors: tuple[Tensor, ...], problem: Problem) -> Callable[[], Any]:
    if op != "backward":
        return partial(attend, *tensors)
    heads = problem.setting.shape
    upstream = problem.setting.normal(heads.num_q, problem.length, heads.value_width, draw=3)
    return partial(_gradients, attend, tensors, upstream)


def _gradients(attend: Attend, tensors: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward; a tensor that no query sees has gradient 0."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, upstream, allow_unused=True, materialize_grads=True)


def _dense_step(problem: Problem, name: str) -> Work:
    """One decode step of a dense baseline over caches larger together than L2, the newest token already in them."""
    setting, heads = problem.setting, problem.setting.shape
    attend = dense_step(name, heads.num_q, heads.num_kv, float(heads.width**-0.5))
    nbytes, calls = step_bytes(setting, problem.length + 1), []
    for draw in range(_num_caches(setting.device, nbytes)):
        q, k, v = setting.inputs(problem.length + 1, draw=draw)
        calls.append(partial(attend, q[:, :, -1:].clone(), k, v))
    return Work(calls, nbytes=nbytes)


def _step(problem: Problem, method: Method) -> Work:
    """One decode step of a condensed layer: store the token, pool a group that is due, attend.

    In turn over static caches, copies of one that has read ``length`` tokens, together larger than L2.
    """
    setting, length = problem.setting, problem.length
    inputs = setting.inputs(length + 1)
    scale, new_layer = inputs.scale, StaticRecallLayer if isinstance(method, Recall) else StaticCondensedLayer
    layer, growing = new_layer(method, length + _ROOM), CondensedLayer(method)  # type: ignore[arg-type]
    q, k, v = (x[:, :, :-1] for x in inputs)
    for cache in (layer, growing):
        cache.read(k, v, read_request(q, scale=scale))
    q, k, v = (x[:, :, -1:].clone() for x in inputs)
    sources = growing.read(k, v, read_request(q, scale=scale))
    entries = sources.entries.k.shape[2]
    more = entries * index_bytes(method, setting) - saved_bytes(method, setting, entries)
    nbytes = step_bytes(setting, visible_pairs(method, sources, 1), more)
    layers = [layer, *(copy.deepcopy(layer) for _ in range(1, _num_caches(setting.device, nbytes)))]

    def check() -> Verdict:
        return gate.check_output(layer.step(q, k, v, scale=scale), q, sources, scale=scale, method=method)

    return Work([partial(other.step, q, k, v, scale=scale) for other in layers], check, nbytes=nbytes)


def _num_caches(device: torch.device, nbytes: int) -> int:
    """Number of caches of ``nbytes`` each that fill the L2 cache three times."""
    if device.type != "cuda":
        return MIN_CACHES
    return max(MIN_CACHES, math.ceil(3 * torch.cuda.get_device_properties(device).L2_cache_size / nbytes))
