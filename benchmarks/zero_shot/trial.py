"""Methods on trial: entries in fewer bits, and Recall in some of a layer's KV heads. Not part of the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from condense import CCA, Recall
from condense.methods import Method
from condense.methods.base import Context
from condense.ops import Chunks

_BLOCK = 32  # channels of an entry in 4 bits that share a step and a zero; in 8 bits all of them do


def entry_share(bits: int, width: int) -> float:
    """Bytes of a rounded entry of a width, steps and zeros included, as a share of those in 16 bits."""
    blocks = 1 if bits == 8 else -(-width // _BLOCK)
    return (width * bits + blocks * 32) / (16 * width)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Entries ``[..., D]`` rounded to ``2 ** bits`` levels between the smallest and the largest of a block."""
    blocks = x.unflatten(-1, (-1, x.shape[-1] if bits == 8 else _BLOCK)).float()
    zero, top = blocks.amin(-1, keepdim=True).to(x.dtype).float(), blocks.amax(-1, keepdim=True)
    step = ((top - zero) / (2**bits - 1)).to(x.dtype).float().clamp(min=torch.finfo(x.dtype).tiny)
    codes = ((blocks - zero) / step).round().clamp(0, 2**bits - 1)
    return (zero + step * codes).flatten(-2).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class RoundedCCA(CCA):
    """CCA whose entries are rounded when they are made, so that all queries see the rounded ones."""

    name: ClassVar[str] = "rounded_cca"
    entry_bits: int = 8

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """See `condense.CCA.represent`."""
        k, v, *more = super().represent(chunks, summary, scale=scale, backend=backend)
        return rounded(k, self.entry_bits), rounded(v, self.entry_bits), *more


@dataclass(frozen=True, kw_only=True)
class RoundedRecall(Recall):
    """Recall whose entries are rounded when they are made."""

    name: ClassVar[str] = "rounded_recall"
    entry_bits: int = 8

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """See `condense.Recall.represent`."""
        k, v, *more = super().represent(chunks, summary, scale=scale, backend=backend)
        return rounded(k, self.entry_bits), rounded(v, self.entry_bits), *more


@dataclass(frozen=True, kw_only=True)
class HeadRecall(Recall):
    """Recall in the KV heads ``heads``; the others see every group behind the window as its entry."""

    name: ClassVar[str] = "head_recall"
    heads: tuple[int, ...] = ()

    def attend(self, q: Tensor, context: Context, **settings: Any) -> tuple[Tensor, Tensor | None]:
        """See `condense.Recall.attend`; without log-sum-exp."""
        recalled, _ = super().attend(q, context, **settings)
        pooled, _ = Method.attend(self, q, Context(context.sources, context.spans), **settings)
        K = context.entries.k.shape[1]
        recalls = torch.tensor([head in self.heads for head in range(K)], device=q.device)
        return torch.where(recalls.repeat_interleave(q.shape[1] // K)[None, :, None, None], recalled, pooled), None
