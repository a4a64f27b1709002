"""Argument checks of the public operations: `ValueError` with argument, wanted, got."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("reference", "torch")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q ``[B, H, L, D]``, k ``[B, Hkv, L, D]``, v ``[B, Hkv, L, Dv]``, one dtype, one device, Hkv divides H."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, tokens, width], got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(str(d) for d in DTYPES)}, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if q.shape[2] == 0 or q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same number of tokens, at least 1, got {q.shape[2]} and {k.shape[2]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, heads and tokens, got {tuple(k.shape[:3])} and {tuple(v.shape[:3])}"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same width, got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"KV heads must divide query heads, got {k.shape[1]} KV heads for {q.shape[1]} query heads")


def resolve_backend(backend: str, device: torch.device) -> str:
    """Resolve ``backend`` to one that runs here; an explicit one is never exchanged for another."""
    if backend == "auto":
        return "torch"
    if backend not in BACKENDS:
        raise ValueError(
            f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}; "
            f"on {device.type} use backend='torch'"
        )
    return backend
