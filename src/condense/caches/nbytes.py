"""Measuring the memory that a cache holds."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import Cache


def cache_nbytes(past_key_values: Cache, device: str | None = None) -> int:
    """Bytes allocated by a cache with any kind of layers: each tensor storage is counted whole and once.

    device: count only tensors on devices of this type, such as "cuda" or "cpu" (where ``Recall(store="host")`` keeps
    most); None: all. A view counts as the whole storage that it keeps alive.
    Raises ValueError if ``past_key_values`` is not a transformers cache.
    """
    if not isinstance(past_key_values, Cache):
        raise ValueError(f"past_key_values must be a transformers Cache, got {type(past_key_values).__name__}")
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors(vars(past_key_values), set())
        if device is None or tensor.device.type == device
    }
    return sum(storages.values())


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """All tensors that an object holds, in its attributes and containers at any depth; each object is visited once."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in visited or isinstance(value, type):
        return
    visited.add(id(value))
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        children = list(value)
    else:
        children = list(vars(value).values()) if hasattr(value, "__dict__") else []
    for child in children:
        yield from _tensors(child, visited)
