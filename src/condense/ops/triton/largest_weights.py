"""The `triton` backend of `condense.ops.largest_weights`: the largest attention weight that any query gives a token."""

import torch
from torch import Tensor

from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import cdiv, check_programs, dense_rows, on_device_of
from condense.ops.triton.largest_weights_kernels import largest_weights_kernel
from condense.ops.triton.launch import Launcher

_LARGEST = Launcher(largest_weights_kernel)


def _tile(q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows and keys of a tile, and Triton's launch options."""
    if not q.is_cuda:  # the interpreter
        return 16, 16, {}
    if q.shape[3] > 128:  # within a fifth of larger tiles; fits GPUs with 99 KiB of shared memory
        return 64, 64, {"num_warps": 4, "num_stages": 2}
    return 128, 128, {"num_warps": 4, "num_stages": 2}  # on an H200 the fastest of ten


def largest_weights(q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float) -> Tensor:
    """Largest weights, float32 ``[B, K, N]``, see `condense.ops.largest_weights`."""
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
            (*split_width(D), softcap, BM, BN),
            options,
        )
    # here and not in the kernel, whose exponential function is an approximation
    return out.exp_()
