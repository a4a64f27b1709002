"""Launch arguments of a decode step other than tensors: tiles, splits of the keys, numbers, constants.

Shapes as in `condense.ops.step.call` and `condense.ops.step.state`.
"""

import functools
from typing import Any, NamedTuple, Self

import torch

from condense.ops.step.call import StepCall
from condense.ops.step.settings import numbered_settings
from condense.ops.step.state import StateSizes, sizes_of
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.device.entry import CoarseKind, Kind
from condense.ops.triton.device.parts import key_value_parts
from condense.ops.triton.host import LOG2E, cdiv, check_programs, gpu_of, power_of_2

# stands for "no limit": positions are int32
_NEVER = 2**31 - 1
# the last program to finish joins the splits of a KV head if their outputs are at most this many numbers. A second
# kernel joins larger ones, and those of few KV heads, where joining programs would leave most multiprocessors idle
_MOST_JOINED = 2**16
# numbers that a joining program holds in registers at a time
_JOINED_AT_ONCE = 2**13
# from this many pairs of request and KV head on, kernels over pages do not start early: on an H200 with 8 KV heads, one
# and two requests gain 3 % by an early start, 4 gain nothing, 6 and 8 lose 3 and 5 %
EARLY_PAIRS = 32


class _StepTiles(NamedTuple):
    """Most rows (query heads) per tile, keys per tile, Triton's options, and waves: programs per multiprocessor."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    waves: int


def tiles_of(device: torch.device, dtype: torch.dtype, width: int, latent: int = 0, few: bool = False) -> _StepTiles:
    """Tiles for a dtype, the larger width of keys and values, and whether there are few KV heads; for any length."""
    if device.type != "cuda":  # the interpreter
        return _StepTiles(64, 16, 4, 1, 1)
    if dtype == torch.float32:  # no tensor cores, and whole rows in registers: more warps, smaller tiles
        return _StepTiles(16, 32 if width <= 128 else 16, 8, 2, 1 if latent else 2)
    if latent:  # a program's output is up to 512 columns wide, so few splits
        return _StepTiles(32 if latent > 256 else 64, 32, 4, 3, 1)
    if width > 128:
        return _StepTiles(64, 32, 4, 3, 2)
    # many programs share the keys of few KV heads: smaller tiles divide them more evenly
    return _StepTiles(64, 32 if few else 64, 4, 3, 2)


class Launch(NamedTuple):
    """Grid, numbers, constants and options of a step's kernels, without strides. join: None if ``step`` joins.

    In pages `step_kernel` is launched twice: ``store`` stores, then ``step`` attends.
    """

    num_splits: int
    step: tuple[Any, ...]
    join: tuple[Any, ...] | None
    store: tuple[Any, ...]


class StepShape(NamedTuple):
    """Everything that determines the launch arguments of a step, except for ``host_bound`` of `launch_of`.

    H: query heads. sizes: of the state's buffers; in pages, the room of one request. latent: as in `StepCall`. scores:
    scale and soft cap. number: `condense.ops.step.settings.StepSettings.number`. has_real: rows may have no token.
    slots: of a store. Only in pages: near, far, past, the forms of pages of tokens, of entries or records, and of
    queries (None without them); all, the groups of all rows together that scratch memory has room for.
    """

    device: torch.device
    dtype: torch.dtype
    H: int
    sizes: StateSizes
    latent: int
    scores: tuple[float, float]
    number: int
    has_real: bool = False
    slots: int = 0
    near: PageForm | None = None
    far: PageForm | None = None
    past: PageForm | None = None
    all: int = 0

    @classmethod
    def of(cls, call: StepCall) -> Self:
        """Return the shape of a step over buffers."""
        (q, *_, real, _), state, settings, scale, latent, extras = call
        sizes, slots = sizes_of(state, settings), 0 if settings.choice is None else state.held.shape[2]
        scores, number = (scale, extras.softcap), settings.number
        return cls(q.device, q.dtype, q.shape[1], sizes, latent, scores, number, real is not None, slots)


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step until their buffers grow
def launch_of(shape: StepShape, host_bound: bool = False) -> Launch:
    """The launch arguments of a step. host_bound: the host takes longer than the GPU, so one kernel is launched even if
    two are faster on the GPU.
    """
    device, dtype, H, sizes, latent, (scale, softcap), number, has_real, _, near, far, past, _ = shape
    settings, (B, K, (D, Dv), M, W, Q, *_, F) = numbered_settings(number), sizes
    check_programs(B * K)
    gpu, paged = gpu_of(device) if device.type == "cuda" else None, near is not None
    few = gpu is not None and not paged and gpu.multiprocessors >= 16 * B * K  # KV heads
    R, tiles, rule = H // K, tiles_of(device, dtype, max(D, Dv), latent, few), settings.rule
    V, coarse = latent or Dv, settings.coarse
    rows = min(tiles.rows, max(16, power_of_2(R)))
    row_tiles = cdiv(R, rows)
    # the next kernel may start while the last splits of the kernel before it still run (programmatic dependent launch)
    early = gpu is not None and gpu.capability >= (9, 0) and (not paged or B * K < EARLY_PAIRS)
    # one more split attends to what this step stores; on rings it also makes entries and takes as long as the others
    apart = early or not paged
    wanted = 3 if gpu is None else tiles.waves * gpu.multiprocessors // (row_tiles * B * K)
    S = apart + max(1, min(wanted - (0 if paged else 1), cdiv(M + F + W, tiles.keys)))
    joins = not paged and row_tiles == 1 and (host_bound or not few) and R * S * V <= _MOST_JOINED
    early = early and not joins
    kind = Kind(
        *key_value_parts(D, Dv, latent), latent > 0, settings.num_summary > 0,
        settings.key_pooling, settings.value_pooling,
        early=early, has_real=has_real,
        matched=settings.matched,
        entry_bits=settings.entry_bits,
        coarse=coarse and CoarseKind(F, coarse.chunks, coarse.window, coarse.bias * LOG2E),
        focal=settings.num_focal,
        tile=power_of_2(rule.chunk) if settings.num_focal > 0 else 1,
        period=settings.num_focal + 1 if settings.bias and (settings.num_focal > 0 or settings.has_first) else 0,
        has_first=settings.has_first,
        rows=rows, keys=tiles.keys,
        precision="ieee" if dtype == torch.float32 else "tf32",
        joins=joins,
        joined_parts=max(1, min(power_of_2(S), _JOINED_AT_ONCE // (power_of_2(R) * power_of_2(V)))) if joins else 1,
        softcap=softcap * LOG2E,
        near=near, far=far, past=past,
        stores=not paged,
        K=K, R=R, num_summary=settings.num_summary, chunk=rule.chunk,
    )  # fmt: skip
    window, max_chunks = (_NEVER if x is None else min(x, _NEVER) for x in (rule.window, rule.max_chunks))
    BC = min(64, power_of_2(V))
    starts_early = {"launch_pdl": True} if early else {}
    numbers = M, W, Q, window, max_chunks, settings.summary_delay, scale, scale * LOG2E, settings.bias * LOG2E
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages} | (starts_early if paged else {})
    store = kind._replace(stores=True, attends=False)
    return Launch(
        S,
        ((S, row_tiles, B * K), numbers, (kind,), options),
        None if joins else ((B * H, cdiv(V, BC), 1), (H, S), (V, BC, 64, 0, has_real, early, None), starts_early),
        ((1, 1, B * K), numbers, (store,), {"num_warps": 4} | starts_early),
    )
