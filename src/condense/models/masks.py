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
    *args: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Key padding as bool ``[B, 1, 1, kv_length]``; nothing of size L x L is made.

    Transformers builds the mask once per forward and, for some caches, runs its own result through here a second
    time: a constant shape survives that. None stands for "all real".
    """
    if attention_mask is None:
        if allow_is_causal_skip:
            return None
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    mask = attention_mask[:, -kv_length:].to(torch.bool)
    return F.pad(mask, (0, kv_length - mask.shape[1]))[:, None, None, :]
