"""The mask function registered with transformers under the name `condense`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def condense_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Key padding of slots ``[kv_offset, kv_offset + kv_length)``, bool ``[B, 1, 1, kv_length]``; nothing L x L.

    Transformers builds the mask once per forward and, for some caches, runs its own result through here a second
    time: a constant shape survives that. None stands for "all real". A mask that is too short comes out too
    short, for the attention function to refuse.
    """
    if attention_mask is None:
        if allow_is_causal_skip:
            return None
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)
