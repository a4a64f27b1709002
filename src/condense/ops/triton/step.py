"""One decode step over a fixed-address condensed cache in Triton: two kernels, no wait for the host, no atomics.

Shapes: B rows, H query heads, K KV heads, R = H / K, M entries of capacity, W and Q slots of the rings of tokens and
of queries, S splits, D and Dv widths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, gpu_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.step_kernels import step_reduce_kernel, step_split_kernel

if TYPE_CHECKING:
    from condense.ops.types import StepSettings, StepState

# positions are 32 bits wide
_NEVER = 2**31 - 1
_split, _reduce = Launcher(step_split_kernel), Launcher(step_reduce_kernel)
# fewer columns cannot be shared out to four warps, which would all compute the whole tile
_MIN_TILE = 32


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: StepState,
    plan: StepSettings,
    *,
    scale: float,
    real: Tensor | None = None,
    latent: int = 0,
) -> Tensor:
    """Read one token per row: attention output ``[B, H, 1, Dv]``; ``state`` advances in place.

    q ``[B, H, 1, D]``, k ``[B, K, 1, D]``, v ``[B, K, 1, Dv]``, state as in `condense.ops.types.StepState`; bfloat16,
    float16 or float32, one dtype; K divides H; any strides, the state's last dimensions contiguous. ``real`` bool
    or integer ``[B]``: rows without a token are not touched and give 0 (None: all have one).
    latent: values are the first ``latent`` columns of the keys (absorbed MLA: 512 of 576), Dv of v and state is 0 and
    the output ``latent`` wide; an entry's latent is pooled by value_pooling, the rest by key_pooling.
    Entries beyond the capacity are dropped and never seen: ``seen`` is on the device, where nobody can raise.
    Raises ValueError for a device without kernels, another dtype, entries that two poolings and ``plan.num_focal`` do
    not say, chunks of more than 128 tokens with focal ones, a width above 256 (512 of a latent) and a state that does
    not fit.
    """
    _check(q, k, v, state, plan, real, latent)
    rule = plan.rule
    out: Tensor = torch.ops.condense.step.default(
        q, k, v, *state, real, rule.chunk, rule.window, rule.max_chunks, plan.summary_delay, plan.num_summary,
        plan.key_pooling, plan.value_pooling, plan.bias, plan.num_focal,
        scale if plan.weight_scale is None else plan.weight_scale, plan.reads_prompt, scale, latent,
    )  # fmt: skip
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, state: StepState, plan: StepSettings, real: Tensor | None, latent: int
) -> None:
    D, Dv = k.shape[3], v.shape[3]
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), plan, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    B, K, M, W = k.shape[0], k.shape[1], state.entries_k.shape[2], state.ring_k.shape[2]
    dtype, device, Q = q.dtype, q.device, max(plan.num_summary, state.ring_q.shape[2])
    for name, x, wanted in (
        ("k", k, (B, K, 1, D)),
        ("v", v, (B, K, 1, Dv)),
        ("q", q, (B, q.shape[1] // K * K, 1, D)),
        ("entries_k", state.entries_k, (B, K, M, D)),
        ("entries_v", state.entries_v, (B, K, M, Dv)),
        ("ring_k", state.ring_k, (B, K, W, D)),
        ("ring_v", state.ring_v, (B, K, W, Dv)),
        ("ring_q", state.ring_q, (B, K, Q, D)),
    ):
        if x.shape != wanted or x.dtype != dtype or x.device != device:
            raise ValueError(
                f"{name} must be {wanted} in {dtype} on {device}, got {tuple(x.shape)} in {x.dtype} on {x.device}"
            )
    for name, x, size in (("seen", state.seen, (B,)), ("prompt", state.prompt, (B, 3))):
        if x.shape != size or x.dtype != torch.int64 or x.device != device:
            raise ValueError(f"{name} must be int64 of shape {size} on {device}, got {x}")
    if real is not None and (real.shape != (B,) or real.is_floating_point() or real.device != q.device):
        raise ValueError(f"real must be bool or integer of shape ({B},) on {q.device}, got {real}")
    for name, x in zip(state._fields, state[:5], strict=False):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")


def _padded(width: int) -> int:
    """Columns of the tile that holds a width."""
    return max(_MIN_TILE, power_of_2(width))


def _widths(D: int, Dv: int, latent: int) -> tuple[int, ...]:
    """D0, D1, P0, P1, V0, V1, U0, U1 of the kernel."""
    (D0, D1), (V0, V1) = ((latent, D - latent), (latent, 0)) if latent else (split_width(D), split_width(Dv))
    return (D0, D1, _padded(D0), _padded(D1), V0, V1, _padded(V0), _padded(V1))


class _Tiles(NamedTuple):
    """Most rows, and keys per tile; warps, stages; programs wanted per multiprocessor; reduce started up early."""

    rows: int
    BN: int
    num_warps: int
    num_stages: int
    waves: int
    early: bool


def _tiles(device: torch.device, dtype: torch.dtype, width: int, latent: int) -> _Tiles:
    """The shipped table, by the wider of keys and values; neither length nor capacity is part of the choice.

    Tried on an H200 at width 128 and on latents of 512 and 256; starting the reduce early is worth 0.7 us there.
    """
    if device.type != "cuda":  # the interpreter
        return _Tiles(64, 16, 4, 1, 1, False)
    early = gpu_of(device).capability >= (9, 0)
    if dtype == torch.float32:  # multiplied without tensor cores, whole rows in registers: more warps, small tiles
        return _Tiles(16, 32 if width <= 128 else 16, 8, 2, 1 if latent else 2, early)
    if latent:  # a program's output is up to 512 columns wide, so few splits
        return _Tiles(32 if latent > 256 else 64, 32, 4, 3, 1, early)
    return _Tiles(64, 64 if width <= 128 else 32, 4, 3, 2, early)


def _num_splits(device: torch.device, programs: int, capacity: int, tiles: _Tiles) -> int:
    """Splits that share the keys, by capacity, and the one with the new token, in whole waves over the device."""
    wanted = tiles.waves * gpu_of(device).multiprocessors // programs if device.type == "cuda" else 3
    return max(2, min(wanted, 1 + cdiv(capacity, tiles.BN)))


def _scratch(q: Tensor, S: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, S, Dv]`` and log-sum-exp ``[B, H, S]`` of every split."""
    B, H = q.shape[:2]
    part = torch.empty(B, H, S, Dv, dtype=torch.float32, device=q.device)
    return part, torch.empty(B, H, S, dtype=torch.float32, device=q.device)


class _Settings(NamedTuple):
    """What the two kernels of a step are started with, but for tensors and strides."""

    num_splits: int
    split_grid: tuple[int, int, int]
    split_numbers: tuple[int | float, ...]
    split_constants: tuple[Any, ...]
    split_options: Mapping[str, int]
    reduce_grid: tuple[int, int, int]
    reduce_constants: tuple[Any, ...]
    reduce_options: Mapping[str, bool]


@functools.lru_cache(maxsize=4096)  # every layer asks for the same, in every step until its buffers grow
def _settings(
    device: torch.device,
    dtype: torch.dtype,
    rows: tuple[int, int, int],
    widths: tuple[int, int],
    sizes: tuple[int, int, int],
    chunk: int,
    window: int | None,
    max_chunks: int | None,
    summary_delay: int,
    num_summary: int,
    key_pooling: str | None,
    value_pooling: str | None,
    bias: float,
    num_focal: int,
    weight_scale: float,
    reads_prompt: bool,
    scale: float,
    latent: int,
    has_real: bool,
) -> _Settings:
    """rows: B, H, K; widths: D, Dv; sizes: M, W, Q."""
    (B, H, K), (D, Dv), (M, W, Q) = rows, widths, sizes
    check_programs(B * K)
    R, tiles = H // K, _tiles(device, dtype, max(D, Dv), latent)
    BR = min(tiles.rows, max(16, power_of_2(R)))
    row_tiles = cdiv(R, BR)
    S = _num_splits(device, row_tiles * B * K, M + W, tiles)
    BC = min(64, _padded(Dv))
    return _Settings(
        num_splits=S,
        split_grid=(S, row_tiles, B * K),
        split_numbers=(
            K, R, M, W, Q, num_summary, chunk, *(_NEVER if x is None else min(x, _NEVER) for x in (window, max_chunks)),
            summary_delay, weight_scale, scale * LOG2E, bias * LOG2E,
        ),
        split_constants=(
            *_widths(D, Dv, latent), BR, tiles.BN, latent > 0, num_summary > 0, key_pooling, value_pooling, has_real,
            num_focal, power_of_2(chunk) if num_focal > 0 else 1, reads_prompt,
            num_focal + 1 if bias != 0.0 and (num_focal > 0 or reads_prompt) else 0,
            "ieee" if dtype == torch.float32 else "tf32", tiles.early,
        ),
        split_options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        reduce_grid=(B * H, cdiv(Dv, BC), 1),
        reduce_constants=(Dv, BC, 64, has_real, tiles.early),
        reduce_options={"launch_pdl": True} if tiles.early else {},
    )  # fmt: skip


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_q: Tensor,
    seen: Tensor,
    prompt: Tensor,
    real: Tensor | None,
    chunk: int,
    window: int | None,
    max_chunks: int | None,
    summary_delay: int,
    num_summary: int,
    key_pooling: str | None,
    value_pooling: str | None,
    bias: float,
    num_focal: int,
    weight_scale: float,
    reads_prompt: bool,
    scale: float,
    latent: int,
) -> Tensor:
    if not torch.is_inference_mode_enabled():  # as any operation in place: a backward pass may have saved them
        torch.autograd.graph.increment_version((entries_k, entries_v, ring_k, ring_v, ring_q, seen))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (B, H, _, D), Dv, device = q.shape, latent or v.shape[3], q.device
    settings = _settings(
        device, q.dtype, (B, H, k.shape[1]), (D, Dv), (entries_k.shape[2], ring_k.shape[2], ring_q.shape[2]), chunk,
        window, max_chunks, summary_delay, num_summary, key_pooling, value_pooling, bias, num_focal, weight_scale,
        reads_prompt, scale, latent, real is not None,
    )  # fmt: skip
    part, lse = _scratch(q, settings.num_splits, Dv)
    out = torch.empty(B, H, 1, Dv, dtype=q.dtype, device=device)
    counts = seen if real is None else real
    strides = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *entries_k.stride()[:3], *entries_v.stride()[:3],
        *ring_k.stride()[:3], *ring_v.stride()[:3], *ring_q.stride()[:3], prompt.stride(0),
    )  # fmt: skip
    # kernels start on the current device, which need not be the tensors' in a model spread over several
    with torch.cuda.device_of(q):
        _split(
            settings.split_grid,
            (q, k, v, entries_k, entries_v, ring_k, ring_v, ring_q, seen, prompt, counts, part, lse),
            strides + settings.split_numbers,
            settings.split_constants,
            settings.split_options,
        )
        _reduce(
            settings.reduce_grid,
            (part, lse, out, seen, counts),
            (H, settings.num_splits),
            settings.reduce_constants,
            settings.reduce_options,
        )
    return out


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    latent = args[-1]
    return q.new_empty(*q.shape[:3], latent or v.shape[3])


def _register() -> torch.library.Library:
    """Not by `torch.library.custom_op`: whenever an operation in place is called, its Python reads the whole schema
    anew for every argument, which takes several times as long as all else that the host does in a step.
    """
    library = torch.library.Library("condense", "FRAGMENT")
    mutated = ("entries_k", "entries_v", "ring_k", "ring_v", "ring_q", "seen")
    schema = torch.library.infer_schema(_step, mutates_args=mutated, op_name="step")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("step", _step, "CompositeExplicitAutograd")
    torch.library.register_fake("condense::step", _fake, lib=library)
    return library


_LIBRARY = _register()
