"""The index of Recall: a few rows per closed group, from which a query's score of the group is estimated.

A group of g tokens is cut into m blocks of u tokens. The index (after Quest, arXiv:2406.10774) keeps, channel by
channel, the smallest and the largest key of each block. A group's rows depend on its own keys alone, also when
quantised, so that the index of new groups can be appended.

Shapes: B rows, K KV heads, G groups of g tokens, m = g / u blocks per group, F = 2 m index rows per group, first the
lowest, then the highest, D key width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from condense.config import check_bits

# Grid positions (at most 255) are computed in float32 with an error below 2 ** -14. Before they are rounded, bounds are
# moved outwards by the larger MARGIN, so that they stay bounds. The grid is longer than the spread of the keys by the
# factor REACH, so that its highest code is not below the largest key.
MARGIN = 2.0**-13
REACH = 1.0 + 2.0**-20


@dataclass(frozen=True)
class IndexSettings:
    """The settings of an index.

    group_size: tokens per group, g. size: tokens per block, u, which divides g. bits: 16 keeps the dtype of the keys;
    8 and 4 store unsigned integers on a grid of one step and one zero per group and KV head.
    Raises ValueError for another size or number of bits.
    """

    group_size: int
    size: int
    bits: int

    def __post_init__(self) -> None:
        check_bits("index_bits", self.bits)
        if self.size < 1 or self.group_size % self.size:
            raise ValueError(f"index_size must divide the group size, {self.group_size}, got {self.size}")

    @property
    def num_blocks(self) -> int:
        """Blocks per group, m."""
        return self.group_size // self.size

    @property
    def num_rows(self) -> int:
        """Index rows per group, F."""
        return 2 * self.num_blocks

    def widths(self, D: int) -> tuple[int, int]:
        """Columns of ``codes`` and of ``grid`` per group for keys of width D.

        Raises ValueError for 4 bits and an odd D: two numbers share a byte.
        """
        if self.bits == 16:
            return self.num_rows * D, 0
        if self.bits == 4 and D % 2:
            raise ValueError(f"index_bits=4 needs an even key width, got {D}; use index_bits=8")
        return self.num_rows * D * self.bits // 8, 2


class GroupIndex(NamedTuple):
    """The index of G groups; dimension 2 of every tensor counts groups, as in the entries.

    codes ``[B, K, G, F * D]`` in the dtype of the keys (16 bits), or uint8 ``[B, K, G, F * D * bits / 8]``: row by row;
    of 4 bits, byte c of a row holds column c in its low half and column D / 2 + c in its high half.
    grid ``[B, K, G, 2]`` float32 (float64 for float64 keys): step and zero, a number is ``zero + step * code``;
    ``[B, K, G, 0]`` for 16 bits.
    """

    codes: Tensor
    grid: Tensor

    @property
    def num_groups(self) -> int:
        """Groups that the index has room for, G."""
        return self.codes.shape[2]

    def narrow(self, start: int, stop: int) -> GroupIndex:
        """Groups ``[start, stop)``, a view."""
        return GroupIndex(*(x[:, :, start:stop] for x in self))

    def rows(self, settings: IndexSettings) -> Tensor:
        """The index rows of all groups, decoded: ``[B, K, G, F, D]`` in float32 or wider."""
        codes = self.codes.unflatten(3, (settings.num_rows, -1))
        if settings.bits == 16:
            return codes.to(torch.promote_types(codes.dtype, torch.float32))
        if settings.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        step, zero = self.grid[..., None, None].unbind(3)
        return zero + step * codes.to(self.grid.dtype)


@torch.no_grad()
def build_index(k_groups: Tensor, settings: IndexSettings) -> GroupIndex:
    """The index of groups of keys ``[B, K, G, g, D]``, of any floating dtype.

    Bounds stay bounds at any number of bits: the smallest are rounded down, the largest up. No gradient.
    """
    m, D = settings.num_blocks, k_groups.shape[4]
    blocks = k_groups.unflatten(3, (m, settings.size))
    wide = torch.promote_types(k_groups.dtype, torch.float32)
    rows = torch.cat([blocks.amin(4), blocks.amax(4)], dim=3)
    num_codes, num_grid = settings.widths(D)
    if settings.bits == 16:
        codes = rows.to(k_groups.dtype).flatten(3)
        return GroupIndex(codes, codes.new_empty(*codes.shape[:3], num_grid, dtype=wide))
    levels = 2**settings.bits - 1
    rows = rows.to(wide)
    zero, largest = rows.amin((3, 4)), rows.amax((3, 4))
    step = ((largest - zero) / levels * REACH).clamp(min=torch.finfo(wide).tiny)
    position = (rows - zero[..., None, None]) / step[..., None, None]
    position = torch.cat([(position[..., :m, :] - MARGIN).floor(), (position[..., m:, :] + MARGIN).ceil()], dim=3)
    codes = position.clamp(0, levels).to(torch.uint8)
    if settings.bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low | (high << 4)
    return GroupIndex(codes.flatten(3), torch.stack([step, zero], dim=-1))
