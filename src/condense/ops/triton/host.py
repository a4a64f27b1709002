"""Host functions for all kernels: sizes of tiles and grids, memory layouts, properties of the device.

Sizes are computed in plain Python: Triton's own functions wrap their arguments for use in kernels, which takes
microseconds per call, and a layer makes dozens of calls.
"""

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
_MOST_PROGRAMS = 65_535
_NO_CHANGE = nullcontext()


def cdiv(whole: int, part: int) -> int:
    """``ceil(whole / part)``."""
    return -(-whole // part)


def power_of_2(number: int) -> int:
    """The smallest power of two >= ``number``, which is >= 1."""
    return 1 << (number - 1).bit_length()


def dense_rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, copied if it is not: the kernels read whole rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def whole_rows(x: Tensor) -> Tensor:
    """x with dense rows that begin at multiples of 16 bytes, as tensor descriptors need; a copy if they do not."""
    step = 16 // x.element_size()
    *strides, width = x.stride()
    if width == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % step == 0 for s in strides):
        return x
    return x.new_zeros(*x.shape[:-1], cdiv(x.shape[-1], step) * step)[..., : x.shape[-1]].copy_(x)


def holders(spans: Tensor, size: int) -> Tensor:
    """Indices ``[lo, hi)`` of the spans that hold each of ``size`` columns, int32 ``[n, 2, ..., size]``; empty if none.

    spans: int32 ``[n, 2, ..., L]``, n lists of L spans whose begins and ends never decrease. So lo is the number of
    spans that end at or before a column, hi the number of spans that begin at or before it.
    """
    column = torch.arange(size, device=spans.device, dtype=torch.int32).expand(*spans.shape[:-1], -1)
    return torch.searchsorted(spans.flip(1), column.contiguous(), right=True, out_int32=True)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, on which kernels start: a model may be spread over several."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device_of(x)


def check_programs(count: int) -> None:
    """Raise ValueError for more programs than a grid can have on any axis but its first."""
    if count > _MOST_PROGRAMS:
        raise ValueError(
            f"rows times KV heads must be at most {_MOST_PROGRAMS:,} for a Triton kernel, got {count:,}; split the "
            "batch or use backend='torch'"
        )


class Gpu(NamedTuple):
    """Compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The properties of a CUDA device, cached, as every call needs them."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)
