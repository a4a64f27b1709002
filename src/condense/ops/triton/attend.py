"""The `triton` backend: attention over a list of sources as kernels, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, N entries of a source, D and Dv widths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.spans import Source, Spans
from condense.ops.triton.attend_backward import attend_dkv_kernel, attend_dq_kernel
from condense.ops.triton.attend_call import (
    AttendCall,
    AttendShared,
    backward_operation,
    call_of,
    needs_operation,
    not_empty,
    operation,
    results,
    row_strides,
)
from condense.ops.triton.attend_forward import attend_fwd_kernel
from condense.ops.triton.descriptors import described
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import MAX_SOURCES

_FORWARD, _DQ, _DKV = (Launcher(kernel) for kernel in (attend_fwd_kernel, attend_dq_kernel, attend_dkv_kernel))


class Tiles(NamedTuple):
    """Rows and keys of a tile, and Triton's options."""

    rows: int
    keys: int
    options: dict[str, int]


def small_tiles(kernel: str, dtype: torch.dtype, is_cuda: bool, R: int) -> Tiles | None:
    """Tiles of the interpreter, and of float32, whose products are computed as three (tf32x3); None for others."""
    rows = power_of_2(R)
    if not is_cuda:
        return Tiles(16 if kernel == "dkv" else max(16, rows), 16, {})
    if dtype == torch.float32:
        return Tiles(32 if kernel == "dkv" else max(32, rows), 32, {"num_warps": 4, "num_stages": 1})
    return None


@functools.cache
def _tiles(kernel: str, dtype: torch.dtype, is_cuda: bool, widest: int, R: int) -> Tiles:
    """Tiles by kernel, dtype, width and heads per KV head; the length does not matter.

    Measured on an H200 at width 128. Forward: of 64 and 128 rows and 32, 64 and 128 keys, 64 x 64 was the fastest by
    5 to 30 percent: two programs share a multiprocessor, and one multiplies while the other computes its softmax. The
    kernel of dk and dv holds two accumulators in registers, which leaves room for 32 queries at a time.
    """
    if (small := small_tiles(kernel, dtype, is_cuda, R)) is not None:
        return small
    rows = power_of_2(R)
    if kernel == "dkv":
        return Tiles(32, 64, {"num_warps": 4 if widest <= 128 else 8, "num_stages": 3 if widest <= 128 else 2})
    stages = 3 if kernel == "fwd" and widest <= 128 else 2
    return Tiles(max(64, rows), 64, {"num_warps": 4 if rows <= 64 else 8, "num_stages": stages})


def _constants(call: AttendCall, kind: str, *more: int) -> tuple[int | float | str, ...]:
    """Constants that the kernels are compiled for: number of sources, widths, kind of spans, precision, cap, tiles."""
    # tf32x3, three products of the matrix units, is within the error of PyTorch's float32 attention
    precision = "tf32x3" if call.q.dtype == torch.float32 else "tf32"
    widths = *split_width(call.q.shape[3]), *split_width(call.v[0].shape[3])
    return len(call.k), *widths, kind, precision, call.softcap * LOG2E, *more


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of an `AttendCall`."""
    call = AttendCall(*arguments)
    shared = AttendShared.of(call)
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    k, v = not_empty(call.k), not_empty(call.v)
    (B, _, L, D), R = q.shape, shared.R
    tiles = _tiles("fwd", q.dtype, q.is_cuda, max(D, out.shape[3]), R)
    tensors = (
        q, *described(k, tiles.keys, MAX_SOURCES), *described(v, tiles.keys, MAX_SOURCES), shared.biases, shared.spans,
        out, lse,
    )  # fmt: skip
    numbers = (
        q.stride()[:3], shared.s_bias, shared.s_spans, shared.levels, shared.K, R, L, *call.rule, call.scale * LOG2E,
    )  # fmt: skip
    with on_device_of(q):
        _FORWARD(
            (cdiv(L, tiles.rows // R), B * shared.K, 1), tensors, numbers,
            _constants(call, shared.kind, tiles.rows, tiles.keys), tiles.options,
        )  # fmt: skip
    return out, lse


def _backward(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, call: AttendCall) -> list[Tensor]:
    """Gradients of q, of the sources' keys and of their values, and of the biases."""
    shared = AttendShared.of(call)
    d_out, q = whole_rows(d_out), whole_rows(call.q)
    k, v = not_empty(call.k), not_empty(call.v)
    (B, _, L, D), K, R, Dv = q.shape, shared.K, shared.R, out.shape[3]
    row_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    dq, *grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, *k, *v))
    dk, dv = tuple(grads[: len(k)]), tuple(grads[len(k) :])
    is_biased = any(x is not None for x in shared.biases)
    d_biases = tuple([x.new_empty(x.shape[:3], dtype=torch.float32) for x in k]) if is_biased else None
    scales = (call.scale * LOG2E, call.scale)
    with on_device_of(q):
        tiles = _tiles("dq", q.dtype, q.is_cuda, max(D, Dv), R)
        tensors = (
            q, *described(k, tiles.keys, MAX_SOURCES), *described(v, tiles.keys, MAX_SOURCES), shared.biases,
            shared.spans, out, d_out, lse, d_lse.contiguous(), row_lse, delta, dq,
        )  # fmt: skip
        numbers = (
            q.stride()[:3], d_out.stride()[:3], shared.s_bias, shared.s_spans, shared.levels, K, R, L,
            *call.rule, *scales,
        )  # fmt: skip
        _DQ(
            (cdiv(L, tiles.rows // R), B * K, 1), tensors, numbers,
            _constants(call, shared.kind, tiles.rows, tiles.keys), tiles.options,
        )  # fmt: skip
        tiles = _tiles("dkv", q.dtype, q.is_cuda, max(D, Dv), R)
        # heads in a tile: the largest power of two that divides R
        heads = min(R & -R, tiles.rows)
        sizes = [x.shape[2] for x in k]
        seen = _seen(call.spans, sizes) if shared.kind == "arrays" and call.spans is not None else None
        grouped = (described([x.unflatten(1, (-1, heads))], tiles.rows // heads) for x in (q, d_out))
        tensors = (
            row_lse, delta, *itertools.chain(*grouped), tuple(k), tuple(v), shared.biases, shared.spans, seen, dk, dv,
            d_biases,
        )  # fmt: skip
        numbers = (
            tuple([x.stride()[:3] for x in k]), tuple([x.stride()[:3] for x in v]), shared.s_bias, shared.s_spans,
            None if seen is None else tuple([(x.stride(0), *row_strides(x)) for x in seen]), shared.levels, K, R, L,
            *sizes, *[0] * (MAX_SOURCES - len(sizes)), *call.rule, *scales,
        )  # fmt: skip
        _DKV(
            (B * K, sum(cdiv(size, tiles.keys) for size in sizes), 1), tensors, numbers,
            _constants(call, shared.kind, heads, tiles.rows, tiles.keys), tiles.options,
        )  # fmt: skip
    of_biases = []
    for n, bias in enumerate(call.biases):
        if d_biases is None:  # of an empty source
            of_biases.append(torch.zeros_like(bias))
        else:
            of_source = d_biases[call.bias_of.index(n)][:, :, : bias.shape[2]]
            of_biases.append(of_source.sum_to_size(bias.shape).to(bias.dtype))
    return [x[:, :, : y.shape[2]] for x, y in zip((dq, *grads), (q, *call.k, *call.v), strict=True)] + of_biases


def _seen(spans: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Per source the queries ``[lo, hi)`` that see each key, int32 ``[2, B|1, K|1, max(sizes)]``; hi < lo for none.

    spans: int32 ``[sources, 2, B|1, K|1, L]``, never decreasing along L: the queries that see a key begin behind those
    whose spans end before it, and end with the last whose span begins at it or before.
    """
    key = torch.arange(max(sizes), device=spans.device, dtype=torch.int32).expand(*spans.shape[:-1], -1)
    return torch.searchsorted(spans.flip(1), key.contiguous(), right=True, out_int32=True).unbind()


def attend_by(
    op: Callable[..., tuple[Tensor, Tensor]], forward: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A backend's `condense.ops.attend`: ``forward`` of an `AttendCall`, as the operation ``op`` where needed."""

    def attend(
        q: Tensor,
        sources: Sequence[Source],
        spans: Spans,
        *,
        scale: float,
        softcap: float,
        dropout_p: float,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `condense.ops.attend`."""
        assert dropout_p == 0, "the backend's limits"
        call = call_of(q, sources, spans, scale, softcap)
        out, lse = (op if needs_operation(call.q, *call.k, *call.v, *call.biases) else forward)(*call)
        return out, lse if return_lse else None

    return attend


attend_backward = backward_operation("attend_backward", AttendCall, _backward)
_attend = operation("attend", AttendCall, _forward, attend_backward)
attend = attend_by(_attend, _forward)
