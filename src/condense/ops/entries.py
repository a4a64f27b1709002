"""Entries as caches keep them: as they are, or in 8 or 4 bits per number.

A row of bytes holds one entry's key, or its value. The channels of a vector form blocks of 32, the last of which may
have fewer. The row holds the codes (`condense.ops.tensors.codes`), then a step and a zero of each block in the dtype of
the entries; these begin at a multiple of their size, and rows at multiples of 8 bytes, so that kernels load whole
words. Bytes between them are 0. A row depends on its vector alone.

A number is ``zero + step * code``, computed in float32 or wider and rounded to the dtype of the entries. Steps have 8
significant bits, so ``step * code`` has 16 and is exact: the sum is rounded once, whether or not multiplication and
addition are fused, and all backends read the same number. A sum above the dtype's largest number, which may happen by
half a step, is read as that number, so finite numbers stay finite in float16 too.

Shapes: D width of keys or values, n blocks, C bytes of a row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from condense.ops.tensors.codes import dequantise, from_bytes, quantise, step_unit, to_bytes

# channels that share a step and a zero
BLOCK_WIDTH = 32
# alignment of rows, in bytes
ROW_UNIT = 8
# steps are numbers of this dtype, whatever they are stored in
STEP_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class EntryFormat:
    """The format of entries in a cache.

    bits: per number; 16 stands for the dtype of the tokens, also if that is wider.
    """

    bits: int

    def num_blocks(self, D: int) -> int:
        """Number of blocks n of a vector of width D; 0 for a width of 0."""
        return -(-D // BLOCK_WIDTH)

    def width(self, D: int, itemsize: int) -> int:
        """Columns of a row: numbers of the tokens' dtype for 16 bits, else bytes. itemsize: of that dtype."""
        if self.bits == 16:
            return D
        return round_up(self.grid_start(D, itemsize) + 2 * self.num_blocks(D) * itemsize, ROW_UNIT)

    def code_bytes(self, D: int) -> int:
        """Bytes of the codes of a row. With 4 bits and an odd width, the last half of a byte is 0."""
        return D if self.bits == 8 else -(-D // 2)

    def grid_start(self, D: int, itemsize: int) -> int:
        """Offset in bytes of the first step and zero of a row."""
        return round_up(self.code_bytes(D), 2 * itemsize)

    def dtype(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype of the rows for tokens of a dtype."""
        return tokens if self.bits == 16 else torch.uint8

    def step_unit(self) -> float:
        """A step as a fraction of the spread of its block, before it is rounded; for 8 or 4 bits."""
        return step_unit(self.bits, STEP_DTYPE)

    def pack(self, x: Tensor) -> Tensor:
        """Rows ``[..., C]`` of vectors x ``[..., D]``. In fewer than 16 bits no gradient flows.

        The error of a number is at most half a step of its block, (largest - smallest) / (2 ** bits - 1) rounded up,
        plus the error of rounding to its dtype.
        """
        if self.bits == 16:
            return x
        D, C = x.shape[-1], self.width(x.shape[-1], x.itemsize)
        if D == 0:
            return x.to(torch.uint8)
        with torch.no_grad():
            codes, step, zero = quantise(self._blocks(x), -1, self.bits, STEP_DTYPE)
            codes = F.pad(codes.flatten(-2)[..., :D], (0, self.code_bytes(D) * 8 // self.bits - D))
            grid = torch.cat([step, zero], dim=-1).flatten(-2).view(torch.uint8)
            between = self.grid_start(D, x.itemsize) - self.code_bytes(D)
            row = torch.cat([F.pad(to_bytes(codes, self.bits), (0, between)), grid], dim=-1)
            return F.pad(row, (0, C - row.shape[-1]))

    def unpack(self, rows: Tensor, D: int, dtype: torch.dtype) -> Tensor:
        """Vectors ``[..., D]`` in ``dtype`` of rows ``[..., C]``."""
        if self.bits == 16:
            return rows
        if D == 0:
            return rows.to(dtype)
        n, start = self.num_blocks(D), self.grid_start(D, dtype.itemsize)
        codes = from_bytes(rows[..., : self.code_bytes(D)], self.bits)[..., :D]
        grid = rows[..., start : start + 2 * n * dtype.itemsize].contiguous().view(dtype).unflatten(-1, (n, 2))
        step, zero = grid.repeat_interleave(min(D, BLOCK_WIDTH), dim=-2)[..., :D, :].unbind(-1)
        return dequantise(codes, step, zero)

    def rounded(self, x: Tensor, rows: Tensor) -> Tensor:
        """Vectors of ``rows``, which `pack` made of x, with gradients as if x had not been rounded."""
        numbers = self.unpack(rows, x.shape[-1], x.dtype)
        is_differentiated = x.requires_grad or forward_ad.unpack_dual(x).tangent is not None
        # x - x.detach() is 0, so the numbers stay the same to the bit while gradients reach x
        return numbers + (x - x.detach()) if self.bits < 16 and is_differentiated else numbers

    def _blocks(self, x: Tensor) -> Tensor:
        """Blocks ``[..., n, channels]`` of x ``[..., D]``; in the last one the last channel may be repeated."""
        D, n, width = x.shape[-1], self.num_blocks(x.shape[-1]), min(x.shape[-1], BLOCK_WIDTH)
        if n * width > D:
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], n * width - D)], dim=-1)
        return x.unflatten(-1, (n, width))


def round_up(size: int, unit: int) -> int:
    """The first multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit
