"""The `triton` backend: prefix-band attention as kernels, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, M prefix entries, N band tokens,
D and Dv widths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from condense.ops.bounds import Bounds
from condense.ops.triton_backward import attend_dkv_kernel, attend_dq_kernel
from condense.ops.triton_forward import attend_fwd_kernel

_LOG2E = math.log2(math.e)


def _widths(D: int, Dv: int) -> dict[str, int]:
    return {"D": D, "DV": Dv, "BD": triton.next_power_of_2(max(D, 16)), "BV": triton.next_power_of_2(max(Dv, 16))}


def _tiles(q: Tensor, kernel: str) -> dict[str, int]:
    """Rows, keys, warps and stages per kernel; the length is no part of the choice.

    For width 128, as held to float64 on an H200. Forward tiles of 64 keys and 3 stages ran 15 percent faster there at
    32K tokens and 3 percent at 128K; they are to be held to float64 before they come in.
    """
    if not q.is_cuda:  # the interpreter
        return {"BM": 16, "BN": 16}
    if kernel == "dkv":
        return {"BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2}
    return {"BM": 128, "BN": 128 if kernel == "fwd" else 64, "num_warps": 8, "num_stages": 2}


class _Plan:
    """What the kernels of one call share: bounds on the device, strides, scales."""

    def __init__(self, q: Tensor, band_k: Tensor, bounds: Bounds, bias: Tensor | None, scale: float) -> None:
        self.K, self.R, self.L = band_k.shape[1], q.shape[1] // band_k.shape[1], q.shape[2]
        self.scale = scale
        arrays = torch.broadcast_tensors(*bounds.arrays(0, self.L, q.device))
        self.bounds = [x.to(torch.int32).contiguous() for x in arrays]
        self.bias = q.new_zeros(1, dtype=torch.float32) if bias is None else (bias.float() * _LOG2E).contiguous()
        self.biased = bias is not None
        self.s_bias = (0, 0) if bias is None else _row_strides(self.bias)
        self.precision = "ieee" if q.dtype == torch.float32 else "tf32"

    def shared(self) -> dict[str, Any]:
        """Keyword arguments of every kernel."""
        return {"K": self.K, "R": self.R, "L": self.L, "scale": self.scale * _LOG2E, "PRECISION": self.precision}


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of batch and KV head in ``[B|1, K|1, n]``, 0 where one stands for all."""
    return (0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1))


def _dense_rows(x: Tensor) -> Tensor:
    """The last dimension contiguous, as the kernels read whole rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _seen_by(first: Tensor, last: Tensor, size: int, L: int) -> tuple[Tensor, Tensor]:
    """Queries ``[lo, hi)`` int32 ``[B|1, K|1, size]`` that may see each key, from bounds that never decrease."""
    key = torch.arange(size, device=first.device, dtype=torch.int32).expand(*first.shape[:2], size).contiguous()
    lo = torch.searchsorted(last, key, right=True, out_int32=True)
    hi = torch.searchsorted(first, key, right=True, out_int32=True)
    return lo, torch.maximum(hi, lo)


class _Attend(torch.autograd.Function):
    """Forward and backward of prefix-band attention; see `attend`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, prefix_k: Tensor, prefix_v: Tensor, band_k: Tensor, band_v: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        q, *sources = (_dense_rows(x) for x in (q, prefix_k, prefix_v, band_k, band_v))
        B, H, L, D = q.shape
        Dv, M, N = band_v.shape[3], prefix_k.shape[2], band_k.shape[2]
        out = q.new_empty(B, H, L, Dv)
        lse = q.new_empty(B, H, L, dtype=torch.float32)
        tiles = _tiles(q, "fwd")
        grid = (triton.cdiv(L * plan.R, tiles["BM"]), B * plan.K)
        attend_fwd_kernel[grid](
            q, *sources, plan.bias, *plan.bounds, out, lse,
            *q.stride()[:3], *(s for x in sources for s in x.stride()[:3]), *plan.s_bias, *_row_strides(plan.bounds[0]),
            M=M, N=N, BIASED=plan.biased, **plan.shared(), **_widths(D, Dv), **tiles,
        )  # fmt: skip
        ctx.save_for_backward(q, *sources, out, lse)
        ctx.plan = plan
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, *sources, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        B, _, L, D = q.shape
        Dv = out.shape[3]
        d_out = d_out.contiguous()
        delta = (out.float() * d_out.float()).sum(-1) - d_lse
        # rows that see nothing get weight 0 everywhere
        lse = torch.where(lse == float("-inf"), float("inf"), lse * _LOG2E)
        shared = {**plan.shared(), "softmax_scale": plan.scale, **_widths(D, Dv)}
        s_bounds = _row_strides(plan.bounds[0])

        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        tiles = _tiles(q, "dq")
        attend_dq_kernel[triton.cdiv(L * plan.R, tiles["BM"]), B * plan.K](
            q, *sources, plan.bias, *plan.bounds, d_out, lse, delta, dq,
            *q.stride()[:3], *(s for x in sources for s in x.stride()[:3]), *plan.s_bias, *s_bounds,
            M=sources[0].shape[2], N=sources[2].shape[2], BIASED=plan.biased, **shared, **tiles,
        )  # fmt: skip

        rep_end, raw_start, raw_end = plan.bounds
        tiles = _tiles(q, "dkv")
        grads = []
        for k, v, first, last, biased in (
            (*sources[:2], torch.zeros_like(rep_end), rep_end, plan.biased),
            (*sources[2:], raw_start, raw_end, False),
        ):
            dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
            size = k.shape[2]
            if size > 0:
                query_lo, query_hi = _seen_by(first, last, size, L)
                attend_dkv_kernel[triton.cdiv(size, tiles["BN"]), B * plan.K](
                    q, k, v, plan.bias, first, last, query_lo, query_hi, d_out, lse, delta, dk, dv,
                    *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *plan.s_bias, *s_bounds, *_row_strides(query_lo),
                    N=size, BIASED=biased, **shared, **tiles,
                )  # fmt: skip
            grads += [dk, dv]
        return dq, *grads, None


def attend(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    band_k: Tensor,
    band_v: Tensor,
    bounds: Bounds,
    *,
    scale: float,
    prefix_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend`."""
    plan = _Plan(q, band_k, bounds, prefix_bias, scale)
    # kernels start on the current device, which need not be the tensors' in a model spread over several
    with torch.cuda.device_of(q):
        out: tuple[Tensor, Tensor] = _Attend.apply(q, prefix_k, prefix_v, band_k, band_v, plan)
    return out
