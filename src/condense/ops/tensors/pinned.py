"""Pinned host memory, which kernels on a GPU read and write in place, in exact sizes: PyTorch pins powers of two."""

import math
import weakref

import torch
from torch import Tensor

# smaller tensors may share a page of memory with others, and then cannot be pinned alone
_SMALL = 2**25


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in pinned host memory for kernels on a GPU. Raises RuntimeError where the host does not give so much.

    The memory is free again once nothing refers to it and the GPU has done all that it was given before.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if nbytes <= _SMALL:
            zeros, address = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True), None
        else:
            # all threads write zeros before the memory is pinned: three times as fast as pinning untouched memory
            zeros = torch.empty(shape, dtype=dtype, device="cpu").zero_()
            address = zeros.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    except RuntimeError as error:
        raise RuntimeError(
            f"store='host' wants {nbytes:,} bytes of pinned host memory for the tokens of a layer, which the host does "
            "not give: use store='device', a shorter cache, fewer rows or pages"
        ) from error
    weakref.finalize(zeros.untyped_storage(), _release, device, address)
    return zeros


def _release(device: torch.device, address: int | None) -> None:
    """Wait for kernels that may use memory which is about to be free, and unpin it if it has an address."""
    torch.cuda.synchronize(device)
    if address is not None:
        torch.cuda.cudart().cudaHostUnregister(address)
