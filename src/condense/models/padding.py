"""Padding among the new slots of rows, on the left or anywhere else.

Attention needs every row right-aligned, which rows padded on the left, as in generation, are already. Padding elsewhere
(second turns of different lengths, padding on the right) is moved to the left, and the outputs are moved back.

Shapes: B rows, H heads, L new slots, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Keyword argument of a model's forward, by which the caller promises that all new tokens are real and that, without
# cu_seq_lens_q, each row is one document. Then no layer reads the mask on the host, which a compiled forward cannot.
ALL_REAL = "condense_all_real"


class Padding(NamedTuple):
    """The padding of new slots, and the permutation that moves it to the left.

    counts: real tokens per row, int64 CPU ``[B]``. trailing: number of slots at the end that are real in every row.
    pad: bool ``[B, L]``, True at padding. order: int64 ``[B, L]``, the slots with padding first. inverse: the
    permutation that undoes it. Both are None if the padding is on the left already.
    """

    counts: Tensor
    trailing: int
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


def find_padding(real: Tensor) -> Padding | None:
    """The padding of slots, which are tokens where ``real`` (bool ``[B, L]``); None if all are.

    Waits for the device.
    """
    host = real.cpu()
    if bool(host.all()):
        return None
    counts, pad = host.sum(1), ~real
    trailing = int(host.flip(1).cumprod(1).sum(1).min())
    if bool((host[:, 1:] >= host[:, :-1]).all()):
        return Padding(counts, trailing, pad, None, None)
    order = host.to(torch.int8).argsort(dim=1, stable=True)
    return Padding(counts, trailing, pad, order.to(real.device), order.argsort(dim=1).to(real.device))


def is_real(mask: Tensor | None, slot: Tensor, num_slots: int, B: int) -> Tensor | None:
    """Rows whose single new token is real, bool ``[B]``, or None for all; slot: the token's slot, int64 ``[]``.

    For static caches: does not read the mask on the host. Raises ValueError for a mask of another shape than
    ``[B, 1, 1, num_slots]``, which `condense.models.masks.condense_mask` makes of one that covers all tokens.
    """
    if mask is None:
        return None
    check_mask(mask, B)
    if mask.shape[3] != num_slots:
        raise ValueError(
            f"attention_mask must cover all tokens so far, the cached ones included, got {mask.shape[3]} columns"
        )
    # a compiled step cannot raise when the cache is full: clamp, so that it reads inside the mask
    return mask[:, 0, 0].index_select(1, slot.to(mask.device).clamp(max=num_slots - 1)[None])[:, 0]


def check_mask(mask: Tensor, B: int, num_missing: int = 0) -> None:
    """Raise ValueError unless a mask is bool ``[B, 1, 1, n]``, with no column missing."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.dtype != torch.bool:
        raise ValueError(
            "attention_mask must be a padding mask [batch, tokens]; condensed attention decides itself who sees "
            f"whom, got a mask of shape {tuple(mask.shape)} and dtype {mask.dtype}"
        )
    if mask.shape[0] != B or num_missing > 0:
        raise ValueError(
            "attention_mask must have a row per sequence and cover all tokens so far, the cached ones included: "
            f"wanted {B} rows, got {mask.shape[0]} rows and {num_missing} tokens too few"
        )


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[:, None, :, None].expand_as(x))
