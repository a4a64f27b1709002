"""Rows of the kernel benchmark: a call to time, its check, and its amount of work; nothing runs until `prepare`.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from condense.caches import CondensedLayer, ReadRequest, StaticCondensedLayer
from condense.functional import attention
from condense.methods import Context, Dense, Method
from condense.ops import NewToken, Source
from condense.plan import ForwardPlan
from speed import gate
from speed.baselines import dense_attention, dense_step, flex_attention, joined_keys
from speed.budget import Verdict
from speed.problems import Setting, attention_flops, beside_keys, pooled, step_bytes, visible_pairs
from speed.rows import op_kind

MIN_CACHES = 8
# room for one token per timed replay: more than the clock makes
_ROOM = 512

Attend = Callable[..., Any]


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
    setting: Setting
    length: int
    method: Method | None = None
    condensed: bool = False
    backend: str | None = None

    def prepare(self) -> Work:
        """Make inputs and sources. PyTorch's own operations are not checked, FlexAttention with our mask is."""
        is_step = op_kind(self.op) == "decode"
        if not self.condensed:
            return self._dense_step() if is_step else self._baseline()
        assert self.method is not None
        if is_step:
            return self._step(self.method)
        return self._layer(self.method) if self.op == "layer" else self._attention(self.method)

    def _baseline(self) -> Work:
        inputs, method = self.setting.inputs(self.length), self.method or Dense()
        context, check = pooled(method, inputs), None
        if self.method is None:
            return self._attending(dense_attention(self.runner, inputs), inputs, check, method, context)
        attend, tensors = flex_attention(context, self.length, scale=inputs.scale), (inputs.q, *joined_keys(context))
        check = partial(_check, lambda: attend(*tensors), inputs.q, context, scale=inputs.scale, method=method)
        return self._attending(attend, tensors, check, method, context)

    def _layer(self, method: Method) -> Work:
        inputs, backend = self.setting.inputs(self.length), self.backend or "auto"
        call, context = partial(attention, *inputs, method=method, backend=backend), pooled(method, inputs, backend)

        def check() -> Verdict:
            verdict = _check(call, inputs.q, context, scale=inputs.scale, method=method)
            if method.reads_prompt:
                return verdict
            return verdict.and_also(gate.check_entries(method, inputs, context))

        return self._attending(lambda *_: call(), (), check, method, context)

    def _attention(self, method: Method) -> Work:
        """Attention alone, forward or forward and backward, over sources that are there."""
        inputs, backend = self.setting.inputs(self.length), self.backend or "auto"
        context, scale = pooled(method, inputs, backend), inputs.scale
        extra, store = (
            (context.extra[:2], context.extra[2:]) if method.layout.choice is not None else (context.extra, ())
        )
        leaves = (inputs.q, *context.entries[:2], *store, *context.window[:2])

        def run(q: Tensor, entries_k: Tensor, entries_v: Tensor, *others: Tensor) -> Tensor:
            *opened, window_k, window_v = others
            sources = Source(entries_k, entries_v, context.entries.bias), Source(window_k, window_v)
            parts = Context(sources, context.spans, (*extra, *opened), context.means)
            return method.attend(q, parts, scale=scale, backend=backend)[0]

        def check() -> Verdict:
            if self.op == "forward":
                return _check(lambda: run(*leaves), inputs.q, context, scale=scale, method=method)
            gradients = partial(_gradients, run, leaves)
            return gate.check_gradients(gradients, inputs.q, context, scale=scale, method=method)

        return self._attending(run, leaves, check, method, context)

    def _attending(
        self,
        attend: Attend,
        tensors: tuple[Tensor, ...],
        check: Callable[[], Verdict] | None,
        method: Method,
        context: Context,
    ) -> Work:
        """The work of attention over sources; of backward, with an output gradient for every query."""
        heads = self.setting.shape
        call: Callable[[], Any] = partial(attend, *tensors)
        if self.op == "backward":
            upstream = self.setting.normal(heads.num_q, self.length, heads.value_width, draw=3)
            call = partial(_gradients, attend, tensors, upstream)
        pairs = visible_pairs(method, context, self.length)
        flops = attention_flops(heads, self.setting.batch, pairs, backward=self.op == "backward")
        return Work([call], check, flops=flops, pairs=pairs)

    def _dense_step(self) -> Work:
        """One decode step of a dense baseline over caches larger together than L2, the newest token already in them."""
        heads = self.setting.shape
        attend = dense_step(self.runner, heads.num_q, heads.num_kv, float(heads.width**-0.5))
        nbytes, calls = step_bytes(self.setting, self.length + 1), []
        for draw in range(_num_caches(self.setting.device, nbytes)):
            q, k, v = self.setting.inputs(self.length + 1, draw=draw)
            calls.append(partial(attend, q[:, :, -1:].clone(), k, v))
        return Work(calls, nbytes=nbytes)

    def _step(self, method: Method) -> Work:
        """One decode step of a condensed layer: store the token, pool a group that is due, attend.

        In turn over static caches, copies of one that has read ``length`` tokens, together larger than L2.
        """
        inputs = self.setting.inputs(self.length + 1)
        scale, layer, growing = inputs.scale, StaticCondensedLayer(method, self.length + _ROOM), CondensedLayer(method)
        q, k, v = (x[:, :, :-1] for x in inputs)
        for cache in (layer, growing):
            cache.read(k, v, ReadRequest(q, scale, ForwardPlan(self.length), self.length))
        q, k, v = (x[:, :, -1:].clone() for x in inputs)
        context = growing.read(k, v, ReadRequest(q, scale, ForwardPlan(1), 1))
        more = beside_keys(method, self.setting, context.entries.k.shape[2])
        nbytes = step_bytes(self.setting, visible_pairs(method, context, 1), more)
        layers = [layer, *(copy.deepcopy(layer) for _ in range(1, _num_caches(self.setting.device, nbytes)))]
        calls = [partial(other.step, NewToken(q, k, v), scale=scale) for other in layers]
        return Work(calls, partial(_check, calls[0], q, context, scale=scale, method=method), nbytes=nbytes)


def has_op(op: str, method: Method) -> bool:
    """True if a method has rows of ``op``: backward if it can be trained.

    A prompt that is read at once has rows of its attention and its layer alone: its decode is the streaming method's.
    """
    if op == "backward":
        with contextlib.suppress(ValueError):
            method.check_gradients()
            return not method.reads_prompt
        return False
    return op in ("forward", "layer") or not method.reads_prompt


def _check(call: Callable[[], Any], q: Tensor, context: Context, *, scale: float, method: Method) -> Verdict:
    return gate.check_output(call(), q, context, scale=scale, method=method)


def _gradients(attend: Attend, tensors: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward; a tensor that no query sees has gradient 0."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, upstream, allow_unused=True, materialize_grads=True)


def _num_caches(device: torch.device, nbytes: int) -> int:
    """Number of caches of ``nbytes`` each that fill the L2 cache three times."""
    if device.type != "cuda":
        return MIN_CACHES
    return max(MIN_CACHES, math.ceil(3 * torch.cuda.get_device_properties(device).L2_cache_size / nbytes))
