"""Launching a compiled kernel without Triton's own launcher.

Triton's launcher inspects every argument in Python to find the compiled kernel, which in a decode step takes longer
than the rest of the host's work. Here the compiled kernel is remembered under one tuple, see `Launcher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# compiled kernels remembered per `Launcher`; when full, all are forgotten and looked up by Triton once more
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
    ) -> None:
        """``kernel[grid](*tensors, *numbers, *constants, **options)`` on the current device, which is the tensors'.

        tensors: of one device, the first a tensor; also None, tuples of tensors and, with blocks that the constants
        tell, tensor descriptors. numbers, constants: in its place each has one type, always; numbers also in tuples.
        options: Triton's, such as ``num_warps``, always the same where all else is.
        """
        if torch.compiler.is_compiling():
            # torch.compile knows how to make a kernel part of what it compiles
            self.kernel[grid](*tensors, *numbers, *constants, **options)
            return
        key = (tensors[0].device, tuple([_kind(x) for x in tensors]), numbers, constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants)
            return
        if len(self._compiled) >= _MOST_KNOWN:
            self._compiled.clear()
        # None under TRITON_INTERPRET, where there is nothing to remember
        compiled = self.kernel[grid](*tensors, *numbers, *constants, **options)
        if compiled is not None:
            self._compiled[key] = compiled


def _kind(x: Any) -> Any:
    """The properties of an argument that Triton compiles a kernel for: dtype and alignment of tensors."""
    if x is None:
        return None
    if type(x) is tuple:
        return tuple([_kind(item) for item in x])
    # a descriptor's tensor is always aligned
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x.base.dtype
