"""The `triton` backend of summaries and pooling, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L new queries, Q queries kept from before, N band
tokens, D and Dv widths, G windows of S queries or groups of c tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from condense.ops.tensors.per_row import PerRow, int_if_equal, max_row, min_row
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, power_of_2
from condense.ops.triton.pool_kernels import (
    pool_bwd_kernel,
    pool_fwd_kernel,
    summarize_bwd_kernel,
    summarize_fwd_kernel,
)
from condense.ops.types import SummarySpans


class _Tile(NamedTuple):
    """Groups and warps per program, the width of its vectors, and how many a thread may have on their way."""

    groups: int
    warps: int
    width: int
    vectors: int


def _tile(x: Tensor, *widths: int) -> _Tile:
    """A thread reads 16 bytes at a time, a warp holds whole vectors, and eight reads are on their way.

    One warp: on an H200 two or four took 3 to 15 times as long, what they share goes through shared memory.
    """
    width = power_of_2(max(16, *widths))
    threads = max(1, width * x.element_size() // 16)
    reads = max(1, threads // 32) * sum(width > 0 for width in widths)
    return _Tile(max(1, 32 // threads), 1, width, max(1, 8 // reads))


class _Place(NamedTuple):
    """start, before and after of windows: numbers if the rows agree, else int32 ``[3, B]`` on the device."""

    numbers: tuple[int, int, int]
    rows: Tensor | None


def _place(windows: SummarySpans, num_rows: int, device: torch.device) -> _Place:
    agreed = windows.int_if_equal()
    if agreed is not None:
        return _Place(agreed, None)
    rows = torch.stack(windows.rows(num_rows)).to(torch.int32)
    return _Place((0, 0, 0), rows.to(device, non_blocking=True))


class _Summarize(torch.autograd.Function):
    """See `summarize`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, tail: Tensor, windows: SummarySpans) -> Tensor:
        q, tail = dense_rows(q), dense_rows(tail)
        B, H, L, D = q.shape
        K, Q, G, R = tail.shape[1], tail.shape[2], windows.num, H // tail.shape[1]
        place = _place(windows, B, q.device)
        out = q.new_empty(B, K, G, D, dtype=torch.float32)
        check_programs(B * K)
        tile = _tile(q, D)
        heads = min(tile.vectors, power_of_2(R))
        tokens = min(tile.vectors // heads, power_of_2(windows.size))
        summarize_fwd_kernel[cdiv(G, tile.groups), B * K](
            q, tail, q if place.rows is None else place.rows, out, *q.stride()[:3], *tail.stride()[:3],
            *place.numbers, B, K, L, Q, G, windows.size, windows.stride,
            R=R, D=D, BT=tokens, BR=heads, BD=tile.width, TAIL=Q > 0, PER_ROW=place.rows is not None,
            BG=tile.groups, num_warps=tile.warps,
        )  # fmt: skip
        ctx.place, ctx.windows, ctx.shape, ctx.num_kv_heads, ctx.dtype = place, windows, q.shape, K, q.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        place: _Place = ctx.place
        windows: SummarySpans = ctx.windows
        (B, H, L, D), K = ctx.shape, ctx.num_kv_heads
        d_out = dense_rows(d_out)
        dq = d_out.new_empty(ctx.shape, dtype=ctx.dtype)
        tile = _tile(dq, D)
        summarize_bwd_kernel[cdiv(L, tile.groups), B * K](
            d_out, d_out if place.rows is None else place.rows, dq, *d_out.stride()[:3], *place.numbers, B, K, L,
            windows.num, windows.size, windows.stride, R=H // K, D=D, BD=tile.width, PER_ROW=place.rows is not None,
            BG=tile.groups, num_warps=tile.warps,
        )  # fmt: skip
        return dq, None, None


class _Pool(torch.autograd.Function):
    """See `pool_groups`."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, summary: Tensor | None, start: PerRow, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        k, v = dense_rows(k), dense_rows(v)
        summary = None if summary is None else dense_rows(summary.float())
        (B, K, N, D), Dv, G = k.shape, v.shape[3], settings.num_groups
        check_programs(B * K)
        key, value = k.new_empty(B, K, G, D), v.new_empty(B, K, G, Dv)
        tile = _tile(k, D, Dv)
        pool_fwd_kernel[cdiv(G, tile.groups), B * K](
            k, v, k if summary is None else summary, start, key, value,
            *_strides(k, v, summary), K, N, G, settings.group_size, settings.scale * LOG2E,
            **settings.constants(D, Dv, summary, start, tile),
        )  # fmt: skip
        ctx.save_for_backward(k, v, summary)
        ctx.start, ctx.settings = start, settings
        return key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_key: Tensor, d_value: Tensor) -> tuple[Tensor | None, ...]:
        k, v, summary = ctx.saved_tensors
        settings: _Settings = ctx.settings
        (B, K, N, D), Dv, G, c = k.shape, v.shape[3], settings.num_groups, settings.group_size
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        d_summary = None if summary is None else summary.new_empty(B, K, G, D)
        tile = _tile(k, D, Dv)
        # the groups in front of the first and behind the last: every token of the band is in one of them
        lead = cdiv(settings.latest, c)
        num_all = lead + max(G, cdiv(N - settings.earliest, c))
        pool_bwd_kernel[cdiv(num_all, tile.groups), B * K](
            k, v, k if summary is None else summary, ctx.start, d_key.contiguous(), d_value.contiguous(),
            dk, dv, dk if d_summary is None else d_summary,
            *_strides(k, v, summary), K, N, G, c, lead, settings.scale, settings.scale * LOG2E,
            **settings.constants(D, Dv, summary, ctx.start, tile),
        )  # fmt: skip
        return dk, dv, d_summary, None, None


class _Settings(NamedTuple):
    """What a call asks for. earliest and latest: first columns of groups, over the rows."""

    num_groups: int
    group_size: int
    earliest: int
    latest: int
    scale: float
    key_pooling: str
    value_pooling: str

    def constants(
        self, D: int, Dv: int, summary: Tensor | None, start: PerRow, tile: _Tile
    ) -> dict[str, int | str | bool]:
        """What a kernel is compiled for."""
        return {
            "D": D, "DV": Dv, "BT": tile.vectors, "BG": tile.groups, "BD": tile.width, "num_warps": tile.warps,
            "KEYS": self.key_pooling, "VALUES": self.value_pooling,
            "SCORED": summary is not None, "PER_ROW": isinstance(start, Tensor),
        }  # fmt: skip


def _strides(k: Tensor, v: Tensor, summary: Tensor | None) -> tuple[int, ...]:
    return (*k.stride()[:3], *v.stride()[:3], *((0, 0, 0) if summary is None else summary.stride()[:3]))


def summarize(q: Tensor, tail: Tensor, windows: SummarySpans) -> Tensor:
    """See `condense.ops.summarize`."""
    # kernels start on the current device, which need not be the tensors' in a model spread over several
    with torch.cuda.device_of(q):
        out: Tensor = _Summarize.apply(q, tail, windows)
    return out


def pool_groups(
    k: Tensor,
    v: Tensor,
    summary: Tensor | None,
    start: PerRow,
    num_groups: int,
    group_size: int,
    scale: float,
    key_pooling: str,
    value_pooling: str,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.pool_groups`."""
    start = int_if_equal(start)
    settings = _Settings(num_groups, group_size, min_row(start), max_row(start), scale, key_pooling, value_pooling)
    place = start.to(torch.int32).to(k.device, non_blocking=True) if isinstance(start, Tensor) else start
    with torch.cuda.device_of(k):
        out: tuple[Tensor, Tensor] = _Pool.apply(k, v, summary, place, settings)
    return out
