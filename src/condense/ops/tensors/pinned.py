"""Pinned host memory, which kernels on a GPU read and write in place, in exact sizes: PyTorch pins powers of two."""

import math
import weakref

import torch
from torch import Tensor

# smaller tensors may share a page of memory with others, and then cannot be pinned alone
_SMALL = 2**25


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pinned host memory. Raises RuntimeError where the host does not give so much."""
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if nbytes <= _SMALL:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        # zeros by all threads, and then pinned: three times as fast as memory that was never touched
        zeros = torch.empty(shape, dtype=dtype).zero_()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), nbytes, 0))
    except RuntimeError as error:
        raise RuntimeError(
            f"store='host' wants {nbytes:,} bytes of pinned host memory for the tokens of a layer, which the host does "
            "not give: use store='device', a shorter cache, fewer rows or pages"
        ) from error
    weakref.finalize(zeros.untyped_storage(), _unpin, zeros.data_ptr())
    return zeros


def _unpin(address: int) -> None:
    """Unpin memory that is about to be freed, once no kernel uses it."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
