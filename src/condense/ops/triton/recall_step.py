"""One decode step of Recall in Triton: five kernels, no wait for the host, no atomics but a count of programs.

Shapes as in `condense.ops.recall.state`; R = H / K query heads per KV head, S splits of the work on one KV head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.recall.limits import step_obstacle
from condense.ops.recall.state import RecallSettings, RecallState, check_step
from condense.ops.triton.device.entry import Kind
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, dense_rows, gpu_of, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_close_kernels import Index, recall_close_kernel
from condense.ops.triton.recall_step_kernels import (
    Ranking,
    recall_attend_kernel,
    recall_choose_kernel,
    recall_score_kernel,
)
from condense.ops.triton.recall_store_kernels import Form
from condense.ops.triton.step_kernels import step_join_kernel
from condense.ops.types import NewToken, numbered_settings

_close, _score, _choose = (Launcher(x) for x in (recall_close_kernel, recall_score_kernel, recall_choose_kernel))
_attend, _join = Launcher(recall_attend_kernel), Launcher(step_join_kernel)
_MIN_TILE = 32
# groups that one program ranks
_MOST_RANKED = 512


def recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row: attention output ``[B, H, 1, Dv]`` or ``[B, H, 1, latent]``; ``state`` advances in place.

    token, state as in `condense.ops.recall.state`, the state contiguous; bfloat16, float16 or float32, one dtype; K
    divides H. Rows without a token are not touched and give 0. latent, extras: as of `condense.ops.recall.recall_step`.
    Raises ValueError for what `condense.ops.recall.limits.step_obstacle` names and for a state that does not fit.
    """
    obstacle = step_obstacle(token, state, settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    check_step(token, state, settings)
    assert settings.rule.window is not None
    out: Tensor = torch.ops.condense.recall_step.default(
        *token[:3], *state, token.counter, token.real, extras.sink_logits, settings.number, scale, latent,
        extras.softcap,
    )  # fmt: skip
    return out


class _Tiles(NamedTuple):
    """Groups or keys per tile; warps, stages; programs wanted per multiprocessor."""

    rows: int
    num_warps: int
    num_stages: int
    waves: int


class _Table(NamedTuple):
    """Tiles of the kernels that score and attend, and the most query heads of these; ``early``: kernels are launched
    before the one ahead of them has ended (programmatic dependent launch).

    weight: some splits read open groups alone, as if one of their tokens took so many times as long as an entry, which
    is read in larger tiles; so reads over the bus go on beside those of entries. 0: every split reads of both.
    """

    score: _Tiles
    attend: _Tiles
    heads: int
    early: bool
    weight: int


def _table(device: torch.device, dtype: torch.dtype, width: int) -> _Table:
    if device.type != "cuda":  # the interpreter
        return _Table(_Tiles(16, 4, 1, 1), _Tiles(16, 4, 1, 1), 16, False, 2)
    early = gpu_of(device).capability >= (9, 0)
    if width > 256:  # latents
        rows = 16 if dtype == torch.float32 else 32
        return _Table(_Tiles(rows, 8, 1, 1), _Tiles(rows, 8 if rows == 16 else 4, 2, 1), 16, early, 0)
    if dtype == torch.float32 or width > 128:
        return _Table(_Tiles(32, 4, 2, 2), _Tiles(32, 4, 2, 2), 64, early, 0)
    return _Table(_Tiles(64, 4, 3, 2), _Tiles(64, 4, 3, 3), 64, early, 4)


def _num_splits(device: torch.device, programs: int, tiles_of_keys: int, waves: int) -> int:
    """Programs that share the work on one KV head."""
    wanted = waves * gpu_of(device).multiprocessors // programs if device.type == "cuda" else 3
    return max(1, min(wanted, tiles_of_keys))


def _own_splits(splits: int, opened: int, others: int) -> int:
    """How many of the splits read open groups alone: their share of the work, one at least; 0 if all read of both."""
    return max(1, min(splits - 1, round(splits * opened / (opened + others)))) if opened > 0 and splits > 1 else 0


def _ranked(G: int, r: int) -> tuple[int, int, int]:
    """Groups that one program ranks, how many of them it passes on, and how many programs do so for a KV head."""
    BG = min(_MOST_RANKED, power_of_2(max(G, 1)))
    # a power of two, because each number compiles a kernel, and a share of the groups grows with them
    return BG, min(power_of_2(max(r, 1)), BG), cdiv(max(G, 1), BG)


def _padded(width: int) -> int:
    """Columns of the tile that holds a width."""
    return max(_MIN_TILE, power_of_2(width))


class _Scratch(NamedTuple):
    """score ``[B, H, G as a power of two]``, top and total ``[B, H, S0]``, key and candidate int32 ``[B, K, N]``,
    groups and place int32 ``[B, K, r]``, offset ``[B, K, G]``, part ``[B, H, S1, Dv]``, lse ``[B, H, S1]``, arrived
    int32 ``[B, K]``; float32 the others.
    """

    score: Tensor
    top: Tensor
    total: Tensor
    key: Tensor
    candidate: Tensor
    groups: Tensor
    place: Tensor
    offset: Tensor
    part: Tensor
    lse: Tensor
    arrived: Tensor


def _scratch(q: Tensor, K: int, G: int, r: int, splits: tuple[int, int], Dv: int) -> _Scratch:
    B, H = q.shape[:2]
    (S0, S1), (_, C, tiles) = splits, _ranked(G, r)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    return _Scratch(
        empty(B, H, power_of_2(max(G, 1))), empty(B, H, S0), empty(B, H, S0),
        empty(B, K, tiles * C, dtype=torch.int32), empty(B, K, tiles * C, dtype=torch.int32),
        empty(B, K, r, dtype=torch.int32), empty(B, K, r, dtype=torch.int32),
        empty(B, K, G), empty(B, H, S1, Dv), empty(B, H, S1), empty(B, K, dtype=torch.int32),
    )  # fmt: skip


class _Plan(NamedTuple):
    """Launch arguments of a step's kernels, without tensors and strides: grid, numbers, constants, options of each."""

    splits: tuple[int, int]
    close: tuple[Any, ...]
    score: tuple[Any, ...]
    choose: tuple[Any, ...]
    attend: tuple[Any, ...]
    join: tuple[Any, ...]


def _parts(D: int, Dv: int, latent: int) -> tuple[int, int, int, int]:
    """Widths of the parts of keys and of values."""
    return (latent, D - latent, latent, 0) if latent else (*split_width(D), *split_width(Dv))


def _form(settings: RecallSettings, dtype: torch.dtype, D: int, Dv: int, latent: int) -> Form:
    form, g = settings.store_format, settings.rule.chunk
    piece, unit, tiny = g * form.width(D, Dv, dtype.itemsize), form.step_unit(dtype), torch.finfo(dtype).tiny
    return Form(form.bits, g, D, Dv, *_parts(D, Dv, latent), piece, unit, tiny)


def _kind(settings: RecallSettings, parts: tuple[int, int, int, int], latent: int, has_real: bool, early: bool) -> Kind:
    """How the entry of a group is made: what `condense.ops.triton.device.entry` asks for."""
    entries = settings.entries
    # of latents, whole entries are pooled as keys
    of_values = entries.key_pooling if latent else entries.value_pooling
    return Kind(
        *parts, latent > 0, entries.num_summary > 0, entries.key_pooling, of_values,
        focal=0, tile=1, period=0, has_prompt=False, has_real=has_real, rows=0, keys=0, precision="ieee", early=early,
        joins=False, joined_rows=1, joined_parts=1, joined_columns=1, matched=entries.matched,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    widths: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    number: int,
    scores: tuple[float, float],
    has_real: bool,
) -> _Plan:
    """heads: B, H, K; widths: D, Dv, latent; sizes: G, W, tokens that the store has room for, its slots, and Q; number:
    `RecallSettings.number`; scores: their scale and soft cap.
    """
    (B, H, K), (D, Dv, latent), (G, W, N, S, Q), (scale, softcap) = heads, widths, sizes, scores
    settings: RecallSettings = numbered_settings(number)
    check_programs(B * K)
    index, g, window = settings.index, settings.rule.chunk, settings.rule.window
    R = H // K
    of_score, of_attend, most, early, weight = _table(device, dtype, max(D, Dv))
    V, parts = latent or Dv, _parts(D, Dv, latent)
    BR, P, PV = min(most, max(16, power_of_2(R))), _padded(D), _padded(Dv)
    head_tiles = cdiv(R, BR)
    of_index = Index(
        index.num_blocks, index.size, index.kind == "bounds", index.bits, power_of_2(index.size),
        _padded(D // 2 if index.bits == 4 else D), _padded(D * index.bits // 16),
    )  # fmt: skip
    # tile columns for the bytes of a stored token
    PS = _padded(max(D, Dv) * min(settings.store_bits, 8) // 8)
    (_, part, of), r, GROUPS = settings.quota, settings.quota.at(G), power_of_2(max(G, 1))
    BG, C, tiles = _ranked(G, r)
    RP, BT = power_of_2(max(r, 1)), min(of_attend.rows, max(16, power_of_2(g)))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    S0 = _num_splits(device, B * K * head_tiles, cdiv(G, of_score.rows), of_score.waves)
    S1 = _num_splits(device, B * K * head_tiles, sum(cdiv(n, of_attend.rows) for n in (G, r * g, W)), of_attend.waves)
    BC = min(64, power_of_2(V))
    own = _own_splits(S1, weight * r * g, (G if settings.pool else 0) + W)
    form, matched = _form(settings, dtype, D, Dv, latent), settings.entries.matched
    ranking = Ranking(
        BG, C, tiles * C, S, power_of_2(C), power_of_2(tiles * C), power_of_2(max(S, 1)), RP, power_of_2(S0),
        min(4, power_of_2(R)), matched,
    )  # fmt: skip
    chained = {"launch_pdl": True} if early else {}
    return _Plan(
        (S0, S1),
        (
            # the last program of a head makes entries
            (B * K, 4 if settings.pool else 3, 1), (K, R, G, W, N, Q, window, scale),
            (P, PV, PS, of_index, form, _kind(settings, parts, latent, has_real, early)), {},
        ),
        (
            (S0, B * K, head_tiles),
            (K, R, G, window, scale * LOG2E),
            (g, D, of_index, BR, of_score.rows, GROUPS, has_real, precision, early),
            {"num_warps": of_score.num_warps, "num_stages": of_score.num_stages, **chained},
        ),
        (
            (tiles, B * K, 1), (K, R, G, S0, window, settings.entries.bias * LOG2E, r, part, of),
            (g, GROUPS, ranking, has_real, early),
            {"num_warps": 4 if max(tiles * C, RP * S // 4) <= 2048 else 16, **chained},
        ),
        (
            (S1, B * K, head_tiles), (K, R, G, W, N, window, r, part, of, scale * LOG2E),
            (S, form, BR, of_attend.rows, BT, settings.pool, own, has_real, precision, softcap * LOG2E, early),
            {"num_warps": of_attend.num_warps, "num_stages": of_attend.num_stages, **chained},
        ),
        ((B * H, cdiv(V, BC), 1), (H, S1), (V, BC, 64, has_real, early), chained),
    )  # fmt: skip


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    codes: Tensor,
    grid: Tensor,
    store: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    seen: Tensor,
    slots: Tensor,
    held: Tensor,
    order: Tensor,
    ring_q: Tensor,
    biases: Tensor,
    counter: Tensor | None,
    real: Tensor | None,
    sink: Tensor | None,
    settings: int,
    scale: float,
    latent: int,
    softcap: float,
) -> Tensor:
    taken = (entries_k, entries_v, codes, grid, store, ring_k, ring_v, seen, ring_q, biases)
    if not torch.is_inference_mode_enabled():  # tells autograd of the change, as PyTorch's in-place operations do
        torch.autograd.graph.increment_version((*taken, slots, held, order, *(() if counter is None else (counter,))))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (B, H, _, D), (_, K, _, Dv), G, S, device = q.shape, v.shape, entries_k.shape[2], held.shape[2], q.device
    sizes = (G, ring_k.shape[2], store.shape[2], S, ring_q.shape[2])
    plan = _plan(device, q.dtype, (B, H, K), (D, Dv, latent), sizes, settings, (scale, softcap), real is not None)
    of_settings: RecallSettings = numbered_settings(settings)
    scratch = _scratch(q, K, G, of_settings.quota.at(G), plan.splits, latent or Dv)
    score, top, total, key, candidate, groups, place, offset, parts, lse, arrived = scratch
    out = torch.empty(B, H, 1, latent or Dv, dtype=q.dtype, device=device)
    counts = seen if real is None else real.contiguous()
    # kernels start on the current device, which may not be that of the tensors in a model spread over several
    with torch.cuda.device_of(q):
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        _launch(_close, plan.close, (q, k, v, *taken, counts, arrived), strides)
        if G > 0:
            words = codes if of_settings.index.bits == 16 else codes.view(torch.int16)
            _launch(_score, plan.score, (q, words, grid, seen, counts, score, top, total), q.stride()[:2])
            chosen = (key, candidate, groups, place, offset, held, order, arrived)
            _launch(_choose, plan.choose, (score, top, total, biases, seen, counts, *chosen), ())
        keys = (entries_k, entries_v, store, ring_k, ring_v, slots)
        _launch(_attend, plan.attend, (q, *keys, groups, place, offset, seen, counts, parts, lse), q.stride()[:2])
        _launch(_join, plan.join, (parts, lse, out, seen, counts, sink, counter), (seen.stride(0), counts.stride(0)))
    return out


def _launch(
    kernel: Launcher, plan: tuple[Any, ...], tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]
) -> None:
    grid, numbers, constants, options = plan
    kernel(grid, tensors, (*strides, *numbers), constants, options)


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    latent = args[-2]
    return q.new_empty(*q.shape[:3], latent or v.shape[3])


def _register() -> torch.library.Library:
    """Define the torch operation; not by `torch.library.custom_op`, see `condense.ops.triton.step`."""
    library = torch.library.Library("condense", "FRAGMENT")
    schema = torch.library.infer_schema(_step, mutates_args=(*RecallState._fields, "counter"), op_name="recall_step")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("recall_step", _step, "CompositeExplicitAutograd")
    torch.library.register_fake("condense::recall_step", _fake, lib=library)
    return library


_LIBRARY = _register()
