"""Tiles of the kernels that score and attend in a decode step of Recall, and the splits of their work.

Shapes as in `condense.ops.triton.recall_step`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from condense.ops.triton import latent_groups_kernels as latent_groups
from condense.ops.triton.device import lane_signs, lane_tokens, lanes
from condense.ops.triton.device.sign_pieces import in_pieces
from condense.ops.triton.host import cdiv, gpu_of, power_of_2
from condense.ops.triton.recall_store_kernels import Form
from condense.ops.triton.step_plan import StepShape

# KV heads, over all rows, from which on a step counts as one of many rows: 4 rows of Llama 3.1 8B
_MANY_HEADS = 32
# tiles per split below which fewer splits are faster, because each program also has a fixed cost
_TILES_OF_SPLIT = 16
# tiles of query heads, over all rows, from which on a step on latents counts as one of many rows
_MANY_OF_LATENTS = 4
# tiles of the ring per program if another kernel reads the open groups
_RING_TILES = 3
# the time to read the mean, in tokens of open groups: a fixed part, and one token for so many that are open
_MEAN_TOKENS, _OPENED_OF_MEAN = 64, 128


class GroupTiles(NamedTuple):
    """The tiles of one kernel. rows: tokens per tile. num_warps, num_stages: Triton's. waves: programs wanted per
    multiprocessor. registers: most per thread, 0 for no limit. least: tiles of open groups that a program should have
    at least; there are fewer programs if each would have fewer, but enough to fill half of the waves.
    """

    rows: int
    num_warps: int
    num_stages: int
    waves: int
    registers: int = 0
    least: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Launch options for Triton."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **most}


# tiles of scores for `condense.ops.triton.device.lane_signs`, 128 tokens per warp: for few KV heads and for many
_LANES = (GroupTiles(1024, 8, 1, 2, 128), GroupTiles(512, 4, 1, 4, 128))
# tiles of scores by `condense.ops.triton.device.sign_pieces`
_PIECES = GroupTiles(128, 8, 4, 2, 128)
# tiles of open groups for `condense.ops.triton.latent_groups_kernels`: more warps read few tiles faster; with many
# tiles two programs share a multiprocessor. MiniCPM3's latents need half the registers
_OPENED = (GroupTiles(latent_groups.ROWS.value, 8, 1, 1), GroupTiles(latent_groups.ROWS.value, 4, 1, 2))
_NARROW_OPENED = GroupTiles(latent_groups.ROWS.value, 8, 1, 2, 128)


class StepTiles(NamedTuple):
    """Tiles of the kernels that score and attend. score_heads, heads: query heads per tile of each.

    opened: tiles of a kernel of its own that reads the open groups, None without one. early: a kernel may be launched
    before the one before it has ended (programmatic dependent launch). weight: with a store in host memory some splits
    read open groups alone, so that reads over the bus overlap those of the ring; a token of an open group then counts
    as ``weight`` tokens of the ring. 0: every split reads both.
    """

    score: GroupTiles
    score_heads: int
    attend: GroupTiles
    heads: int
    opened: GroupTiles | None
    early: bool
    weight: int


class Splits(NamedTuple):
    """Numbers of splits of a KV head's work. ahead: of the kernel that only reads open groups, 0 without one. attend:
    of the kernel that attends. own: how many of these read open groups alone. mean_tiles: tiles that the last split
    reads less because it reads the mean; 0 if there is no mean, or the last split reads nothing else.
    """

    ahead: int
    attend: int
    own: int
    mean_tiles: int


def _table(device: torch.device, dtype: torch.dtype, width: int, heads: int, bits: int) -> StepTiles:
    """Tiles for a dtype, the larger width of keys and values, the number of KV heads over all rows, and the bits of the
    store. Their numbers of query heads are upper limits.
    """
    if device.type != "cuda":  # the interpreter
        return StepTiles(GroupTiles(16, 4, 1, 1), 16, GroupTiles(16, 4, 1, 1), 16, None, False, 2)
    early, many = is_early(device), heads >= _MANY_HEADS
    if width > 256:  # latents
        rows = 16 if dtype == torch.float32 else 32
        return StepTiles(GroupTiles(128, 8, 2, 1), 16, GroupTiles(rows, 8, 2, 1), 16, None, early, 0)
    if dtype == torch.float32 or width > 128:
        return StepTiles(GroupTiles(256, 4, 3, 2), 64, GroupTiles(32, 4, 2, 2), 64, None, early, 0)
    if bits == 4 and dtype == torch.bfloat16:
        # programs of one warp, which need not wait for other warps
        attend = GroupTiles(16, 1, 2, 16, 128)
    else:
        # many heads: small programs share a multiprocessor evenly. Few: programs of more warps end sooner
        attend = GroupTiles(32, 2, 2, 8) if many else GroupTiles(64, 4, 3, 3)
    return StepTiles(GroupTiles(256, 4, 4, 8 if many else 4), 64, attend, 64, None, early, 5)


def num_splits(device: torch.device, programs: int, tiles: int, waves: int) -> tuple[int, int, int]:
    """Numbers of splits for a KV head: ``most``; ``few``, for fewer than ``enough`` tiles; and ``enough``.

    programs: programs of the kernel with one split per head. tiles: most tiles of a head.
    A GPU runs ``waves`` programs per multiprocessor at once, so programs run in rounds. The time is the number of
    rounds divided by the splits per head: 160 heads in two splits leave a fifth of 396 places idle, in seven almost
    none. But each program also has a fixed cost, and short texts have few tiles: for them ``few`` fills one round.
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


def is_early(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one before it has ended."""
    return device.type == "cuda" and gpu_of(device).capability >= (9, 0)


def tiles_of(shape: StepShape, form: Form) -> StepTiles:
    """The tiles of a step."""
    device, dtype, B, K, D, g = shape.device, shape.dtype, shape.sizes.rows, shape.sizes.heads, form.D, form.g
    R, lane_heads, (_, softcap) = shape.H // K, lanes.HEADS.value, shape.scores
    score, most, attend, _, _, early, weight = _table(device, dtype, max(D, form.DV), B * K, form.bits)
    is_hopper, few_heads = early and gpu_of(device).capability[0] == 9, cdiv(R, lane_heads) <= 2
    score_heads = attend_heads = min(most, max(8, power_of_2(R)))
    opened = None
    if latent_groups.fits(is_hopper, form, dtype, softcap):
        many = B * cdiv(R, latent_groups.HEADS.value) >= _MANY_OF_LATENTS
        opened = _OPENED[many] if D > 288 else _NARROW_OPENED
    in_lanes = lane_tokens.fits(form.bits, g, D, form.DV, attend.rows, shape.slots > 0)
    if early and dtype == torch.bfloat16 and few_heads and in_lanes:
        # these kernels load the next tile without Triton's pipelining (one stage), for which they need more registers
        attend_heads = cdiv(R, lane_heads) * lane_heads
        attend = attend._replace(num_stages=1, waves=12, registers=168, least=4)
    # only on Hopper: for later GPUs each product of bits is compiled to some sixty instructions. Only for few heads,
    # because every tile of four reads the index again
    if is_hopper and few_heads and lane_signs.fits(g, D):
        score_heads, score = lane_heads, _LANES[B * K >= _MANY_HEADS]
    elif early and in_pieces(D):
        score = _PIECES
    return StepTiles(score, score_heads, attend, attend_heads, opened, early, weight)


def splits_of(shape: StepShape, tiles: StepTiles, opened: int, has_mean: bool) -> Splits:
    """The splits of a step. opened: most tokens of open groups. has_mean: whether queries see the mean."""
    device, H, B, K, tokens = shape.device, shape.H, shape.sizes.rows, shape.sizes.heads, shape.sizes.tokens
    if tiles.opened is not None:
        programs = B * cdiv(H, latent_groups.HEADS.value)
        ahead, *_ = num_splits(device, programs, cdiv(opened, tiles.opened.rows), tiles.opened.waves)
        return Splits(ahead, cdiv(cdiv(tokens, tiles.attend.rows), _RING_TILES) + has_mean, 0, 0)
    attend, programs = tiles.attend, B * K * cdiv(H // K, tiles.heads)
    of_groups, of_ring = (cdiv(n, attend.rows) for n in (opened, tokens))
    most, *_ = num_splits(device, programs, of_groups + of_ring, attend.waves)
    if attend.least > 0:
        half, *_ = num_splits(device, programs, of_groups + of_ring, attend.waves // 2)
        most = min(most, max(half, cdiv(of_groups, attend.least)))
    weight, own = tiles.weight * opened, 0
    mean_tiles = cdiv(_MEAN_TOKENS + opened // _OPENED_OF_MEAN, attend.rows) if has_mean else 0
    # the mean gets a split of its own beside a store in host memory, and where it takes more than twice as long as a
    # split's open groups
    alone = has_mean and (weight > 0 or 2 * of_groups < mean_tiles * (most - 1))
    most = max(1, most - alone)
    # splits that read open groups alone, by these groups' share of the work: at least one, and one is left for the ring
    if weight > 0 and most > 1:
        own = max(1, min(most - 1, round(most * weight / (weight + tokens))))
    return Splits(0, most + alone, own, 0 if alone else mean_tiles)
