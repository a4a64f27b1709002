"""The `triton` backend: prefix-band attention as kernels, forward and backward, deterministic.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, M prefix entries, N band tokens,
D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from condense.ops.spans import RuleSpans, Source, Spans, UniformRule
from condense.ops.triton.attend_backward import attend_dkv_kernel, attend_dq_kernel
from condense.ops.triton.attend_forward import attend_fwd_kernel
from condense.ops.triton.device.parts import descriptors, split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, gpu_of, power_of_2

# tokens that no row has: positions fit into 32 bits, and so must sums of a chunk, a window and padding
_UNLIMITED = 1 << 29
_HOPPER_ROWS = 128
# of keys and values
_HOPPER_WIDTHS = ((64, 64), (96, 64), (128, 128), (192, 128))
_NAMES = ("entries_k", "entries_v", "window_k", "window_v")


def _widths(D: int, Dv: int) -> dict[str, int]:
    (D0, D1), (V0, V1) = split_width(D), split_width(Dv)
    return {"D0": D0, "D1": D1, "V0": V0, "V1": V1}


def _tiles(q: Tensor, Dv: int, R: int, kernel: str) -> dict[str, int]:
    """Rows, keys, warps and stages per kernel and width; the length is no part of the choice.

    Tried on an H200 at width 128. Forward: of 64, 128 rows and 32, 64, 128 keys the smallest square was the fastest by
    5 to 30 percent: two programs share a multiprocessor, and one multiplies while the other is at its softmax. dk and
    dv hold two accumulators in registers, which leaves room for 32 queries at a time.
    """
    rows = power_of_2(R)
    if not q.is_cuda:  # the interpreter
        return {"BM": 16 if kernel == "dkv" else max(16, rows), "BN": 16}
    if q.dtype == torch.float32:  # three products per product: small, to stay in registers
        return {"BM": 32 if kernel == "dkv" else max(32, rows), "BN": 32, "num_warps": 4, "num_stages": 1}
    widest = max(q.shape[3], Dv)
    if kernel == "dkv":
        return {"BM": 32, "BN": 64, "num_warps": 4 if widest <= 128 else 8, "num_stages": 3 if widest <= 128 else 2}
    stages = 3 if kernel == "fwd" and widest <= 128 else 2
    return {"BM": max(64, rows), "BN": 64, "num_warps": 4 if rows <= 64 else 8, "num_stages": stages}


class _Plan:
    """What the kernels of one call share: the rule or bounds on the device, strides, scales."""

    def __init__(
        self,
        q: Tensor,
        K: int,
        bias: Tensor | None,
        bounds: list[Tensor],
        rule: list[int],
        start: list[int],
        scale: float,
        level: float,
    ) -> None:
        check_programs(q.shape[0] * K)
        self.K, self.R, self.L = K, q.shape[1] // K, q.shape[2]
        self.scale, self.level = scale, level
        self.biased = bias is not None
        self.bias = q.new_empty(1, dtype=torch.float32) if bias is None else (bias.float() * LOG2E).contiguous()
        self.s_bias = (0, 0) if bias is None else _row_strides(self.bias)
        # three products of the matrix units in place of one exact: within the error of PyTorch's float32 attention
        self.precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        self.rule, self.start = rule, start
        self.kind = ("row", "rows", "", "arrays")[len(bounds)]
        self.bounds = (*bounds, self.bias, self.bias, self.bias)[:3]
        self.s_bounds = _row_strides(bounds[0]) if self.kind == "arrays" else (0, 0)

    def shared(self) -> dict[str, Any]:
        """Keyword arguments of every kernel."""
        names = ("chunk", "window", "entries", "max_chunks", "query_start", "band_start", "pads", "offset")
        return {
            "bias_ptr": self.bias, "bounds": self.bounds, "s_bias": self.s_bias, "K": self.K, "R": self.R, "L": self.L,
            **dict(zip(names, (*self.rule, *self.start), strict=True)),
            "scale": self.scale * LOG2E, "level": self.level * LOG2E,
            "RULE": self.kind, "BIASED": self.biased, "PRECISION": self.precision,
        }  # fmt: skip

    def seen(self, sizes: tuple[int, int]) -> dict[str, Any]:
        """Which queries see each key of the two sources, for bounds given as arrays: keyword arguments."""
        if self.kind != "arrays":
            nothing = (self.bias,) * 2
            return {"prefix_seen": nothing, "band_seen": nothing, "s_prefix_seen": (0, 0), "s_band_seen": (0, 0)}
        rep_end, raw_start, raw_end = self.bounds
        prefix = _seen_by(torch.zeros_like(rep_end), rep_end, sizes[0])
        band = _seen_by(raw_start, raw_end, sizes[1])
        return {
            "prefix_seen": prefix, "band_seen": band,
            "s_prefix_seen": _row_strides(prefix[0]), "s_band_seen": _row_strides(band[0]),
        }  # fmt: skip


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of batch and KV head in ``[B|1, K|1, n]``, 0 where one stands for all."""
    return (0 if x.shape[0] == 1 else x.stride(0), 0 if x.shape[1] == 1 else x.stride(1))


def _seen_by(first: Tensor, last: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Queries ``[lo, hi)`` int32 ``[B|1, K|1, size]`` that may see each key, from bounds that never decrease."""
    key = torch.arange(size, device=first.device, dtype=torch.int32).expand(*first.shape[:2], size).contiguous()
    lo = torch.searchsorted(last, key, right=True, out_int32=True)
    hi = torch.searchsorted(first, key, right=True, out_int32=True)
    return lo, torch.maximum(hi, lo)


def _whole_rows(x: Tensor) -> Tensor:
    """The last dimension contiguous, and what tensor descriptors ask for: rows and start at multiples of 16 bytes."""
    step = 16 // x.element_size()
    ready = x.stride(-1) == 1 and all(s > 0 and s % step == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    if ready:
        return x
    padded = x.new_zeros(*x.shape[:-1], cdiv(x.shape[-1], step) * step)[..., : x.shape[-1]]
    return padded.copy_(x)


def _filled(sources: list[Tensor]) -> list[Tensor]:
    """The four sources; an empty prefix borrows the band, nobody reads it."""
    return [x if x.shape[2] > 0 else sources[n + 2] for n, x in enumerate(sources)]


@torch.library.custom_op("condense::attend", mutates_args=())
def _attend(
    q: Tensor, entries_k: Tensor, entries_v: Tensor, window_k: Tensor, window_v: Tensor, bias: Tensor | None,
    bounds: list[Tensor], rule: list[int], start: list[int], scale: float, level: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp; bounds, rule and start from `_describe`. One operation for torch.compile."""
    plan = _Plan(q, window_k.shape[1], bias, bounds, rule, start, scale, level)
    q, *sources = (_whole_rows(x) for x in (q, entries_k, entries_v, window_k, window_v))
    out, lse = _results(q, window_v)
    if _is_for_hopper(q, out.shape[3], plan.R) and _fills(q, plan.K):
        # only here: Gluon knows no interpreter
        from condense.ops.hopper.attend_forward import launch_fwd_hopper

        shared = {name: value for name, value in plan.shared().items() if name not in ("L", "PRECISION")}
        with torch.cuda.device_of(q):
            launch_fwd_hopper(
                q, _filled(sources), out, lse, programs=gpu_of(q.device).multiprocessors, s_bounds=plan.s_bounds,
                M=entries_k.shape[2], **shared,
            )  # fmt: skip
        return out, lse
    tiles = _tiles(q, out.shape[3], plan.R, "fwd")
    # kernels start on the current device, which need not be the tensors' in a model spread over several
    with torch.cuda.device_of(q):
        attend_fwd_kernel[cdiv(plan.L, tiles["BM"] // plan.R), q.shape[0] * plan.K](
            q_ptr=q, **descriptors(_NAMES, _filled(sources), tiles["BN"]), out_ptr=out, lse_ptr=lse,
            s_q=q.stride()[:3], s_bounds=plan.s_bounds, M=entries_k.shape[2], **plan.shared(),
            **_widths(q.shape[3], out.shape[3]), **tiles,
        )  # fmt: skip
    return out, lse


def _is_for_hopper(q: Tensor, Dv: int, R: int) -> bool:
    """True on a GPU of compute capability 9.0 for 16-bit types, its widths and at most 128 heads per KV head."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    fits = half and (q.shape[3], Dv) in _HOPPER_WIDTHS and R <= _HOPPER_ROWS
    return fits and q.is_cuda and gpu_of(q.device).capability == (9, 0)


def _fills(q: Tensor, K: int) -> bool:
    """True if tiles of 128 rows give every multiprocessor something to do: with fewer, smaller tiles are faster."""
    tiles = cdiv(q.shape[2], _HOPPER_ROWS // (q.shape[1] // K))
    return tiles * q.shape[0] * K >= gpu_of(q.device).multiprocessors


def _results(q: Tensor, window_v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for output and log-sum-exp."""
    return q.new_empty(*q.shape[:3], window_v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attend.register_fake
def _(
    q: Tensor, entries_k: Tensor, entries_v: Tensor, window_k: Tensor, window_v: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return _results(q, window_v)


@torch.library.custom_op("condense::attend_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, entries_k: Tensor, entries_v: Tensor, window_k: Tensor, window_v: Tensor, bias: Tensor | None,
    bounds: list[Tensor], rule: list[int], start: list[int], scale: float, level: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q and the four sources."""
    plan = _Plan(q, window_k.shape[1], bias, bounds, rule, start, scale, level)
    d_out, q, *sources = (_whole_rows(x) for x in (d_out, q, entries_k, entries_v, window_k, window_v))
    B, _, L, D = q.shape
    M, N, Dv = entries_k.shape[2], window_k.shape[2], out.shape[3]
    row_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    shared = {"delta_ptr": delta, "M": M, "softmax_scale": scale, **plan.shared(), **_widths(D, Dv)}
    dq, *grads = _gradients(q, *sources)
    with torch.cuda.device_of(q):
        tiles = _tiles(q, Dv, plan.R, "dq")
        attend_dq_kernel[cdiv(L, tiles["BM"] // plan.R), B * plan.K](
            q_ptr=q, **descriptors(_NAMES, _filled(sources), tiles["BN"]), out_ptr=out, d_out_ptr=d_out, lse_ptr=lse,
            d_lse_ptr=d_lse.contiguous(), row_lse_ptr=row_lse, dq_ptr=dq, s_q=q.stride()[:3], s_out=d_out.stride()[:3],
            s_bounds=plan.s_bounds, **shared, **tiles,
        )  # fmt: skip
        tiles = _tiles(q, Dv, plan.R, "dkv")
        # as many heads in a tile as are a power of two and leave none over
        heads = min(plan.R & -plan.R, tiles["BM"])
        grouped = [x.unflatten(1, (-1, heads)) for x in (q, d_out)]
        prefix_blocks = cdiv(M, tiles["BN"])
        attend_dkv_kernel[B * plan.K, prefix_blocks + cdiv(N, tiles["BN"])](
            **descriptors(("q_source", "d_out_source"), grouped, tiles["BM"] // heads), lse_ptr=row_lse, HEADS=heads,
            **{f"{name}_ptr": x for name, x in zip(_NAMES, sources, strict=True)},
            **{f"d_{name}_ptr": x for name, x in zip(_NAMES, grads, strict=True)},
            **{f"s_{name}": x.stride()[:3] for name, x in zip(_NAMES, sources, strict=True)},
            **plan.seen((M, N)), N=N, prefix_blocks=prefix_blocks, **shared, **tiles,
        )  # fmt: skip
    return dq, grads[0], grads[1], grads[2], grads[3]


def _gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Room for gradients, contiguous."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


@_attend_backward.register_fake
def _(d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return _gradients(*inputs[:5])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, bounds, ctx.rule, ctx.start, ctx.scale, ctx.level = inputs
    ctx.save_for_backward(*output, *tensors, *bounds)


def _differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, q, entries_k, entries_v, window_k, window_v, bias, *bounds = ctx.saved_tensors
    grads = _attend_backward(
        d_out, d_lse, out, lse, q, entries_k, entries_v, window_k, window_v, bias,
        bounds, ctx.rule, ctx.start, ctx.scale, ctx.level,
    )  # fmt: skip
    return *grads, None, [None] * len(bounds), None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def _describe(spans: Spans, L: int, device: torch.device) -> tuple[list[Tensor], list[int], list[int]]:
    """Spans as kernels take them: tensors on the device, the uniform rule, and where the only row starts.

    No tensor: the rule, alike in all rows. One, int32 ``[B, 4]``: the rule, rows starting apart. Three, int32
    ``[B|1, K|1, L]``: bounds as they are.
    """
    if not (isinstance(spans, RuleSpans) and isinstance(spans.rule, UniformRule)):
        entries, window = spans.at(0, L, device)
        arrays = torch.broadcast_tensors(entries.hi, *window)
        return [x.to(torch.int32).contiguous() for x in arrays], [1, 1, 1, 1], [0, 0, 0, 0]
    rule = spans.rule
    limits = (_UNLIMITED if x is None else min(x, _UNLIMITED) for x in (rule.window, rule.max_chunks))
    window_size, max_chunks = limits
    numbers = [min(rule.chunk, _UNLIMITED), window_size, rule.entries, max_chunks]
    start = spans.same_in_all_rows()
    if start is not None:
        return [], numbers, list(start)
    return [spans.starts().to(device, torch.int32, non_blocking=True)], numbers, [0, 0, 0, 0]


def attend(q: Tensor, sources: Sequence[Source], spans: Spans, *, scale: float) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend`."""
    entries, window = sources
    bias, level = (entries.bias, 0.0) if isinstance(entries.bias, Tensor) else (None, entries.bias or 0.0)
    if scale <= 0:  # the kernels count on a positive scale
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    out: tuple[Tensor, Tensor] = _attend(
        q, entries.k, entries.v, window.k, window.v, bias, *_describe(spans, q.shape[2], q.device), scale, level
    )
    return out
