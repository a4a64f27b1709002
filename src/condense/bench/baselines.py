"""Named baselines: dense attention of other libraries, and FlexAttention with the mask of a method.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, D and Dv widths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

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


_WHOLE = ("forward", "backward")
BASELINES = {
    "cudnn": Baseline(
        "cuDNN through scaled_dot_product_attention", (*_WHOLE, "decode"), backend=SDPBackend.CUDNN_ATTENTION
    ),
    "cudnn_rows": Baseline(
        "the same with heads that share a KV head as rows of one", ("decode",), backend=SDPBackend.CUDNN_ATTENTION
    ),
    "flash": Baseline(
        "PyTorch's flash attention through scaled_dot_product_attention",
        (*_WHOLE, "decode"),
        backend=SDPBackend.FLASH_ATTENTION,
    ),
    "flex": Baseline("FlexAttention, compiled, causal", _WHOLE),
    "flex_mask": Baseline("FlexAttention, compiled, our mask over entries and tokens", _WHOLE),
    "sdpa": Baseline("scaled_dot_product_attention, PyTorch's own choice", (*_WHOLE, "decode"), needs_cuda=False),
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
    gqa = inputs.q.shape[1] != inputs.k.shape[1]
    return _sdpa(name, is_causal=True, scale=inputs.scale, enable_gqa=gqa)


def dense_step(name: str, num_q: int, num_kv: int, scale: float) -> Attend:
    """One query ``[B, H, 1, D]`` over a full cache, ``[B, K, L, D]`` and ``[B, K, L, Dv]``."""
    if name == "cudnn_rows":
        attend = _sdpa(name, scale=scale)
        return lambda q, k, v: attend(q.view(q.shape[0], num_kv, -1, q.shape[3]), k, v)
    return _sdpa(name, scale=scale, enable_gqa=num_q != num_kv)


def _sdpa(name: str, **options: Any) -> Attend:
    """PyTorch's attention, through the baseline's backend if it names one."""
    backend = BASELINES[name].backend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend
