"""The `triton` backend of summaries and pooling, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L new queries, Q mean queries of earlier tokens
(``tail``), N tokens of the window, D and Dv widths, G spans of S queries or groups of c tokens.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from condense.ops.triton import pool_kernels as kernels
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, holders, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.types import Chunks, SummaryColumns, SummarySpans

_SUMMARIZE, _SUMMARIZE_BACKWARD = Launcher(kernels.summarize_fwd_kernel), Launcher(kernels.summarize_bwd_kernel)
_POOL, _POOL_BACKWARD = Launcher(kernels.pool_fwd_kernel), Launcher(kernels.pool_bwd_kernel)
# one warp: on an H200 two or four took 3 to 15 times as long, because they exchange data through shared memory
_OPTIONS = {"num_warps": 1}


class _Tile(NamedTuple):
    """Groups per program, width of its tile of vectors, and vectors: loads in flight per thread."""

    groups: int
    width: int
    vectors: int


@functools.cache
def _tile(dtype: torch.dtype, *widths: int) -> _Tile:
    """A tile for which threads read 16 bytes at a time, a warp holds whole vectors, and eight loads are in flight."""
    width = power_of_2(max(16, *widths))
    threads = max(1, width * dtype.itemsize // 16)
    reads = max(1, threads // 32) * sum(width > 0 for width in widths)
    return _Tile(max(1, 32 // threads), width, max(1, 8 // reads))


class _Place(NamedTuple):
    """Summary spans as kernels take them. numbers: start, before and after if the rows agree, else in ``rows``."""

    numbers: tuple[int, int, int]
    rows: Tensor | None
    kind: str
    size: int
    stride: int


def _place(spans: SummarySpans | SummaryColumns, q: Tensor) -> _Place:
    if isinstance(spans, SummaryColumns):
        ends = torch.stack([spans.lo, spans.hi]).to(torch.int32)
        return _Place((0, 0, q.shape[2]), ends, "columns", spans.size, spans.size)
    agreed = spans.int_if_equal()
    if agreed is not None:
        return _Place(agreed, None, "row", spans.size, spans.stride)
    rows = torch.stack(spans.rows(q.shape[0])).to(torch.int32)
    return _Place((0, 0, 0), rows.to(q.device, non_blocking=True), "rows", spans.size, spans.stride)


def _summarize(q: Tensor, tail: Tensor, G: int, place: _Place) -> Tensor:
    """G summaries, float32 ``[B, K, G, D]``, see `condense.ops.summarize`."""
    q, tail = dense_rows(q), dense_rows(tail)
    B, H, L, D = q.shape
    K, Q, R = tail.shape[1], tail.shape[2], H // tail.shape[1]
    out = q.new_empty(B, K, G, D, dtype=torch.float32)
    check_programs(B * K)
    tile = _tile(q.dtype, D)
    heads = min(tile.vectors, power_of_2(R))
    tokens = min(tile.vectors // heads, power_of_2(place.size))
    with on_device_of(q):
        _SUMMARIZE(
            (cdiv(G, tile.groups), B * K, 1),
            (q, tail, q if place.rows is None else place.rows, out),
            (*q.stride()[:3], *tail.stride()[:3], *place.numbers, B, K, L, Q, G, place.size, place.stride),
            (R, D, tokens, heads, tile.groups, tile.width, Q > 0, place.kind),
            _OPTIONS,
        )
    return out


class _Summarize(torch.autograd.Function):
    """Autograd function of `_summarize`, with a gradient for q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, tail: Tensor, G: int, place: _Place) -> Tensor:
        ctx.place, ctx.shape, ctx.num_kv_heads, ctx.dtype = place, q.shape, tail.shape[1], q.dtype
        return _summarize(q, tail, G, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        place: _Place = ctx.place
        (B, H, L, D), K, G = ctx.shape, ctx.num_kv_heads, d_out.shape[2]
        d_out = dense_rows(d_out)
        dq = d_out.new_empty(ctx.shape, dtype=ctx.dtype)
        tile = _tile(dq.dtype, D)
        rows = d_out if place.rows is None else place.rows
        with on_device_of(d_out):
            _SUMMARIZE_BACKWARD(
                (cdiv(L, tile.groups), B * K, 1),
                (d_out, rows, holders(rows[None], L) if place.kind == "columns" else rows, dq),
                (*d_out.stride()[:3], *place.numbers, B, K, L, G, place.size, place.stride),
                (H // K, D, tile.groups, tile.width, place.kind),
                _OPTIONS,
            )
        return dq, None, None, None


class _Groups(NamedTuple):
    """Settings of pooling ``num`` groups of ``size`` tokens. start: first column of group 0, if groups are adjacent."""

    start: int
    num: int
    size: int
    scale: float
    key_pooling: str
    value_pooling: str
    return_lse: bool

    def constants(self, D: int, Dv: int, tile: _Tile, *, scored: bool) -> tuple[int | str | bool, ...]:
        """Constants that a kernel is compiled for."""
        return D, Dv, tile.vectors, tile.groups, tile.width, self.key_pooling, self.value_pooling, scored


def _pool(k: Tensor, v: Tensor, summary: Tensor | None, columns: Tensor | None, groups: _Groups) -> tuple[Tensor, ...]:
    """Run `pool_groups` on contiguous rows. columns: first of each group, int32 ``[B|1, G]``; None if adjacent."""
    (B, K, N, D), Dv, G = k.shape, v.shape[3], groups.num
    check_programs(B * K)
    key, value = k.new_empty(B, K, G, D), v.new_empty(B, K, G, Dv)
    lse = k.new_empty(B, K, G, dtype=torch.float32) if groups.return_lse else None
    tile = _tile(k.dtype, D, Dv)
    with on_device_of(k):
        _POOL(
            (cdiv(G, tile.groups), B * K, 1),
            (k, v, summary, columns, key, value, lse),
            (*_strides(k, v, summary, columns), groups.start, K, N, G, groups.size, groups.scale * LOG2E),
            groups.constants(D, Dv, tile, scored=summary is not None),
            _OPTIONS,
        )
    return (key, value) if lse is None else (key, value, lse)


class _Pool(torch.autograd.Function):
    """Autograd function of `_pool`, with gradients for k, v and summary."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, summary: Tensor | None, columns: Tensor | None, groups: _Groups
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(k, v, summary, columns)
        ctx.groups = groups
        return _pool(k, v, summary, columns, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_key: Tensor, d_value: Tensor, *d_lse: Tensor) -> tuple[Tensor | None, ...]:
        k, v, summary, columns = ctx.saved_tensors
        groups: _Groups = ctx.groups
        (B, K, N, D), Dv, G, c = k.shape, v.shape[3], groups.num, groups.size
        # zeros, because the kernel does not write tokens that are in no group
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        d_summary = None if summary is None else summary.new_empty(B, K, G, D)
        tile = _tile(k.dtype, D, Dv)
        with on_device_of(k):
            # d_summary may be None, but no other tensor may take its place: torch.compile loses what is written to a
            # tensor that is passed twice
            _POOL_BACKWARD(
                (cdiv(G, tile.groups), B * K, 1),
                (
                    k, v, summary, columns, d_key.contiguous(), d_value.contiguous(),
                    d_lse[0].contiguous() if d_lse else None, dk, dv, d_summary,
                ),
                (*_strides(k, v, summary, columns), groups.start, K, N, G, c, groups.scale, groups.scale * LOG2E),
                groups.constants(D, Dv, tile, scored=summary is not None),
                _OPTIONS,
            )  # fmt: skip
        return dk, dv, d_summary, None, None


def _strides(k: Tensor, v: Tensor, summary: Tensor | None, columns: Tensor | None) -> tuple[int, ...]:
    of_summary = (0, 0, 0) if summary is None else summary.stride()[:3]
    of_columns = 0 if columns is None or columns.shape[0] == 1 else columns.stride(0)
    return *k.stride()[:3], *v.stride()[:3], *of_summary, of_columns


def _wants_gradient(*tensors: Tensor | None) -> bool:
    """True if autograd is needed. Otherwise the kernel is called directly: a `Function` costs more than the launch."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def summarize(q: Tensor, tail: Tensor, spans: SummarySpans | SummaryColumns) -> Tensor:
    """Summary queries, see `condense.ops.summarize`."""
    run = _Summarize.apply if _wants_gradient(q) else _summarize
    out: Tensor = run(q, tail, spans.num, _place(spans, q))
    return out


def pool_groups(
    groups: Chunks, summary: Tensor | None, *, scale: float, key_pooling: str, value_pooling: str, return_lse: bool
) -> tuple[Tensor, ...]:
    """Pooled keys and values of groups, see `condense.ops.pool_groups`."""
    at = groups.columns
    start, columns = (0, at.to(torch.int32).contiguous()) if isinstance(at, Tensor) else (at, None)
    settings = _Groups(start, groups.num, groups.size, scale, key_pooling, value_pooling, return_lse)
    k, v = dense_rows(groups.window_k), dense_rows(groups.window_v)
    summary = None if summary is None else dense_rows(summary.float())
    run = _Pool.apply if _wants_gradient(k, v, summary) else _pool
    pooled: tuple[Tensor, ...] = run(k, v, summary, columns, settings)
    return pooled
