"""Argument checks of the public operations: `ValueError` with argument, wanted, got."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os

import torch
from torch import Tensor

from condense.ops.types import StepSettings

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("reference", "torch", "triton")
# what the kernels were held to float64 with on a GPU
TRITON_WIDTHS = (64, 80, 96, 128, 192, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# the pooling kernels loop over a group's tokens: any group size, any width up to a row that fits in registers
POOLING_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_POOLING_WIDTH = 1024
MAX_STEP_WIDTH, MAX_STEP_LATENT = 256, 512
# a decode step ranks the tokens of a chunk against each other in registers
MAX_FOCAL_CHUNK = 128
# looked up once: it is asked for in every step
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(**tensors: Tensor) -> None:
    """Each is a tensor ``[batch, heads, tokens, width]`` of a floating dtype that the backends know."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, tokens, width], got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(str(d) for d in DTYPES)}, got {x.dtype}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q ``[B, H, L, D]``, k ``[B, Hkv, L, D]``, v ``[B, Hkv, L, Dv]``, one dtype, one device, Hkv divides H."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if x.numel() == 0:
            raise ValueError(f"{name} must have at least 1 in every dimension, got shape {tuple(x.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same number of tokens, got {q.shape[2]} and {k.shape[2]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, heads and tokens, got {tuple(k.shape[:3])} and {tuple(v.shape[:3])}"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same width, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k and v must have a number of heads that divides the heads of q, {q.shape[1]}, got {k.shape[1]}"
        )


def check_scale(scale: object, q: Tensor) -> float:
    """The softmax scale, by default ``D ** -0.5``."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> list[int]:
    """Lengths of the packed documents that ``cu_seqlens`` marks in q."""
    usable = isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.dtype in _INTEGERS
    marks = cu_seqlens.tolist() if usable else []
    lengths = [stop - start for start, stop in itertools.pairwise(marks)]
    if not lengths or marks[0] != 0 or marks[-1] != q.shape[2] or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must be a tensor of integers that rise from 0 to the number of tokens, {q.shape[2]}, "
            f"got {cu_seqlens}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got {q.shape[0]}")
    return lengths


def check_padding(padding: Tensor, q: Tensor) -> Tensor:
    """Left pads per row, int64 CPU ``[B]``."""
    B, L = q.shape[0], q.shape[2]
    if not isinstance(padding, Tensor) or padding.shape != (B,) or padding.dtype not in _INTEGERS:
        raise ValueError(f"padding must be a tensor of integers of shape ({B},), got {padding!r}")
    pads = padding.cpu().to(torch.int64)
    if bool((pads < 0).any()) or bool((pads > L).any()):
        raise ValueError(f"padding must be between 0 and the number of tokens, {L}, got {pads.tolist()}")
    return pads


def check_backend(backend: str) -> str:
    """An explicit backend's name, or "auto"."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend


def resolve_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, ...],
    *,
    num_queries: int = 2,
    dropout_p: float = 0.0,
) -> str:
    """The attention backend that runs: "auto" decides, an explicit one is never exchanged for another.

    "auto" is "triton" on CUDA for the dtypes and widths that it has kernels for and more than one query, else
    "torch" (`condense.ops.attend` also takes "torch" where nothing is condensed). widths: of keys and values.
    Raises ValueError if an explicit "triton" cannot run.
    """  # fmt: skip
    if check_backend(backend) not in ("auto", "triton"):
        return backend
    if backend == "auto" and (device.type != "cuda" or num_queries == 1):
        return "torch"
    obstacle = _triton_obstacle(device, dtype, widths, dropout_p)
    if backend == "auto":
        return "triton" if obstacle is None else "torch"
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    return backend


def step_backend(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], plan: StepSettings, *, latent: int = 0
) -> str:
    """The backend of decode steps: "triton" on CUDA where it can run, else "torch". Arguments as `step_obstacle`."""
    if device.type != "cuda":
        return "torch"
    return "torch" if step_obstacle(device, dtype, widths, plan, latent=latent) else "triton"


def step_obstacle(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], plan: StepSettings, *, latent: int = 0
) -> str | None:
    """What keeps Triton from making a method's decode steps here, None if nothing does.

    widths: of keys and values. latent: columns of the keys that are the values (absorbed MLA), else 0.
    """
    obstacle = _triton_absence(device) or settings_obstacle(plan)
    if obstacle is not None:
        return obstacle
    if dtype not in TRITON_DTYPES:
        return f"takes {', '.join(map(str, TRITON_DTYPES))}, got {dtype}"
    D, Dv = widths
    if latent and not (0 < latent < D and latent <= MAX_STEP_LATENT and D - latent <= MAX_STEP_WIDTH and Dv == 0):
        return (
            f"takes latents of up to {MAX_STEP_LATENT} columns of the keys, with up to {MAX_STEP_WIDTH} others and "
            f"values of width 0, got {latent} of {D} and values of width {Dv}"
        )
    if not latent and not (1 <= D <= MAX_STEP_WIDTH and 1 <= Dv <= MAX_STEP_WIDTH):
        return f"decodes widths up to {MAX_STEP_WIDTH}, got {D} and {Dv}"
    return None


def settings_obstacle(plan: StepSettings) -> str | None:
    """What in a method keeps Triton from making its decode steps on any device, None if nothing does."""
    focal, chunk = plan.num_focal, plan.rule.chunk
    if plan.key_pooling is None or plan.value_pooling is None:
        return "knows no method that makes its entries itself"
    if plan.rule.entries != focal + 1:
        return f"makes num_focal + 1 = {focal + 1} entries per chunk, got {plan.rule.entries}"
    if focal > 0 and chunk > MAX_FOCAL_CHUNK:
        return f"chooses focal tokens in chunks of up to {MAX_FOCAL_CHUNK} tokens, got {chunk}"
    if focal > 0 and not (focal < chunk and plan.num_summary > 0):
        return f"chooses some tokens of a chunk by a summary query, got {focal} of {chunk}, {plan.num_summary} queries"
    return None


def resolve_pooling(backend: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> str:
    """The backend that makes summaries and representatives, chosen like that of attention, with its own limits.

    Raises ValueError if an explicit "triton" cannot run.
    """
    if check_backend(backend) not in ("auto", "triton") or (backend == "auto" and device.type != "cuda"):
        return "torch" if backend == "auto" else backend
    obstacle = _triton_absence(device)
    if obstacle is None and dtype not in POOLING_DTYPES:
        obstacle = f"pools {', '.join(map(str, POOLING_DTYPES))}, got {dtype}"
    if obstacle is None and max(widths) > MAX_POOLING_WIDTH:
        obstacle = f"pools head widths up to {MAX_POOLING_WIDTH}, got {widths}"
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    return "torch"


def _triton_absence(device: torch.device) -> str | None:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, or TRITON_INTERPRET=1 in the environment to be interpreted, got {device.type}"
    if not _HAS_TRITON:
        return "needs the triton package"
    return None


def _triton_obstacle(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...], dropout_p: float) -> str | None:
    absence = _triton_absence(device)
    if absence is not None:
        return absence
    if dropout_p > 0:
        return f"has no attention dropout (set the model's attention dropout to 0), got {dropout_p}"
    if device.type == "cuda" and dtype not in TRITON_DTYPES:
        return f"takes {', '.join(map(str, TRITON_DTYPES))}, got {dtype}"
    if device.type == "cuda" and any(width not in TRITON_WIDTHS for width in widths):
        return f"has kernels for head widths {', '.join(map(str, TRITON_WIDTHS))}, got {widths}"
    return None
