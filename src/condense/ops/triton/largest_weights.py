"""The `triton` backend of the largest weight that a token gets."""

import torch
from torch import Tensor

from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import cdiv, check_programs, dense_rows, on_device_of
from condense.ops.triton.largest_weights_kernels import largest_weights_kernel
from condense.ops.triton.launch import Launcher

_LARGEST = Launcher(largest_weights_kernel)
# of float32: six products of bfloat16, as in attention, had three times PyTorch's error
_PRECISION = "ieee"


def _tile(q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows, keys and Triton's options of a tile."""
    if not q.is_cuda:  # the interpreter
        return 16, 16, {}
    if q.dtype == torch.float32:
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    # on an H200 the fastest of ten
    return 128, 128, {"num_warps": 4 if q.shape[3] <= 128 else 8, "num_stages": 2}


def largest_weights(q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float) -> Tensor:
    """See `condense.ops.largest_weights`."""
    q, k, lse = dense_rows(q), dense_rows(k), lse.float().contiguous()
    (B, H, L, D), (_, K, N, _) = q.shape, k.shape
    check_programs(B * K)
    out = q.new_empty(B, K, N, dtype=torch.float32)
    BM, BN, options = _tile(q)
    with on_device_of(q):
        _LARGEST(
            (cdiv(N, BN), B * K, 1),
            (q, k, lse, out),
            (*q.stride()[:3], *k.stride()[:3], K, H // K, L, N, scale),
            (*split_width(D), _PRECISION, softcap, BM, BN),
            options,
        )
    # the exponential function of kernels is an approximation
    return out.exp_()
