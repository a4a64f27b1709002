"""The mask function registered with transformers under the name `condense`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def condense_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    *args: Any,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Key padding of slots ``[kv_offset, kv_offset + kv_length)``, bool ``[B, 1, 1, kv_length]``; nothing L x L.

    Transformers builds the mask once per forward and, for some caches, runs its own result through here a second
    time: a constant shape survives that. None stands for "all real". A static cache has more slots than tokens so
    far: the others count as padding. A mask that is too short comes out too short, for the attention function to
    refuse; where one token comes to a static cache on a GPU, looking would mean waiting, and it counts as padding.
    """
    if attention_mask is None:
        if allow_is_causal_skip:
            return None
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    num_missing = kv_offset + kv_length - attention_mask.shape[1]
    if num_missing > 0 and _covers(attention_mask, q_length, q_offset):
        attention_mask = F.pad(attention_mask, (0, num_missing))
    return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)


def _covers(attention_mask: Tensor, q_length: int, q_offset: Tensor | int) -> bool:
    """True if the mask has a column for every token so far, the new ones included."""
    if isinstance(q_offset, Tensor) and (
        torch.compiler.is_compiling() or (q_length == 1 and q_offset.device.type != "cpu")
    ):
        return True
    return attention_mask.shape[1] >= int(q_offset) + q_length
