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

from condense.ops.spans import RuleSpans, Source, Spans, UniformRule
from condense.ops.triton.attend_backward import attend_dkv_kernel, attend_dq_kernel
from condense.ops.triton.attend_forward import attend_fwd_kernel
from condense.ops.triton.descriptors import described
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, on_device_of, power_of_2, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import MAX_SOURCES

# stands for "no limit" in kernels: more tokens than any row has, and a sum of three such numbers still fits in 32 bits
_UNLIMITED = 1 << 29
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


class Call(NamedTuple):
    """The arguments of the operations: the fields of all sources as lists, and spans as `describe` makes them.

    biases: float ``[B|1, K|1, N]``, of sources that have one; bias_of: its number for each source, -1 for none. levels:
    numbers added to all scores of a source.
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    biases: Sequence[Tensor]
    bias_of: Sequence[int]
    levels: Sequence[float]
    spans: Tensor | None
    rule: Sequence[int]
    scale: float
    softcap: float = 0.0


class Shared(NamedTuple):
    """Numbers and tensors that the kernels of a call share. A stride is 0 in a dimension where all rows are alike."""

    K: int
    R: int
    biases: tuple[Tensor | None, ...]
    s_bias: tuple[tuple[int, int], ...]
    spans: Tensor
    s_spans: tuple[int, int, int]
    levels: tuple[float, ...]
    kind: str

    @classmethod
    def of(cls, call: Call) -> Shared:
        """Raises ValueError for more rows and heads than a grid holds."""
        K = call.k[0].shape[1]
        check_programs(call.q.shape[0] * K)
        biases: tuple[Tensor | None, ...] = (None,) * len(call.k)
        if call.biases:
            # a source without entries gets no bias either
            known = [(x.float() * LOG2E).contiguous() if x.shape[2] > 0 else None for x in call.biases]
            biases = tuple([None if n < 0 else known[n] for n in call.bias_of])
        kind = "row" if call.spans is None else "rows" if call.spans.ndim == 2 else "arrays"
        s_bias = tuple([(0, 0) if x is None else row_strides(x) for x in biases])
        spans, s_spans = call.q if call.spans is None else call.spans, (0, 0, 0)
        if call.spans is not None and kind == "arrays":
            s_spans = (call.spans.stride(1), *row_strides(call.spans))
        levels = tuple([x * LOG2E for x in call.levels])
        return cls(K, call.q.shape[1] // K, biases, s_bias, spans, s_spans, levels, kind)


def row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of batch and KV head of ``[..., B|1, K|1, n]``, 0 for a dimension of size 1."""
    return (0 if x.shape[-3] == 1 else x.stride(-3), 0 if x.shape[-2] == 1 else x.stride(-2))


def not_empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Keys or values of the sources in rows as kernels read them; an empty source gets one row that no query sees."""
    other = next((x for x in tensors if x.shape[2] > 0), None)
    if other is None:
        return [x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in tensors]
    return [whole_rows(x if x.shape[2] > 0 else other[:, :, :1]) for x in tensors]


def results(q: Tensor, v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Empty tensors for output ``[B, H, L, Dv]`` and log-sum-exp ``[B, H, L]``."""
    return q.new_empty(*q.shape[:3], v[0].shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _constants(call: Call, kind: str, *more: int) -> tuple[int | float | str, ...]:
    """Constants that the kernels are compiled for: number of sources, widths, kind of spans, precision, cap, tiles."""
    # tf32x3, three products of the matrix units, is within the error of PyTorch's float32 attention
    precision = "tf32x3" if call.q.dtype == torch.float32 else "tf32"
    widths = *split_width(call.q.shape[3]), *split_width(call.v[0].shape[3])
    return len(call.k), *widths, kind, precision, call.softcap * LOG2E, *more


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a `Call`."""
    call = Call(*arguments)
    shared = Shared.of(call)
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


def _backward(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, call: Call) -> list[Tensor]:
    """Gradients of q, of the sources' keys and of their values, and of the biases."""
    shared = Shared.of(call)
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


def operation(name: str, forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``forward`` of a `Call` as a torch operation, so that torch.compile keeps it whole; gradients by `_backward`."""

    @torch.library.custom_op(f"condense::{name}", mutates_args=())
    def op(
        q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], biases: Sequence[Tensor], bias_of: Sequence[int],
        levels: Sequence[float], spans: Tensor | None, rule: Sequence[int], scale: float, softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return forward(q, k, v, biases, bias_of, levels, spans, rule, scale, softcap)

    op.register_fake(lambda q, k, v, *_: results(q, v))
    op.register_autograd(_differentiate, setup_context=_keep)
    return op


@torch.library.custom_op("condense::attend_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor],
    biases: Sequence[Tensor], bias_of: Sequence[int], levels: Sequence[float], spans: Tensor | None,
    rule: Sequence[int], scale: float, softcap: float,
) -> list[Tensor]:  # fmt: skip
    """See `_backward`."""
    return _backward(d_out, d_lse, out, lse, Call(q, k, v, biases, bias_of, levels, spans, rule, scale, softcap))


@_attend_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor],
    biases: Sequence[Tensor], *_: Any,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, *k, *v, *biases)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = Call(*inputs)
    ctx.num_sources, ctx.numbers = len(call.k), (call.bias_of, call.levels, call.rule, call.scale, call.softcap)
    ctx.save_for_backward(*output, call.q, call.spans, *call.k, *call.v, *call.biases)


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    out, lse, q, spans, *tensors = ctx.saved_tensors
    n, (bias_of, levels, *numbers) = ctx.num_sources, ctx.numbers
    k, v, biases = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
    dq, *grads = _attend_backward(d_out, d_lse, out, lse, q, k, v, biases, bias_of, levels, spans, *numbers)
    return dq, grads[:n], grads[n : 2 * n], grads[2 * n :], *[None] * 6


_attend = operation("attend", _forward)


def describe(spans: Spans, num_sources: int, L: int, device: torch.device) -> tuple[Tensor | None, list[int]]:
    """Spans as kernels take them: a tensor on the device or None, and eight numbers: a `UniformRule` and a `Start`.

    None: the rule, with the same start in all rows. int32 ``[B, 4]``: the rule, and the start of each row. int32
    ``[sources, 2, B|1, K|1, L]``: lo and hi of each source; the numbers are not used.
    """
    if not isinstance(spans, RuleSpans) or not isinstance(spans.rule, UniformRule):
        ends = torch.broadcast_tensors(*(x for span in spans.at(0, L, device) for x in span))
        return torch.stack(ends).unflatten(0, (-1, 2)).to(torch.int32), [1, 1, 1, 1, 0, 0, 0, 0]
    assert num_sources == 2, "the uniform rule has the entries and the window"
    rule = spans.rule
    window, max_chunks = (_UNLIMITED if x is None else min(x, _UNLIMITED) for x in (rule.window, rule.max_chunks))
    numbers = [min(rule.chunk, _UNLIMITED), window, rule.entries, max_chunks]
    start = spans.same_in_all_rows()
    if start is not None:
        return None, [*numbers, *start]
    return spans.starts().to(device, torch.int32, non_blocking=True), [*numbers, 0, 0, 0, 0]


def call_of(q: Tensor, sources: Sequence[Source], spans: Spans, scale: float, softcap: float = 0.0) -> Call:
    """The arguments of the operations."""
    k, v = [source.k for source in sources], [source.v for source in sources]
    biases: list[Tensor] = []
    bias_of: list[int] = []
    for source in sources:
        bias_of.append(len(biases) if isinstance(source.bias, Tensor) else -1)
        if isinstance(source.bias, Tensor):
            biases.append(source.bias)
    levels = [0.0 if source.bias is None or isinstance(source.bias, Tensor) else source.bias for source in sources]
    if scale <= 0:  # the kernels need scale > 0, so the sign (or the zero) goes into q
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    return Call(q, k, v, biases, bias_of, levels, *describe(spans, len(sources), q.shape[2], q.device), scale, softcap)


def needs_operation(q: Tensor, *others: Tensor) -> bool:
    """True if autograd, torch.compile or a subclass of Tensor is involved, which need a torch operation.

    Otherwise the kernel is called directly: dispatching the operation takes longer than all other host work.
    """
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))


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
    out, lse = (_attend if needs_operation(call.q, *call.k, *call.v, *call.biases) else _forward)(*call)
    return out, lse if return_lse else None
