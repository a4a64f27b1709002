"""Named baselines: dense attention of other libraries, and FlexAttention with the mask of a method.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from condense.bench.flex import flex_attention
from condense.bench.problems import Inputs, pooled
from condense.methods import Dense

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Baseline(NamedTuple):
    """A baseline: its description, the operations that it has rows for, and whether it needs CUDA."""

    about: str
    ops: tuple[str, ...]
    needs_cuda: bool = True
    backend: SDPBackend | None = None


BASELINES = {
    "cudnn": Baseline(
        "cuDNN through scaled_dot_product_attention",
        ("forward", "backward", "decode"),
        backend=SDPBackend.CUDNN_ATTENTION,
    ),
    "cudnn_rows": Baseline(
        "the same with heads that share a KV head as rows of one", ("decode",), backend=SDPBackend.CUDNN_ATTENTION
    ),
    "flash": Baseline(
        "PyTorch's flash attention through scaled_dot_product_attention",
        ("forward", "backward", "decode"),
        backend=SDPBackend.FLASH_ATTENTION,
    ),
    "flex": Baseline("FlexAttention, compiled, causal", ("forward", "backward")),
    "flex_mask": Baseline("FlexAttention, compiled, our mask over entries and tokens", ("forward", "backward")),
    "sdpa": Baseline(
        "scaled_dot_product_attention, PyTorch's own choice", ("forward", "backward", "decode"), needs_cuda=False
    ),
}
GPU_BASELINES = ("cudnn", "cudnn_rows", "flash", "flex", "flex_mask")
# baselines that compute attention over all keys: a condensed method's speedup is measured against these
DENSE_BASELINES = tuple(name for name in BASELINES if name != "flex_mask")


def obstacle(name: str, device: torch.device) -> str | None:
    """Why a baseline cannot run there, None if it can be tried."""
    return "skipped: needs a CUDA device" if BASELINES[name].needs_cuda and device.type != "cuda" else None


def dense_attention(name: str, inputs: Inputs) -> Attend:
    """Causal attention of whole sequences as a function of q, k and v."""
    if name == "flex":
        return flex_attention(pooled(Dense(), inputs), inputs.q.shape[2], scale=inputs.scale)
    gqa, scale = inputs.q.shape[1] != inputs.k.shape[1], inputs.scale
    return _through(
        name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    )


def dense_step(name: str, num_q: int, num_kv: int, scale: float) -> Attend:
    """One query ``[B, H, 1, D]`` over a full cache, ``[B, K, L, D]`` and ``[B, K, L, Dv]``."""
    if name == "cudnn_rows":

        def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q.view(q.shape[0], num_kv, -1, q.shape[3]), k, v, scale=scale)

        return _through(name, rows)
    gqa = num_q != num_kv
    return _through(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa))


def _through(name: str, attend: Attend) -> Attend:
    backend = BASELINES[name].backend
    if backend is None:
        return attend

    def restricted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    return restricted
