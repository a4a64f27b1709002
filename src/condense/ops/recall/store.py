"""The exact tokens of closed groups as a store keeps them: as they are, or in 8 or 4 bits per number.

In fewer bits, keys have a step and a zero per channel of a group, because some channels are large in all tokens, and
values one per token (after KIVI, arXiv:2402.02750). A number is ``zero + step * code``, rounded to the dtype of the
tokens. A token is one row of bytes: codes of its key, then of its value, step and zero of its value, and its part of
the group's steps and zeros; so a group is one contiguous piece, which depends on that group alone.

Shapes: B rows, K KV heads, G groups of g tokens, D and Dv widths, C columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STORE_BITS = (16, 8, 4)


@dataclass(frozen=True)
class StoreFormat:
    """How tokens of groups of ``group_size`` are stored. bits: 16 keeps the dtype of the tokens, whichever it is."""

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
        of_keys = -(-2 * D * itemsize // self.group_size)
        return (D + Dv) * self.bits // 8 + (2 * itemsize if Dv else 0) + of_keys

    def dtype(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype of the rows for tokens of a dtype."""
        return tokens if self.bits == 16 else torch.uint8

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows ``[B, K, G * g, C]`` of keys ``[B, K, G, g, D]`` and values ``[B, K, G, g, Dv]``; no gradient in fewer
        bits.

        The error of a number is at most half of its step, which is (largest - smallest) / (2 ** bits - 1) of a channel
        or token, rounded up; and its rounding.
        """
        if self.bits == 16:
            return torch.cat([k, v], dim=4).flatten(2, 3)
        with torch.no_grad():
            codes_k, grid_k = self._quantise(k, 3)
            codes_v, grid_v = self._quantise(v, 4)
            of_keys = grid_k.movedim(-1, 3).flatten(3).contiguous().view(torch.uint8)
            of_keys = F.pad(of_keys, (0, -of_keys.shape[3] % self.group_size)).unflatten(3, (self.group_size, -1))
            of_values = grid_v[..., 0, :].contiguous().view(torch.uint8)
            return torch.cat([codes_k, codes_v, of_values, of_keys], dim=4).flatten(2, 3)

    def unpack(self, rows: Tensor, D: int, Dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys ``[B, K, n, D]`` and values ``[B, K, n, Dv]`` in ``dtype`` of rows ``[B, K, n, C]`` of whole groups."""
        if self.bits == 16:
            return rows[..., :D], rows[..., D:]
        groups = rows.unflatten(2, (-1, self.group_size))
        sizes = [D * self.bits // 8, Dv * self.bits // 8, 2 * dtype.itemsize if Dv else 0]
        codes_k, codes_v, of_values, of_keys = groups.split([*sizes, rows.shape[3] - sum(sizes)], dim=4)
        grid_k = of_keys.flatten(3)[..., : 2 * D * dtype.itemsize].contiguous().view(dtype).unflatten(3, (2, 1, D))
        k = self._decode(codes_k, grid_k.movedim(3, -1), dtype)
        if Dv == 0:
            return k, k[..., :0]
        grid_v = of_values.contiguous().view(dtype).unflatten(4, (1, 2))
        return k, self._decode(codes_v, grid_v, dtype)

    def _quantise(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Codes, and steps and zeros ``[..., 2]`` in the dtype of x, which are the same along ``dim``."""
        if x.shape[4] == 0:
            return x.to(torch.uint8), x.new_zeros(*x.shape[:4], 1, 0)
        levels, wide = 2**self.bits - 1, torch.promote_types(x.dtype, torch.float32)
        zero, largest = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        info = torch.finfo(x.dtype)
        # rounded up, so that the highest code reaches the largest number
        step = ((largest.to(wide) - zero.to(wide)) / levels * (1 + info.eps)).to(x.dtype).clamp(min=info.tiny)
        position = (x.to(wide) - zero.to(wide)) / step.to(wide)
        codes = (position + 0.5).floor().clamp(0, levels).to(torch.uint8)
        if self.bits == 4:
            low, high = codes.chunk(2, dim=-1)
            codes = low | (high << 4)
        return codes, torch.stack([step, zero], dim=-1)

    def _decode(self, codes: Tensor, grid: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers ``[B, K, G * g, width]`` of codes; grid: steps and zeros ``[..., 2]``."""
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        step, zero = grid.to(torch.promote_types(dtype, torch.float32)).unbind(-1)
        return (zero + step * codes.to(step.dtype)).to(dtype).flatten(2, 3)
