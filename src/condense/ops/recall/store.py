"""The format of the exact tokens of closed groups in a store: as they are, or in 8 or 4 bits per number.

In fewer bits, keys have a step and a zero per channel of a group, because some channels are large in all tokens, and
values one of each per token (after KIVI, arXiv:2402.02750). A group is one piece of bytes, which depends on that group
alone. First, in the dtype of the tokens, the steps of its g values and their zeros; then, in bytes, the base of its
keys' steps, the zeros of their D channels, and their steps; from the next multiple of 16 bytes on the codes of its
keys, token by token, and those of its values (`condense.ops.tensors.codes`). Zeros fill up what is left. The piece is
seen as g rows of C bytes.

A number of a value is ``zero + step * code``, one of a key ``step * (zero + code)``: a whole number times the step of
its channel. Such a step is a float32 number of which only the first 11 bits behind the sign are set: 8 of the exponent
and 3 of the fraction. A piece keeps these bits less their base, which is the same for all channels; steps below some
``2 ** -32`` of the largest become as large as that. All numbers are rounded to the dtype of the tokens and at most the
largest of that dtype, so that finite tokens stay finite in float16 too.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, C columns of a row.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.tensors.codes import dequantise, from_bytes, quantise, step_unit, to_bytes

# pieces and their codes begin at multiples of so many bytes
_UNIT = 16
# last bits of a float32 number that are 0 in a step of keys
DROPPED = 20


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
        # pieces begin at multiples of their unit, so that what they hold can be read as words
        unit = _UNIT // math.gcd(_UNIT, g)
        return -(-needed // (g * unit)) * unit

    def keys_grid_at(self, Dv: int, itemsize: int) -> int:
        """Bytes of a piece before the base of its keys' steps; itemsize as in `width`."""
        return 2 * (self.group_size if Dv else 0) * itemsize

    def codes_at(self, D: int, Dv: int, itemsize: int) -> tuple[int, int]:
        """Bytes of a piece before the codes of its keys, and of its values; itemsize as in `width`."""
        grid, of_keys, _ = self._sizes(D, Dv, itemsize)
        return grid, grid + of_keys

    def dtype(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype of the rows for tokens of a dtype."""
        return tokens if self.bits == 16 else torch.uint8

    def step_unit(self, dtype: torch.dtype) -> float:
        """`condense.ops.tensors.codes.step_unit` for values of a dtype, in which their steps are stored; for 8 or 4
        bits.
        """
        return step_unit(self.bits, dtype)

    @property
    def zero_dtype(self) -> torch.dtype:
        """The dtype of the zeros of keys: twice as many bits as a code."""
        return torch.int8 if self.bits == 4 else torch.int16

    @property
    def key_levels(self) -> tuple[int, int]:
        """The most steps that the numbers of a channel are apart, and that one of them is from 0."""
        return 2**self.bits - 2, torch.iinfo(self.zero_dtype).max

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows ``[B, K, G * g, C]`` of keys ``[B, K, G, g, D]`` and values ``[B, K, G, g, Dv]``.

        With fewer than 16 bits no gradient flows, and the error of a number is at most half a step of its channel or
        token plus the error of rounding to its dtype. A token's step is (largest - smallest) / (2 ** bits - 1), rounded
        up to its dtype; that of a channel (largest - smallest) / (2 ** bits - 2), or if that is more the largest number
        without its sign / (2 ** (2 * bits - 1) - 1), rounded up by an eighth at most.
        """
        if self.bits == 16:
            return torch.cat([k, v], dim=4).flatten(2, 3)
        with torch.no_grad():
            codes_k, zeros, steps, base = self._quantise_keys(k)
            codes_v, grid_v = self._quantise_values(v)
            numbers = [x.contiguous().view(torch.uint8) for x in (grid_v.flatten(3), base, zeros, steps)]
            grid = torch.cat(numbers, dim=3)
            start, *_ = self._sizes(k.shape[4], v.shape[4], k.itemsize)
            piece = torch.cat([F.pad(grid, (0, start - grid.shape[3])), codes_k.flatten(3), codes_v.flatten(3)], dim=3)
            room = self.group_size * self.width(k.shape[4], v.shape[4], k.itemsize)
            return F.pad(piece, (0, room - piece.shape[3])).unflatten(3, (self.group_size, -1)).flatten(2, 3)

    def unpack(self, rows: Tensor, D: int, Dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, n, D]`` and values ``[B, K, n, Dv]`` in ``dtype`` of rows ``[B, K, n, C]`` of whole groups."""
        if self.bits == 16:
            return rows[..., :D], rows[..., D:]
        g, sizes = self.group_size, self._sizes(D, Dv, dtype.itemsize)
        pieces = rows.unflatten(2, (-1, g)).flatten(3)
        grid, *codes = pieces[..., : sum(sizes)].split(sizes, dim=3)
        codes_k, codes_v = (from_bytes(x.unflatten(3, (g, -1)), self.bits) for x in codes)
        start = self.keys_grid_at(Dv, dtype.itemsize)
        lengths = start, 2, D * self.zero_dtype.itemsize, D
        numbers, base, zeros, steps = grid[..., : sum(lengths)].split(lengths, dim=3)
        base = base.contiguous().view(torch.int16).to(torch.int32)
        step = ((steps + base) << DROPPED).view(torch.float32)[:, :, :, None]
        k = step * (zeros.contiguous().view(self.zero_dtype)[:, :, :, None].to(step.dtype) + codes_k)
        most = min(torch.finfo(dtype).max, torch.finfo(k.dtype).max)
        k = k.clamp(-most, most).to(dtype).flatten(2, 3)
        if Dv == 0:
            return k, k[..., :0]
        step_v, zero_v = numbers.contiguous().view(dtype).unflatten(3, (2, g, 1)).unbind(3)
        return k, dequantise(codes_v, step_v, zero_v).flatten(2, 3)

    def _sizes(self, D: int, Dv: int, itemsize: int) -> tuple[int, int, int]:
        """Bytes of a group's steps and zeros, of the codes of its keys, and of its values."""
        g, grid = self.group_size, self.keys_grid_at(Dv, itemsize) + D * (self.zero_dtype.itemsize + 1) + 2
        return -(-grid // _UNIT) * _UNIT, g * D * self.bits // 8, g * Dv * self.bits // 8

    def _quantise_keys(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, zeros, steps less their base, uint8 ``[B, K, G, D]``, and the base, int16 ``[B, K, G, 1]``."""
        x, (apart, far) = k.float(), self.key_levels
        smallest, largest = x.aminmax(dim=3)
        size = torch.linalg.vector_norm(x, math.inf, dim=3)
        least = torch.maximum((largest - smallest) * (1 / apart), size * (1 / far))
        # not below the smallest normal number of the keys, and not so far up that rounding it overflows
        places = least.clamp(min=torch.finfo(k.dtype).tiny).view(torch.int32)
        places = (places + (1 << DROPPED) - 1) >> DROPPED
        base = places.amax(3, keepdim=True) - 255
        places = torch.maximum(places, base)
        step = (places << DROPPED).view(torch.float32)
        zeros = ((smallest / step) + 0.5).floor()
        codes = ((x / step[:, :, :, None] + 0.5).floor() - zeros[:, :, :, None]).clamp(0, 2**self.bits - 1)
        packed = to_bytes(codes.to(torch.uint8), self.bits)
        return packed, zeros.to(self.zero_dtype), (places - base).to(torch.uint8), base.to(torch.int16)

    def _quantise_values(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and steps and zeros ``[B, K, G, 2, g]`` in the dtype of v."""
        if v.shape[4] == 0:
            return v.to(torch.uint8), v.new_zeros(*v.shape[:3], 2, 0)
        codes, step, zero = quantise(v, 4, self.bits, v.dtype)
        return to_bytes(codes, self.bits), torch.stack([step.flatten(3), zero.flatten(3)], dim=3)
