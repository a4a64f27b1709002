"""Which of the new slots hold real tokens: padding anywhere, and packed documents.

Attention wants every row right-aligned. Generation pads on the left, so mostly nothing moves; padding elsewhere
(a ragged second turn, right padding) is moved to the left and the outputs are moved back.

Shapes: B rows, H heads, L new slots, D width.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Padding(NamedTuple):
    """counts: real tokens per row, int64 CPU ``[B]``. pad: bool ``[B, L]``. order, inverse: int64 ``[B, L]``,
    the slots with padding first and back, or None if the padding is on the left already.
    """

    counts: Tensor
    pad: Tensor
    order: Tensor | None
    inverse: Tensor | None

    def align(self, x: Tensor) -> Tensor:
        """``[B, H, L, D]`` with each row's real tokens at the end."""
        return x if self.order is None else _take(x, self.order)

    def restore(self, out: Tensor) -> Tensor:
        """Outputs ``[B, H, L, D]`` back in slot order, zero at padding."""
        out = out if self.inverse is None else _take(out, self.inverse)
        return out.masked_fill(self.pad[:, None, :, None], 0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[:, None, :, None].expand_as(x))


# every layer of a forward gets the same mask and position tensors: look at each once, and wait for the GPU once
_paddings: WeakIdKeyDictionary = WeakIdKeyDictionary()
_documents: WeakIdKeyDictionary = WeakIdKeyDictionary()


def padding_of(mask: Tensor | None, start: int, L: int) -> Padding | None:
    """Padding among slots ``[start, start + L)`` of a key mask bool ``[B, 1, 1, n]``; None if all are real.

    Raises ValueError for a mask of another shape.
    """
    if mask is None:
        return None
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.dtype != torch.bool:
        raise ValueError(
            "attention_mask must be a padding mask [batch, tokens]; condensed attention decides itself who sees "
            f"whom, got a mask of shape {tuple(mask.shape)} and dtype {mask.dtype}"
        )
    if mask.shape[3] < start + L:
        raise ValueError(
            f"attention_mask must cover all {start + L} tokens so far, the cached ones included, got {mask.shape[3]}"
        )
    known = _paddings.setdefault(mask, {})
    if (start, L) not in known:
        known[start, L] = _look(mask[:, 0, 0, start : start + L])
    return known[start, L]


def _look(real: Tensor) -> Padding | None:
    host = real.cpu()
    if bool(host.all()):
        return None
    counts, pad = host.sum(1), ~real
    if bool((host[:, 1:] >= host[:, :-1]).all()):
        return Padding(counts, pad, None, None)
    order = host.to(torch.int8).argsort(dim=1, stable=True)
    return Padding(counts, pad, order.to(real.device), order.argsort(dim=1).to(real.device))


def documents_of(position_ids: Tensor | None) -> list[int] | None:
    """Lengths of the documents packed into one row, from positions int ``[1, L]`` that restart at 0; None for one."""
    if position_ids is None or position_ids.shape[0] != 1 or position_ids.shape[1] < 2:
        return None
    if position_ids not in _documents:
        starts = (position_ids[0].diff() != 1).nonzero()[:, 0].add(1).tolist()
        marks = [0, *starts, position_ids.shape[1]]
        _documents[position_ids] = [b - a for a, b in itertools.pairwise(marks)] if starts else None
    return _documents[position_ids]
