"""Numbers as codes of 8 or 4 bits on a grid of steps and zeros: a number is ``zero + step * code``.

With 4 bits two codes share a byte: byte c of a row holds column c in its low half, ``c + width / 2`` in its high half.
"""

import torch
from torch import Tensor


def step_unit(bits: int, dtype: torch.dtype) -> float:
    """A step as a fraction of the spread of its numbers, before it is rounded to ``dtype``.

    Slightly above 1 / (2 ** bits - 1), so that after rounding the highest code still reaches the largest number.
    """
    return (1 + torch.finfo(dtype).eps) / (2**bits - 1)


def quantise(x: Tensor, dim: int, bits: int, step_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of x, and steps and zeros in the dtype of x, of size 1 along ``dim``: numbers along it share them.

    A zero is the smallest of these; a step is (largest - smallest) / (2 ** bits - 1), rounded up. In float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    zero, largest = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    spread = largest.to(wide) - zero.to(wide)
    step = (spread * step_unit(bits, step_dtype)).to(step_dtype).to(x.dtype).clamp(min=torch.finfo(x.dtype).tiny)
    position = (x.to(wide) - zero.to(wide)) / step.to(wide)
    return (position + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8), step, zero


def dequantise(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """``zero + step * code``, computed in float32 or wider, rounded to the dtype of ``zero``, at most its maximum."""
    wide = torch.promote_types(zero.dtype, torch.float32)
    x = (step.to(wide) * codes.to(wide)).add_(zero.to(wide))
    return x.clamp_(max=torch.finfo(zero.dtype).max).to(zero.dtype)


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Rows of bytes ``[..., C]`` of codes ``[..., width]``; with 4 bits the width is even, and C is half of it."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def from_bytes(rows: Tensor, bits: int) -> Tensor:
    """Codes ``[..., width]`` of rows of bytes, as `to_bytes` makes them."""
    return rows if bits == 8 else torch.cat([rows & 15, rows >> 4], dim=-1)
