"""The format of the exact tokens of closed groups in a store: as they are, or in 8 or 4 bits per number.

In fewer bits a key is kept as its difference from the centre in the group's index (`condense.ops.recall.index`). The
index also holds the signs of the difference; the store adds a code for the size of each number, and one step per
token. As keys are rotated, no channel is larger than others in all tokens. Values have a step and a zero per token
(after KIVI, arXiv:2402.02750). A group is one piece of bytes, which depends on that group alone: in the dtype of the
tokens, the steps of its g values, their zeros, and the steps of its keys; from the next multiple of 16 bytes on the
codes of its keys, token by token, and those of its values (`condense.ops.tensors.codes`). Zeros fill up what is left.
The piece is seen as g rows of C bytes.

A number of a value is ``zero + step * code``; one of a rotated key is that of the centre, plus or minus ``step * (2 *
code + 1)``, times the width of the rotation's blocks. All numbers, those of rotated keys too, are rounded to the dtype
of the tokens and are at most the largest of that dtype, so that finite tokens stay finite in float16 too.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, C columns of a row.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.recall.index import GroupIndex, block_width, rotation
from condense.ops.tensors.codes import dequantise, from_bytes, quantise, to_bytes

# alignment of pieces, and of the codes in them, in bytes
_UNIT = 16


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
        # pieces begin at multiples of _UNIT, so that their contents can be read as words
        unit = _UNIT // math.gcd(_UNIT, g)
        return -(-needed // (g * unit)) * unit

    def key_steps_at(self, Dv: int, itemsize: int) -> int:
        """Offset in bytes, within a piece, of the steps of its keys; itemsize as in `width`."""
        return 2 * (self.group_size if Dv else 0) * itemsize

    def codes_at(self, D: int, Dv: int, itemsize: int) -> tuple[int, int]:
        """Offsets in bytes, within a piece, of the codes of keys and of values; itemsize as in `width`."""
        grid, of_keys, _ = self._sizes(D, Dv, itemsize)
        return grid, grid + of_keys

    def dtype(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype of the rows for tokens of a dtype."""
        return tokens if self.bits == 16 else torch.uint8

    def key_unit(self, dtype: torch.dtype) -> float:
        """A key's step as a fraction of its largest number: half of 2 ** -bits, or more once rounded to ``dtype``."""
        return (1 + torch.finfo(dtype).eps) / 2 ** (self.bits + 1)

    def pack(self, k: Tensor, v: Tensor, rest: Tensor) -> Tensor:
        """Rows ``[B, K, G * g, C]`` of keys ``[B, K, G, g, D]`` and values ``[B, K, G, g, Dv]``.

        rest: the differences of the rotated keys from their centre (`condense.ops.recall.split_keys`).

        With fewer than 16 bits no gradient flows. The error of a number of a rotated key is at most a step, which is
        1 / 2 ** (bits + 1) of the largest difference from the centre, rounded up to the dtype; of a value half a step,
        which is (largest - smallest) / (2 ** bits - 1), rounded up too. Rounding to the dtype adds to both.
        Raises ValueError as `width`.
        """
        if self.bits == 16:
            return torch.cat([k, v], dim=4).flatten(2, 3)
        room = self.group_size * self.width(k.shape[4], v.shape[4], k.itemsize)
        with torch.no_grad():
            codes_k, steps_k = self._quantise_keys(rest, k.dtype)
            codes_v, steps_v = self._quantise_values(v)
            grid = torch.cat([steps_v.flatten(3), steps_k], dim=3).view(torch.uint8)
            start, *_ = self._sizes(k.shape[4], v.shape[4], k.itemsize)
            piece = torch.cat([F.pad(grid, (0, start - grid.shape[3])), codes_k.flatten(3), codes_v.flatten(3)], dim=3)
            return F.pad(piece, (0, room - piece.shape[3])).unflatten(3, (self.group_size, -1)).flatten(2, 3)

    def unpack(self, rows: Tensor, D: int, Dv: int, dtype: torch.dtype, index: GroupIndex) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, n, D]`` and values ``[B, K, n, Dv]`` in ``dtype`` of rows ``[B, K, n, C]`` of whole groups.

        index: of these groups, in the dtype of the tokens that were packed.
        """
        if self.bits == 16:
            return rows[..., :D], rows[..., D:]
        g, of_tokens = self.group_size, index.steps.dtype
        sizes = self._sizes(D, Dv, of_tokens.itemsize)
        pieces = rows.unflatten(2, (-1, g)).flatten(3)
        grid, *codes = pieces[..., : sum(sizes)].split(sizes, dim=3)
        codes_k, codes_v = (from_bytes(x.unflatten(3, (g, -1)), self.bits) for x in codes)
        numbers = grid.contiguous().view(of_tokens)[..., : (3 if Dv else 1) * g].to(dtype).unflatten(3, (-1, g, 1))
        k = self._keys(codes_k, numbers[:, :, :, -1], index, dtype).flatten(2, 3)
        if Dv == 0:
            return k, k[..., :0]
        return k, dequantise(codes_v, numbers[:, :, :, 0], numbers[:, :, :, 1]).flatten(2, 3)

    def _sizes(self, D: int, Dv: int, itemsize: int) -> tuple[int, int, int]:
        """Bytes of a group's steps and zeros, of the codes of its keys, and of its values."""
        g = self.group_size
        grid = self.key_steps_at(Dv, itemsize) + g * itemsize
        return -(-grid // _UNIT) * _UNIT, g * D * self.bits // 8, g * Dv * self.bits // 8

    def _quantise_keys(self, rest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes in bytes, and steps ``[B, K, G, g]`` in ``dtype``."""
        size = rest.abs() * (1 / block_width(rest.shape[4]))
        step = (size.amax(4) * self.key_unit(dtype)).to(dtype)
        apart = (2 * step.to(size.dtype)).clamp(min=torch.finfo(size.dtype).tiny)[..., None]
        codes = (size / apart).floor().clamp(max=2**self.bits - 1)
        return to_bytes(codes.to(torch.uint8), self.bits), step

    def _keys(self, codes: Tensor, steps: Tensor, index: GroupIndex, dtype: torch.dtype) -> Tensor:
        """Keys ``[B, K, G, g, D]`` in ``dtype``, rotated back."""
        D, wide = codes.shape[4], torch.promote_types(dtype, torch.float32)
        # in place, as a CPU takes longer to get memory than to write it
        x = codes.to(wide).mul_(2).add_(1).mul_(index.token_signs(D, wide)).mul_(steps.to(wide))
        x.add_((index.steps[..., -1:].to(wide) * index.centres(D, wide))[:, :, :, None])
        most = min(torch.finfo(dtype).max, torch.finfo(wide).max)
        rotated = x.clamp_(-most, most).to(dtype).to(wide)
        return (rotated @ rotation(D, codes.device, wide).mT).clamp_(-most, most).to(dtype)

    def _quantise_values(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and steps and zeros ``[B, K, G, 2, g]`` in the dtype of v."""
        if v.shape[4] == 0:
            return v.to(torch.uint8), v.new_zeros(*v.shape[:3], 2, 0)
        codes, step, zero = quantise(v, 4, self.bits, v.dtype)
        return to_bytes(codes, self.bits), torch.stack([step.flatten(3), zero.flatten(3)], dim=3)
