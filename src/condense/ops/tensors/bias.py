"""Biases of entries as tensors.

Shapes: B rows, K KV heads, N entries of a source, S of all sources.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def per_entry(bias: Tensor | float | None, num_entries: int, device: torch.device) -> Tensor | None:
    """A bias as a tensor ``[B|1, K|1, N]``: a number is repeated for all entries, a tensor and None are returned."""
    if bias is None or isinstance(bias, Tensor):
        return bias
    return torch.full((1, 1, num_entries), bias, dtype=torch.float64, device=device)


def joined_bias(biases: Sequence[Tensor | float | None], sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """The biases of all sources, concatenated: ``[B|1, K|1, S]``, None if no source has one. sizes: entries of each."""
    known = [per_entry(bias, size, device) for bias, size in zip(biases, sizes, strict=True)]
    if all(bias is None for bias in known):
        return None
    parts = [
        torch.zeros(1, 1, size, dtype=torch.float64, device=device) if bias is None else bias
        for bias, size in zip(known, sizes, strict=True)
    ]
    rows, heads = 1, 1
    for part in parts:
        rows, heads = max(rows, part.shape[0]), max(heads, part.shape[1])
    return torch.cat([part.double().expand(rows, heads, -1) for part in parts], dim=2)
