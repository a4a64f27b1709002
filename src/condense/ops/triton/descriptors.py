"""Tensor descriptors, made on the host for every call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import power_of_2


def of_tile(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Triton's descriptor of blocks of x."""
    return descriptor(TensorDescriptor, x, block)


def described(
    tensors: Sequence[Tensor | None], rows: int, count: int = 1, make: Callable[[Tensor, list[int]], Any] = of_tile
) -> list[Any]:
    """Tensor descriptors of ``[B, K, n, D]`` or ``[B, K, heads, n, D]``: tiles of ``rows`` rows and all heads.

    ``count`` descriptors of the first parts of the tensors' width, then ``count`` of the second parts; None stands for
    None, which the last tensor is not, and fills up. make: makes one of a tensor and a block.
    """
    last = tensors[-1]
    assert last is not None
    *heads, _, width = last.shape[2:]
    first, rest = split_width(width)
    none = [None] * (count - len(tensors))
    if rest == 0:
        block = _block(rows, width, *heads)
        return [*[x if x is None else make(x, block) for x in tensors], *none, *[None] * count]
    blocks = _block(rows, first, *heads), _block(rows, rest, *heads)
    firsts = [x if x is None else make(x[..., :first], blocks[0]) for x in tensors]
    return [*firsts, *none, *[x if x is None else make(x[..., first:], blocks[1]) for x in tensors], *none]


@functools.cache
def _block(rows: int, width: int, *heads: int) -> list[int]:
    return [1, 1, *heads, rows, max(16, power_of_2(width))]


def descriptor(kind: Any, x: Tensor, block: list[int], **fields: Any) -> Any:
    """``kind(x, shape, strides, block, **fields)`` without its checks, which take longer than the rest of the work per
    tensor; `condense.ops.triton.host.whole_rows` makes tensors that pass them.
    """
    made = kind.__new__(kind)
    made.__dict__.update(base=x, shape=x.shape, strides=x.stride(), block_shape=block, **fields)
    return made
