"""What autocast means for attention: it chooses the dtype that goes in, and has no say in what happens inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def outside_autocast(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in autocast's dtype, if it is on, and autocast off: it would round scores and pooling weights.

    As in PyTorch's own operations, float64 stays what it is.
    """
    device_type = tensors[0].device.type
    # torch.compile cannot look into the question, and is not asked for devices without autocast
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if not (known and torch.is_autocast_enabled(device_type)):
        yield tensors
        return
    dtype = torch.get_autocast_dtype(device_type)
    tensors = tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    with torch.autocast(device_type, enabled=False):
        yield tensors
