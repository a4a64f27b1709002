"""Attention under autocast: inputs are cast to autocast's dtype, then autocast is off, so softmax is in float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def outside_autocast(*tensors: Tensor) -> AbstractContextManager[tuple[Tensor, ...]]:
    """Cast the tensors to autocast's dtype if it is on, and switch it off in the block.

    Left on, it would round scores and pooling weights. float64 is not cast, as in PyTorch's own operations.
    """
    device_type = tensors[0].device.type
    # not called while compiling: torch.compile cannot trace is_autocast_available (every device that it compiles for
    # has autocast), and after a graph break it cannot resume inside a nullcontext that holds a value
    if torch.compiler.is_compiling() or (
        torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    ):
        return _switched_off(device_type, tensors)
    return nullcontext(tensors)


@contextmanager
def _switched_off(device_type: str, tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    if not torch.is_autocast_enabled(device_type):
        yield tensors
        return
    dtype = torch.get_autocast_dtype(device_type)
    tensors = tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    with torch.autocast(device_type, enabled=False):
        yield tensors
