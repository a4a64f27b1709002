"""One decode step over pages in Triton: a kernel that stores, two that attend, and no wait for the host.

On Hopper, for few requests, each kernel starts while the one before still runs, and waits for it before it reads that
one's results.

Shapes: R requests, H query heads, K KV heads, r = H / K, S splits, D and Dv widths, N slots of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.step.pages import PagedState, Pages
from condense.ops.step.settings import StepSettings, numbered_settings
from condense.ops.triton.device.entry import Kind
from condense.ops.triton.device.parts import key_value_parts
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, gpu_of, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.paged_step_kernels import paged_attend_kernel, paged_join_kernel, paged_store_kernel
from condense.ops.triton.step_plan import tiles_of

# with so many pairs of request and KV head, or more, kernels do not start early: on an H200 with 8 KV heads, one and
# two requests gain 3 % by an early start, 4 gain nothing, 6 and 8 lose 3 and 5 %
EARLY_PAIRS = 32
_NO_LIMIT = 2**31 - 1

_store, _attend, _join = Launcher(paged_store_kernel), Launcher(paged_attend_kernel), Launcher(paged_join_kernel)


def store(
    q: Tensor, k: Tensor, v: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float
) -> None:
    """Store one token of each request, and the entry of a group that is due.

    q ``[R, H, D]``, k ``[R, K, D]``, v ``[R, K, Dv]``: bfloat16, float16 or float32, one dtype with the pages. seen
    int32 ``[R]`` on the device: tokens of each request, the new one included; 0 for an unused place, where nothing is
    stored. settings: as in `condense.ops.paged.read_paged`.
    On latents (``state.up``) q is absorbed, K is 1 and Dv is 0.
    Raises ValueError for what `condense.ops.triton.limits.step_obstacle` names.
    """
    launch = _launch_of(q, state, settings, scale)
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    # without a ring the kernel gets the window in its place and does not read it
    ring = state.window if state.ring is None else state.ring
    with on_device_of(q):
        _store(
            (k.shape[1], k.shape[0], 1),
            (q, k, v, seen, *_places(state), ring.cache, ring.table),
            (
                *(n for x in (q, k, v) for n in x.stride()[:2]),
                *_strides(state.window),
                *_strides(state.entries),
                *_strides(ring),
                *launch.store_numbers,
            ),
            (launch.kind, 0 if state.ring is None else state.ring.slots),
            launch.store_options,
        )


def attend(q: Tensor, state: PagedState, seen: Tensor, settings: StepSettings, *, scale: float, out: Tensor) -> None:
    """Write the attention of one token of each request, after `store`, to ``out`` ``[R, H, Dv]``; 0 for unused places.

    On latents out is d_c wide. Arguments and errors as in `store`.
    """
    launch, (R, H, Dv) = _launch_of(q, state, settings, scale), out.shape
    q, columns = dense_rows(q), min(64, power_of_2(Dv))
    part = torch.empty(R, H, launch.num_splits, Dv, dtype=torch.float32, device=q.device)
    lse = torch.empty(R, H, launch.num_splits, dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _attend(
            launch.grid,
            (q, seen, *_places(state), part, lse),
            (*q.stride()[:2], *_strides(state.window), *_strides(state.entries), *launch.attend_numbers),
            (launch.kind,),
            launch.attend_options,
        )
        _join(
            (R * H, cdiv(Dv, columns), 1),
            (part, lse, seen, out),
            (*out.stride()[:2], H, launch.num_splits),
            (Dv, columns, 64, launch.kind.early),
            launch.join_options,
        )


def _places(state: PagedState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return state.window.cache, state.window.table, state.entries.cache, state.entries.table


def _strides(pages: Pages) -> tuple[int, ...]:
    """Strides from page to page, head to head and slot to slot, and from request to request in the table."""
    return *pages.cache.stride()[:3], pages.table.stride(0)


class _Sizes(NamedTuple):
    """Sizes of a step. Dv: of the output, with ``latent`` as in `condense.ops.step.call.StepCall` as wide as that. N:
    slots of a page, of the window and of entries. capacity: slots that a request may have.
    """

    R: int
    H: int
    K: int
    D: int
    Dv: int
    latent: int
    N: tuple[int, int]
    capacity: int


def _launch_of(q: Tensor, state: PagedState, settings: StepSettings, scale: float) -> _Launch:
    """The launch arguments for these tensors. Raises ValueError as `store`."""
    (R, H, D), (_, K, _, C) = q.shape, state.window.cache.shape
    latent, Dv = state.latent, C - D
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    assert settings.rule.window is not None
    entries = state.entries.table.shape[1] * state.entries.slots
    capacity = entries + settings.rule.window + settings.rule.chunk
    sizes = _Sizes(R, H, K, D, latent or Dv, latent, (state.window.slots, state.entries.slots), capacity)
    return _launch(settings.number, scale, sizes, q.dtype, q.device)


class _Launch(NamedTuple):
    """Launch arguments of a step's kernels, without tensors and strides."""

    num_splits: int
    grid: tuple[int, int, int]
    store_numbers: tuple[int | float, ...]
    attend_numbers: tuple[int | float, ...]
    kind: Kind
    store_options: Mapping[str, int | bool]
    attend_options: Mapping[str, int | bool]
    join_options: Mapping[str, bool]


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step of as many requests
def _launch(number: int, scale: float, sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> _Launch:
    """The launch arguments of a step with these sizes. number: `condense.ops.step.settings.Numbered.number`."""
    settings, (R, H, K, D, Dv, latent, N, capacity) = numbered_settings(number), sizes
    check_programs(R * K)
    rule, heads = settings.rule, H // K
    tiles = tiles_of(device, dtype, max(D, Dv), latent)
    rows = min(tiles.rows if latent else 64, max(16, power_of_2(heads)))
    row_tiles = cdiv(heads, rows)
    wanted = tiles.waves * gpu_of(device).multiprocessors // (row_tiles * R * K) if device.type == "cuda" else 3
    D0, D1, V0, V1 = key_value_parts(D, Dv, latent)
    early = device.type == "cuda" and gpu_of(device).capability >= (9, 0) and R * K < EARLY_PAIRS
    # one more split reads the tokens and entries that this step stores, so that the others need not wait
    splits = max(1, min(wanted, cdiv(capacity, tiles.keys))) + early
    starts_early = {"launch_pdl": True} if early else {}
    kind = Kind(
        D0, D1, V0, V1, latent > 0, settings.num_summary > 0, settings.key_pooling, settings.value_pooling,
        rows=rows, keys=tiles.keys, precision="ieee" if dtype == torch.float32 else "tf32", early=early,
        page=N[0], far_page=N[1],
    )  # fmt: skip
    assert rule.window is not None
    max_chunks = _NO_LIMIT if rule.max_chunks is None else rule.max_chunks
    return _Launch(
        splits,
        (splits, row_tiles, R * K),
        (K, heads, settings.num_summary, rule.chunk, settings.summary_delay, max_chunks, scale),
        (K, heads, rule.chunk, rule.window, settings.summary_delay, max_chunks, scale * LOG2E, settings.bias * LOG2E),
        kind,
        {"num_warps": 4, **starts_early},
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **starts_early},
        starts_early,
    )
