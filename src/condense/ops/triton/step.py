"""One decode step over a fixed-address condensed cache in Triton: one kernel or two, and no wait for the host.

Shapes: B rows, H query heads, K KV heads, R = H / K, M entries of capacity, W and Q slots of the rings of tokens and
of queries, S splits, D and Dv widths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.triton.device.entry import Kind
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, gpu_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.step_kernels import step_join_kernel, step_kernel
from condense.ops.types import numbered_settings

if TYPE_CHECKING:
    from condense.ops.types import NewToken, StepSettings, StepState

# stands for "no limit": positions are int32
_NEVER = 2**31 - 1
_step_kernel, _join_kernel = Launcher(step_kernel), Launcher(step_join_kernel)
# up to this many numbers, the parts of a KV head are joined by the last program to finish; beyond, by a second kernel,
# as for few KV heads, where the last program of each would leave most multiprocessors without work
_MOST_JOINED = 2**16
# numbers that a joining program holds in registers
_JOINED_AT_ONCE = 2**13


def step(
    token: NewToken,
    state: StepState,
    settings: StepSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row: attention output ``[B, H, 1, Dv]``; ``state`` advances in place.

    bfloat16, float16 or float32, one dtype; K divides H; any strides, the state's last dimensions contiguous. Rows
    without a token are not touched and give 0.
    latent: values are the first ``latent`` columns of the keys (absorbed MLA: 512 of 576), Dv of v and state is 0 and
    the output ``latent`` wide; an entry's latent is pooled by value_pooling, the rest by key_pooling.
    extras: as of `condense.ops.attend`.
    Entries beyond the capacity are dropped and never seen, without an error: ``seen`` is on the device.
    Raises ValueError for a device without kernels, another dtype, methods whose settings do not say how entries are
    made, chunks of more than 128 tokens with focal ones, a width above 256 (512 of a latent) and a state that does not
    fit.
    """
    _check(token, state, settings, latent)
    q, k, v, real = token
    out: Tensor = torch.ops.condense.step.default(
        q, k, v, *state, real, extras.sink_logits, settings.number, scale, latent, extras.softcap
    )
    return out


def _check(token: NewToken, state: StepState, settings: StepSettings, latent: int) -> None:
    q, k, v, real = token
    D, Dv = k.shape[3], v.shape[3]
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    B, K, M, W = k.shape[0], k.shape[1], state.entries_k.shape[2], state.ring_k.shape[2]
    dtype, device, Q = q.dtype, q.device, max(settings.num_summary, state.ring_q.shape[2])
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
    for name, x, size, number in (
        ("seen", state.seen, (B,), torch.int64),
        ("prompt", state.prompt, (B, 3), torch.int64),
        ("arrived", state.arrived, (B, K + 1), torch.int32),
    ):
        if x.shape != size or x.dtype != number or x.device != device:
            raise ValueError(f"{name} must be {number} of shape {size} on {device}, got {x}")
    biases, wanted = state.biases, (B, K, M if settings.matched else 0, 1)
    if biases.shape != wanted or biases.dtype != torch.float32 or biases.device != device or not biases.is_contiguous():
        raise ValueError(
            f"biases must be contiguous {wanted} in {torch.float32} on {device}, got {tuple(biases.shape)} in "
            f"{biases.dtype} on {biases.device}"
        )
    if real is not None and (real.shape != (B,) or real.is_floating_point() or real.device != q.device):
        raise ValueError(f"real must be bool or integer of shape ({B},) on {q.device}, got {real}")
    for name, x in zip(state._fields, state[:5], strict=False):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")


class _Tiles(NamedTuple):
    """Most rows, and keys per tile; warps, stages; programs wanted per multiprocessor."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    waves: int


def _tiles(device: torch.device, dtype: torch.dtype, width: int, latent: int) -> _Tiles:
    """Tiles by dtype and the wider of keys and values; neither length nor capacity matters."""
    if device.type != "cuda":  # the interpreter
        return _Tiles(64, 16, 4, 1, 1)
    if dtype == torch.float32:  # no tensor cores, and whole rows in registers: more warps, smaller tiles
        return _Tiles(16, 32 if width <= 128 else 16, 8, 2, 1 if latent else 2)
    if latent:  # a program's output is up to 512 columns wide, so few splits
        return _Tiles(32 if latent > 256 else 64, 32, 4, 3, 1)
    if width > 128:
        return _Tiles(64, 32, 4, 3, 2)
    return _Tiles(64, 64, 4, 3, 2)


def _num_splits(device: torch.device, programs: int, capacity: int, tiles: _Tiles) -> int:
    """Number of splits of the keys, by capacity, and one for the new token, rounded to whole waves over the device."""
    wanted = tiles.waves * gpu_of(device).multiprocessors // programs if device.type == "cuda" else 3
    return max(2, min(wanted, 1 + cdiv(capacity, tiles.keys)))


def _scratch(q: Tensor, S: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, S, Dv]`` and log-sum-exp ``[B, H, S]`` of every split."""
    B, H = q.shape[:2]
    part = torch.empty(B, H, S, Dv, dtype=torch.float32, device=q.device)
    return part, torch.empty(B, H, S, dtype=torch.float32, device=q.device)


class _Launch(NamedTuple):
    """Launch arguments of a step's kernels, without tensors and strides. join_grid: None without a second kernel."""

    num_splits: int
    grid: tuple[int, int, int]
    numbers: tuple[int | float, ...]
    kind: Kind
    options: Mapping[str, int | bool]
    join_grid: tuple[int, int, int] | None
    join_constants: tuple[Any, ...]
    join_options: Mapping[str, bool]


class _Sizes(NamedTuple):
    """Sizes of a step's tensors; Dv is that of the output."""

    B: int
    H: int
    K: int
    D: int
    Dv: int
    M: int
    W: int
    Q: int


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step until their buffers grow
def _launch(
    number: int,
    scores: tuple[float, float],
    latent: int,
    sizes: _Sizes,
    dtype: torch.dtype,
    device: torch.device,
    has_real: bool,
) -> _Launch:
    """number: `StepSettings.number`. scores: their scale and soft cap."""
    scale, softcap = scores
    check_programs(sizes.B * sizes.K)
    settings, (B, H, K, D, Dv, M, W, Q) = numbered_settings(number), sizes
    gpu = gpu_of(device) if device.type == "cuda" else None
    few = gpu is not None and gpu.multiprocessors >= 16 * B * K  # KV heads
    R, tiles, rule = H // K, _tiles(device, dtype, max(D, Dv), latent), settings.rule
    rows = min(tiles.rows, max(16, power_of_2(R)))
    row_tiles = cdiv(R, rows)
    S = _num_splits(device, row_tiles * B * K, M + W, tiles)
    joins = row_tiles == 1 and not few and R * S * Dv <= _MOST_JOINED
    # the join may start up while the last splits run; one kernel leaves no multiprocessor free for the next step's
    early = gpu is not None and gpu.capability >= (9, 0) and not joins
    joined_rows, columns = power_of_2(R), power_of_2(Dv)
    (D0, D1), (V0, V1) = ((latent, D - latent), (latent, 0)) if latent else (split_width(D), split_width(Dv))
    kind = Kind(
        D0, D1, V0, V1, latent > 0, settings.num_summary > 0, settings.key_pooling, settings.value_pooling,
        focal=settings.num_focal,
        tile=power_of_2(rule.chunk) if settings.num_focal > 0 else 1,
        period=settings.num_focal + 1 if settings.bias_differs else 0,
        has_prompt=settings.reads_prompt,
        has_real=has_real,
        rows=rows,
        keys=tiles.keys,
        precision="ieee" if dtype == torch.float32 else "tf32",
        early=early,
        joins=joins,
        joined_rows=joined_rows if joins else 1,
        joined_parts=max(1, min(power_of_2(S), _JOINED_AT_ONCE // (joined_rows * columns))) if joins else 1,
        joined_columns=columns if joins else 1,
        matched=settings.matched,
        softcap=softcap * LOG2E,
    )  # fmt: skip
    window, max_chunks = (_NEVER if x is None else min(x, _NEVER) for x in (rule.window, rule.max_chunks))
    weight_scale = scale if settings.weight_scale is None else settings.weight_scale
    BC = min(64, power_of_2(Dv))
    starts_early = {"launch_pdl": True} if early else {}
    return _Launch(
        S, (S, row_tiles, B * K),
        (K, R, M, W, Q, settings.num_summary, rule.chunk, window, max_chunks, settings.summary_delay,
         weight_scale, scale * LOG2E, settings.bias * LOG2E),
        kind,
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        None if joins else (B * H, cdiv(Dv, BC), 1),
        (Dv, BC, 64, has_real, early),
        starts_early,
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
    arrived: Tensor,
    biases: Tensor,
    real: Tensor | None,
    sink: Tensor | None,
    settings: int,
    scale: float,
    latent: int,
    softcap: float,
) -> Tensor:
    if not torch.is_inference_mode_enabled():  # tells autograd of the change, as PyTorch's in-place operations do
        changed = (entries_k, entries_v, ring_k, ring_v, ring_q, seen, arrived, biases)
        torch.autograd.graph.increment_version(changed)
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (B, H, _, D), Dv, device = q.shape, latent or v.shape[3], q.device
    sizes = _Sizes(B, H, k.shape[1], D, Dv, entries_k.shape[2], ring_k.shape[2], ring_q.shape[2])
    launch = _launch(settings, (scale, softcap), latent, sizes, q.dtype, device, real is not None)
    part, lse = _scratch(q, launch.num_splits, Dv)
    out = torch.empty(B, H, 1, Dv, dtype=q.dtype, device=device)
    has_token = seen if real is None else real
    strides = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *entries_k.stride()[:3], *entries_v.stride()[:3],
        *ring_k.stride()[:3], *ring_v.stride()[:3], *ring_q.stride()[:3], seen.stride(0), *prompt.stride(),
        *arrived.stride(), has_token.stride(0),
    )  # fmt: skip
    # kernels start on the current device, which may not be that of the tensors in a model spread over several
    with torch.cuda.device_of(q):
        _step_kernel(
            launch.grid,
            (
                q, k, v, entries_k, entries_v, ring_k, ring_v, ring_q, seen, prompt, arrived, biases, has_token, sink,
                part, lse, out,
            ),
            strides + launch.numbers,
            (launch.kind,),
            launch.options,
        )  # fmt: skip
        if launch.join_grid is not None:
            _join_kernel(
                launch.join_grid,
                (part, lse, out, seen, has_token, sink),
                (seen.stride(0), has_token.stride(0), H, launch.num_splits),
                launch.join_constants,
                launch.join_options,
            )
    return out


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    latent = args[-2]
    return q.new_empty(*q.shape[:3], latent or v.shape[3])


def _register() -> torch.library.Library:
    """Define the torch operation without `torch.library.custom_op`, whose calls of in-place operations parse the whole
    schema for every argument: several times as long as the rest of the host's work in a step.
    """
    library = torch.library.Library("condense", "FRAGMENT")
    mutated = ("entries_k", "entries_v", "ring_k", "ring_v", "ring_q", "seen", "arrived", "biases")
    schema = torch.library.infer_schema(_step, mutates_args=mutated, op_name="step")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("step", _step, "CompositeExplicitAutograd")
    torch.library.register_fake("condense::step", _fake, lib=library)
    return library


_LIBRARY = _register()
