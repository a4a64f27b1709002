"""Attention of new tokens of many requests over pages: checks, and the choice of a backend.

Shapes: T new tokens of all requests, H query heads, K KV heads, D and Dv widths, g tokens per group.
"""

from __future__ import annotations

from torch import Tensor

from condense.ops.backends import check_backend, step_backend
from condense.ops.paged.requests import read_requests
from condense.ops.reference import paged as reference
from condense.ops.step.pages import NewTokens, PagedState
from condense.ops.step.settings import StepSettings


def read_paged(
    qkv: tuple[Tensor, Tensor, Tensor],
    state: PagedState,
    new: NewTokens,
    settings: StepSettings,
    *,
    scale: float,
    out: Tensor,
    backend: str = "auto",
) -> None:
    """Read the new tokens of all requests into ``state``, in place, and write their attention to ``out``.

    qkv: q ``[T, H, D]``, k ``[T, K, D]``, v ``[T, K, Dv]``; out ``[T, H, Dv]``, one dtype; K divides H. settings:
    groups whose ``summary_delay`` is a multiple of g, at most g queries in a summary query, no focal tokens, entries of
    16 bits. The key and value of every new token go to the window and its mean query to the ring, groups that are due
    become entries, and its query attends to the entries of closed groups and the tokens behind them, as in
    `condense.ops.attend`. All keys and values are stored first, then all entries, then comes attention: a request may
    read pages that another one writes in the same call.
    backend: "reference"; else as in `condense.ops.attend` for requests with several new tokens. Those with one are read
    by "triton" or "torch"; "auto" is "triton" on CUDA where it can run.
    Raises ValueError for an unknown backend, for an explicit one that cannot run here and for entries in fewer bits.
    """
    if settings.entry_bits < 16:
        raise ValueError(f"entries in pages have 16 bits, got entry_bits={settings.entry_bits}: use entry_bits=16")
    q, k, v = qkv
    if check_backend(backend) == "reference":
        out.copy_(reference.read_paged(q, k, v, state, new, settings, scale=scale))
        return
    steps = new.num_steps if _has_kernels(backend, q, k, v, settings) else 0
    if steps == 0:
        read_requests(qkv, state, new, settings, out, first=0, scale=scale, backend=backend)
        return
    from condense.ops.triton import paged_step

    first, seen = state.first(steps), new.seen_on_device[:steps]
    paged_step.store(q[:steps], k[:steps], v[:steps], first, seen, settings, scale=scale)
    read_requests(qkv, state, new, settings, out, first=steps, scale=scale, backend=backend)
    paged_step.attend(q[:steps], first, seen, settings, scale=scale, out=out[:steps])


def _has_kernels(backend: str, q: Tensor, k: Tensor, v: Tensor, settings: StepSettings) -> bool:
    """True if single tokens are read by the Triton kernels."""
    if backend == "auto":
        return step_backend(q.device, q.dtype, (k.shape[2], v.shape[2]), settings) == "triton"
    return backend in ("triton", "hopper")
