"""Launch of compiled kernels without Triton's own launcher, and tensor descriptors that the host makes for every call.

Triton's launcher inspects every argument in Python to find the compiled kernel, which in a decode step takes longer
than the rest of the host's work. Here compiled kernels are cached: by `Launcher` under a tuple of the arguments' kinds,
by `Prepared` for one caller whose arguments have the same kinds in every call.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import power_of_2

# compiled kernels cached per `Launcher`; a full cache is cleared, and Triton finds the kernels again
_MOST_KNOWN = 4096


class Launcher:
    """Starts one kernel, whose parameters are tensors, then numbers, then constants, in that order."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> Any:
        """Run ``kernel[grid](*tensors, *numbers, *constants, **options)`` on the current device, which is the tensors'.

        Returns the compiled kernel; None while torch.compile traces, and in Triton's interpreter.

        tensors: tensors of one device, None, tuples of tensors, or tensor descriptors whose blocks the constants imply;
        the first is a tensor. numbers: numbers or tuples of numbers. constants: numbers, strings or records. Each
        argument has the same type in every call. options: Triton's; all but ``num_warps`` must follow from the other
        arguments, as they are no part of the cache's key.
        """
        if torch.compiler.is_compiling():
            # torch.compile traces Triton's own launch and makes the kernel part of its graph
            self.kernel[grid](*tensors, *numbers, *constants, **options)
            return None
        key = (tensors[0].device, tuple([_kind(x) for x in tensors]), numbers, constants, options.get("num_warps"))
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants)
            return compiled
        if len(self._compiled) >= _MOST_KNOWN:
            self._compiled.clear()
        compiled = self.kernel[grid](*tensors, *numbers, *constants, **options)
        if compiled is not None:
            self._compiled[key] = compiled
        return compiled

    def start(self, plan: tuple[Any, ...], tensors: tuple[Any, ...], strides: tuple[int, ...]) -> Any:
        """Start the kernel. plan: grid, the numbers that follow the strides, constants and options."""
        grid, numbers, constants, options = plan
        return self(grid, tensors, (*strides, *numbers), constants, options)


class Prepared:
    """A kernel with a fixed plan and strides, as in `Launcher.start`, that is called with other tensors each time.

    The tensors have the same dtypes, alignment to 16 bytes, and device in every call; none are descriptors or tuples.
    """

    def __init__(self, launcher: Launcher, plan: tuple[Any, ...], strides: tuple[int, ...]) -> None:
        self._first = launcher, plan, strides
        self._grid, numbers, constants, _ = plan
        self._rest = *strides, *numbers, *constants
        self._compiled: Any = None

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Start the kernel on the current device, which is the tensors'; the first is a tensor."""
        compiled = self._compiled
        if compiled is None:
            launcher, plan, strides = self._first
            self._compiled = launcher.start(plan, tensors, strides)
            return
        # faster than Triton's `compiled[grid](...)`, which asks the driver about every tensor's address and calls hooks
        # of Triton's profiler: addresses that are passed as integers are taken as they are
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        stream = driver.active.get_current_stream(tensors[0].get_device())  # type: ignore[union-attr]
        no_hooks = None, None, None
        compiled.run(
            *self._grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *addresses, *self._rest
        )


def _kind(x: Any) -> Any:
    """The properties of an argument for which Triton specialises a kernel: dtype and alignment of tensors."""
    if x is None:
        return None
    if type(x) is tuple:
        return tuple([_kind(item) for item in x])
    # a descriptor's tensor is always aligned
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x.base.dtype


def of_tile(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Triton's tensor descriptor of x for blocks of shape ``block``."""
    return descriptor(TensorDescriptor, x, block)


def described(
    tensors: Sequence[Tensor | None], rows: int, count: int = 1, make: Callable[[Tensor, list[int]], Any] = of_tile
) -> list[Any]:
    """Tensor descriptors of tensors ``[B, K, n, D]`` or ``[B, K, heads, n, D]``: tiles of ``rows`` rows of all heads.

    Returns ``count`` descriptors of the first parts of the tensors' width, then ``count`` of the second parts, both
    padded with None; None also for a tensor that is None, which the last is not. make: makes one from tensor and block.
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
    """Return ``kind(x, shape, strides, block, **fields)`` without the checks of its constructor, which take longer than
    all other work per tensor. Tensors from `condense.ops.triton.host.whole_rows` would pass them.
    """
    made = kind.__new__(kind)
    made.__dict__.update(base=x, shape=x.shape, strides=x.stride(), block_shape=block, **fields)
    return made
