"""The format of the exact tokens of closed groups in a store: as they are, or in 8 or 4 bits per number.

In fewer bits, keys have a step and a zero per channel of a group, because some channels are large in all tokens, and
values one per token (after KIVI, arXiv:2402.02750). A number is ``zero + step * code``, rounded to the dtype of the
tokens and at most the largest of that dtype, so that finite tokens stay finite in float16 too. A group is one piece of
bytes, which depends on that group alone. First, in the dtype of the tokens, the steps of its keys' D channels, their
zeros, the steps of its g values and their zeros; then the codes of its keys, token by token, and those of its values
(`condense.ops.tensors.codes`). The piece is seen as g rows of C bytes.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, C columns of a row.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.tensors.codes import dequantise, from_bytes, quantise, step_unit, to_bytes


@dataclass(frozen=True)
class StoreFormat:
    """The format of stored tokens. bits: per number; 16 stands for the dtype of the tokens, also if that is wider."""

    bits: int
    group_size: int

    def width(self, D: int, Dv: int, itemsize: int) -> int:
        """Columns of a row: numbers of the tokens' dtype for 16 bits, else bytes. itemsize: of that dtype.

        Raises ValueError for 4 bits and an odd width.
        """
        if self.bits == 16:
            return D + Dv
        if self.bits == 4 and (D % 2 or Dv % 2):
            raise ValueError(f"store_bits=4 needs keys and values of even widths, got {D} and {Dv}: use store_bits=8")
        g = self.group_size
        needed = sum(self._sizes(D, Dv, itemsize))
        # pieces begin at multiples of the itemsize, so that their steps and zeros can be read as numbers
        unit = itemsize // math.gcd(itemsize, g)
        return -(-needed // (g * unit)) * unit

    def codes_at(self, D: int, Dv: int, itemsize: int) -> tuple[int, int]:
        """Bytes of a piece before the codes of its keys, and of its values; itemsize as in `width`."""
        grid, of_keys, _ = self._sizes(D, Dv, itemsize)
        return grid, grid + of_keys

    def dtype(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype of the rows for tokens of a dtype."""
        return tokens if self.bits == 16 else torch.uint8

    def step_unit(self, dtype: torch.dtype) -> float:
        """`condense.ops.tensors.codes.step_unit` for numbers of a dtype, in which steps are stored; for 8 or 4 bits."""
        return step_unit(self.bits, dtype)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows ``[B, K, G * g, C]`` of keys ``[B, K, G, g, D]`` and values ``[B, K, G, g, Dv]``.

        With fewer than 16 bits no gradient flows, and the error of a number is at most half a step of its channel or
        token, (largest - smallest) / (2 ** bits - 1) rounded up, plus the error of rounding to its dtype.
        """
        if self.bits == 16:
            return torch.cat([k, v], dim=4).flatten(2, 3)
        with torch.no_grad():
            codes_k, grid_k = self._quantise(k, 3)
            codes_v, grid_v = self._quantise(v, 4)
            numbers = torch.cat([grid_k.flatten(3), grid_v.flatten(3)], dim=3).view(torch.uint8)
            piece = torch.cat([numbers, codes_k.flatten(3), codes_v.flatten(3)], dim=3)
            room = self.group_size * self.width(k.shape[4], v.shape[4], k.itemsize)
            return F.pad(piece, (0, room - piece.shape[3])).unflatten(3, (self.group_size, -1)).flatten(2, 3)

    def unpack(self, rows: Tensor, D: int, Dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, n, D]`` and values ``[B, K, n, Dv]`` in ``dtype`` of rows ``[B, K, n, C]`` of whole groups."""
        if self.bits == 16:
            return rows[..., :D], rows[..., D:]
        pieces, sizes = rows.unflatten(2, (-1, self.group_size)).flatten(3), self._sizes(D, Dv, dtype.itemsize)
        numbers, *codes = pieces[..., : sum(sizes)].split(sizes, dim=3)
        codes_k, codes_v = (x.unflatten(3, (self.group_size, -1)) for x in codes)
        numbers = numbers.contiguous().view(dtype)
        k = self._decode(codes_k, numbers[..., : 2 * D].unflatten(3, (2, 1, D)))
        if Dv == 0:
            return k, k[..., :0]
        return k, self._decode(codes_v, numbers[..., 2 * D :].unflatten(3, (2, self.group_size, 1)))

    def _sizes(self, D: int, Dv: int, itemsize: int) -> tuple[int, int, int]:
        """Bytes of a group's steps and zeros, of the codes of its keys, and of its values."""
        g = self.group_size
        return 2 * (D + (g if Dv else 0)) * itemsize, g * D * self.bits // 8, g * Dv * self.bits // 8

    def _quantise(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Codes, and steps and zeros ``[B, K, G, 2, n]`` in the dtype of x; numbers along ``dim`` share them."""
        if x.shape[4] == 0:
            return x.to(torch.uint8), x.new_zeros(*x.shape[:3], 2, 0)
        codes, step, zero = quantise(x, dim, self.bits, x.dtype)
        return to_bytes(codes, self.bits), torch.stack([step.flatten(3), zero.flatten(3)], dim=3)

    def _decode(self, codes: Tensor, grid: Tensor) -> Tensor:
        """Numbers ``[B, K, G * g, width]`` of codes ``[B, K, G, g, C]``; grid: steps and zeros, in the dtype of the
        numbers, along dimension 3.
        """
        step, zero = grid.unbind(3)
        return dequantise(from_bytes(codes, self.bits), step, zero).flatten(2, 3)
