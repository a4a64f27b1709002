"""Launch arguments of a decode step of Recall that are no tensors: tiles, splits of the work, numbers, constants.

Shapes as in `condense.ops.triton.recall_step`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from condense.ops.step.settings import numbered_settings
from condense.ops.triton import latent_groups_kernels as latent_groups
from condense.ops.triton.device import lane_signs, lane_tokens, lanes
from condense.ops.triton.device.address import PageForm
from condense.ops.triton.device.parts import key_value_parts
from condense.ops.triton.device.sign_pieces import in_pieces
from condense.ops.triton.device.signs import block_width
from condense.ops.triton.host import LOG2E, cdiv, check_programs, gpu_of, power_of_2
from condense.ops.triton.recall_score import UNFUSED
from condense.ops.triton.recall_step_choice_kernels import Ranking
from condense.ops.triton.recall_store_kernels import Form, latents_in_words

_MIN_TILE = 32
# KV heads of all rows from which on a step counts as one of many rows: four of Llama 3.1 8B
_MANY_HEADS = 32
# fewer groups than this are not chosen from any faster
_FEW_RANKED = 1024
# groups of a thread that chooses: more if a multiprocessor runs more than one program
_OF_THREAD = 16
# a choice joins so many splits of scores at once, or more: one kernel for most numbers of rows
_LEAST_SPLITS = 128
# a program's fixed cost in tiles: with fewer tiles per split, fewer splits are faster
_TILES_OF_SPLIT = 16
# tiles of the ring that a program reads where open groups are read apart
_RING_TILES = 3
# numbers that a warp reads at once of the scores of centres
_GATHERED = 512


class _GroupTiles(NamedTuple):
    """rows: tokens per tile. num_warps, num_stages: Triton's. waves: programs wanted per multiprocessor.
    registers: the most of a thread; 0: as many as the compiler likes.
    """

    rows: int
    num_warps: int
    num_stages: int
    waves: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's options."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **most}


# tiles of scores for `condense.ops.triton.device.lane_signs`, 128 tokens to a warp: for few heads and for many
_LANES = (_GroupTiles(1024, 8, 1, 2, 128), _GroupTiles(512, 4, 1, 4, 128))
# tiles of scores by `condense.ops.triton.device.sign_pieces`
_PIECES = _GroupTiles(128, 8, 4, 2, 128)
# tiles of latents that are read in words: matrix units of Hopper take 64 tokens at once
_LATENT_WORDS = _GroupTiles(64, 8, 2, 1)


class _Table(NamedTuple):
    """Tiles of the kernels that score and attend, and the most query heads of these; ``early``: kernels are launched
    before the one ahead of them has ended (programmatic dependent launch).

    weight: with a store in host memory some splits read open groups alone, as if one of their tokens took so many times
    as long as one of the ring; so reads over the bus go on beside those of the ring. 0: every split reads of both.
    """

    score: _GroupTiles
    attend: _GroupTiles
    heads: int
    early: bool
    weight: int


def _table(device: torch.device, dtype: torch.dtype, width: int, heads: int, bits: int) -> _Table:
    """Tiles by dtype, the wider of keys and values, the KV heads of all rows, and the bits of the store."""
    if device.type != "cuda":  # the interpreter
        return _Table(_GroupTiles(16, 4, 1, 1), _GroupTiles(16, 4, 1, 1), 16, False, 2)
    early, many = _is_early(device), heads >= _MANY_HEADS
    if width > 256:  # latents
        rows = 16 if dtype == torch.float32 else 32
        return _Table(_GroupTiles(128, 8, 2, 1), _GroupTiles(rows, 8, 2, 1), 16, early, 0)
    if dtype == torch.float32 or width > 128:
        return _Table(_GroupTiles(256, 4, 3, 2), _GroupTiles(32, 4, 2, 2), 64, early, 0)
    if bits == 4 and dtype == torch.bfloat16:
        # a warp that has a tile of its own does not wait for others
        attend = _GroupTiles(16, 1, 2, 16, 128)
    else:
        # with many heads, shorter programs share a multiprocessor evenly; few are done sooner by programs of more warps
        attend = _GroupTiles(32, 2, 2, 8) if many else _GroupTiles(64, 4, 3, 3)
    return _Table(_GroupTiles(256, 4, 4, 8 if many else 4), attend, 64, early, 5)


def _num_splits(device: torch.device, programs: int, tiles: int, waves: int) -> tuple[int, int, int]:
    """Numbers ``most``, ``few``, ``enough``: most programs share the work on one KV head; few, below enough tiles.

    programs: those of a kernel if each head had one. tiles: the most of a head.
    A GPU runs ``waves`` programs per multiprocessor at once. What counts is how many rounds of these there are, over
    the shares that a head's work is cut into: with 160 heads in two shares each a fifth of 396 places stays idle, in
    seven almost none. But each program also has work of its own, and short texts have few tiles: then one round is
    enough.
    """
    if device.type != "cuda":
        most = max(1, min(3, tiles))
        return most, min(2, most), 4
    places = waves * gpu_of(device).multiprocessors
    few = max(1, places // programs)
    tried = range(few, few + 8 if few < 8 else few + 1)
    time = {splits: cdiv(programs * splits, places) / splits for splits in tried}
    best = min(splits for splits in tried if time[splits] <= 1.05 * min(time.values()))
    most = max(1, min(best, tiles))
    return most, min(few, most), _TILES_OF_SPLIT * most


def _padded(width: int) -> int:
    """Columns of the tile that holds a width."""
    return max(_MIN_TILE, power_of_2(width))


def apart(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of pieces of memory, rounded up so that each begins at a multiple of 128 bytes."""
    return tuple(cdiv(n, 32) * 32 for n in sizes)


class Plan(NamedTuple):
    """Launch arguments of a step's kernels, without tensors and strides: grid, numbers, constants, options of each.

    scratch: sizes of the tensors of `condense.ops.triton.recall_step.StepScratch`, float32 and int32. opened: of the
    kernel that reads open groups apart, or None where ``attend`` does.
    """

    scratch: tuple[tuple[int, ...], tuple[int, ...]]
    close: tuple[Any, ...]
    score: tuple[Any, ...]
    choose: tuple[Any, ...]
    opened: tuple[Any, ...] | None
    attend: tuple[Any, ...]
    join: tuple[Any, ...]


class Room(NamedTuple):
    """The room that a step's buffers have, of one row.

    groups, tokens, stored, slots, sums: G, W, tokens that the store has room for, its slots, and T. In pages: near,
    far: of tokens and of records, and all: groups of all rows together that scratch memory has room for.
    """

    groups: int
    tokens: int
    stored: int = 0
    slots: int = 0
    sums: int = 0
    near: PageForm | None = None
    far: PageForm | None = None
    all: int = 0


def _is_early(device: torch.device) -> bool:
    """True where a kernel can be launched before the one ahead of it has ended."""
    return device.type == "cuda" and gpu_of(device).capability >= (9, 0)


@functools.lru_cache(maxsize=4096)
def close_of(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    widths: tuple[int, int, int],
    sizes: Room,
    number: int,
    has_real: bool,
) -> tuple[Any, ...]:
    """The launch arguments of the kernel that closes a group in each of B rows; arguments as of `plan_of`."""
    (B, _, K), (D, Dv, latent), (G, W, N, _, T, near, far, _) = heads, widths, sizes
    settings = numbered_settings(number)
    assert settings.choice is not None
    parts = key_value_parts(D, Dv, latent)
    form = Form.of(settings.store_format, dtype, (D, Dv), parts)
    # tile columns for the bytes of a stored value
    PS = _padded(Dv * min(form.bits, 8) // 8)
    return (
        # the last program of a head adds to sums
        (B * K, 4 if settings.sees_rest else 3, 1),
        (K, G, W, N, T, settings.summary_delay),
        (_padded(D), _padded(Dv), PS, form, has_real, _is_early(device), near, far),
        {},
    )


@functools.lru_cache(maxsize=4096)  # the same for all layers, in every step
def plan_of(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    widths: tuple[int, int, int],
    sizes: Room,
    number: int,
    scores: tuple[float, float],
    has_real: bool,
) -> Plan:
    """The launch arguments of a step with these sizes.

    heads: B, H, K; widths: D, Dv, latent; number: `condense.ops.step.settings.StepSettings.number`; scores:
    their scale and soft cap.
    """
    (B, H, K), (D, Dv, latent), (G, W, N, S, T, near, far, _), (scale, softcap) = heads, widths, sizes, scores
    settings = numbered_settings(number)
    check_programs(B * K)
    choice, g, window = settings.choice, settings.rule.chunk, settings.rule.window
    # row stride of scratch memory by groups
    row = G if far is None else sizes.all
    assert choice is not None
    quota, R = choice.quota, H // K
    of_score, of_attend, most, early, weight = _table(device, dtype, max(D, Dv), B * K, choice.store.bits)
    is_hopper = early and gpu_of(device).capability[0] == 9
    form = Form.of(settings.store_format, dtype, (D, Dv), key_value_parts(D, Dv, latent))
    in_buffers = far is None and S == 0
    is_apart = in_buffers and latent_groups.fits(is_hopper, form.bits, g, (D, latent), dtype, softcap)
    if is_apart or not choice.store.on_host:
        weight = 0  # shares of both lists are even at any length
    V, BR = latent or Dv, min(most, max(8, power_of_2(R)))
    in_lanes, lane_heads = lane_tokens.fits(form.bits, g, D, form.DV, of_attend.rows, S), lanes.HEADS.value
    if early and dtype == torch.bfloat16 and cdiv(R, lane_heads) <= 2 and in_lanes:
        # these load the next tile themselves
        BR, of_attend = cdiv(R, lane_heads) * lane_heads, of_attend._replace(num_stages=1)
    elif is_hopper and dtype == torch.bfloat16 and latent and latents_in_words(form.bits, D, g) and not is_apart:
        of_attend = _LATENT_WORDS
    head_tiles = cdiv(R, BR)
    r, GROUPS = quota.at(G), power_of_2(max(G, 4))
    of_quota = (r, *quota[1:])
    # query heads and groups of a tile of scores
    HS = min(most, max(8, power_of_2(R)))
    # later matrix units do not count bits: there each such instruction is some sixty others. Every four heads read the
    # index anew
    if is_hopper and cdiv(R, lane_heads) <= 2 and lane_signs.fits(g, D):
        HS, of_score = lane_heads, _LANES[B * K >= _MANY_HEADS]
    elif early and in_pieces(D):
        of_score = _PIECES
    GS = max(1, of_score.rows // power_of_2(g))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    score_tiles = cdiv(R, HS)
    S0, *few0 = _num_splits(device, B * K * score_tiles, cdiv(G, GS), of_score.waves)
    # one of the programs reads what is not open, if anything can be, and so many centres at once
    mean, ahead, apart_tiles = choice.mean and r < G, 0, cdiv(R, latent_groups.HEADS.value)
    if is_apart:
        ahead, *_ = _num_splits(device, B * apart_tiles, cdiv(r * g, latent_groups.ROWS.value), 1)
        S1 = cdiv(cdiv(W, of_attend.rows), _RING_TILES)
    else:
        keys = sum(cdiv(n, of_attend.rows) for n in (r * g, W))
        S1, *_ = _num_splits(device, B * K * head_tiles, keys, of_attend.waves)
        S1 = max(1, S1 - mean)
    S2 = S1 + mean
    BM = max(1, _GATHERED * of_attend.num_warps // BR) if mean else 0
    # parts that are joined at once, and their columns: those of a block of the rotation, where they are turned back
    joined = ahead + S2
    BS = 64 if is_apart else min(256, max(64, power_of_2(joined)))
    BC = block_width(D) if is_apart else min(4096 // BS, power_of_2(V))
    # splits that read open groups alone, by their share of the work; at least 1, or 0 for no such split
    opened = weight * r * g
    own = max(1, min(S1 - 1, round(S1 * opened / (opened + W)))) if opened > 0 and S1 > 1 else 0
    RP = power_of_2(max(r, 1))
    ranking = Ranking(
        GROUPS, max(0, (GROUPS // _FEW_RANKED).bit_length() - 1), S, power_of_2(max(S, 1)), RP if S else 1,
        power_of_2(max(S0, _LEAST_SPLITS)), min(16, power_of_2(R)),
    )  # fmt: skip
    shared = device.type == "cuda" and gpu_of(device).multiprocessors < B * K
    ranking_warps = max(4, min(16, power_of_2(max(GROUPS // (_OF_THREAD << shared), S)) // 32))
    queries, pairs, turns = B * H, B * K, choice.store.bits < 16
    # in pages, rows share what is kept by groups
    of_scores = queries * GROUPS if far is None else H * row
    of_bases, of_lists, of_slots = (queries * r, pairs * r, pairs * G) if far is None else (H * row, K * row, K * row)
    of_splits = queries * S0
    floats = (
        queries * joined * V, queries * joined, of_scores, of_splits, of_splits,
        *((of_scores, of_splits, of_splits) if mean else (0, 0, 0)),
        queries * D if turns or in_pieces(D) else 0, of_bases * (2 if latent else 1) if turns else 0,
    )  # fmt: skip
    integers = of_lists, *((pairs * r, of_slots, pairs * S, pairs * S) if S else (0, 0, 0, 0))
    chained = {"launch_pdl": True} if early else {}
    of_choose = {"maxnreg": 128} if device.type == "cuda" else {}  # the most that 16 warps can have
    return Plan(
        (apart(floats), apart(integers)),
        close_of(device, dtype, heads, widths, sizes, number, has_real),
        (
            (S0, B * K, score_tiles),
            (K, R, row, *few0, window, scale * LOG2E, *of_quota),
            (g, D, HS, GS, GROUPS, softcap * LOG2E if mean else 0.0, has_real, early, far),
            of_score.options | UNFUSED | chained,
        ),
        (
            (B * K, 1, 1),
            (K, R, row, S0, window, *of_quota),
            (g, GROUPS, ranking, has_real, early, far),
            {"num_warps": ranking_warps, **of_choose, **chained},
        ),
        (
            (ahead, B, apart_tiles),
            (R, row, N, window, *of_quota, joined, scale * LOG2E),
            (form, has_real),
            latent_groups.OPTIONS | chained,
        ) if is_apart else None,
        (
            (S2, B * K, head_tiles),
            (K, R, row, W, N, T, window, *of_quota, own, ahead, GROUPS if far is None else row, S0, scale * LOG2E),
            (S, form, BR, of_attend.rows, BM, is_apart, has_real, precision, softcap * LOG2E, early, near, far),
            of_attend.options | chained,
        ),
        (
            (B * H, cdiv(V, BC), 1),
            (H, joined),
            (V, BC, BS, D if is_apart else 0, has_real, early, None),
            chained,
        ),
    )  # fmt: skip
