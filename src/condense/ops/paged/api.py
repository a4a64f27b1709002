"""Attention of new tokens of many requests over pages: checks, and the choice of a backend.

Shapes: T new tokens of all requests, H query heads, K KV heads, D and Dv widths, g tokens per group.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from condense.ops.backends import check_backend, step_backend
from condense.ops.paged.requests import PagedLayer
from condense.ops.step.pages import NewTokens, PagedState, window_columns
from condense.ops.step.records import RECORD_UNIT, record_format
from condense.ops.step.settings import StepSettings
from condense.ops.triton.limits import check_step


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

    qkv: q ``[T, H, D]``, k ``[T, K, D]``, v ``[T, K, Dv]``; out ``[T, H, Dv]``, one dtype; K divides H. On latents
    (``state.up``) q ``[T, H, d_n + d_r]``, k ``[T, 1, d_c + d_r]``, v of width 0 and out ``[T, H, d_v]``. All keys and
    values are stored in the window first, mean queries in the ring, and due groups as entries or records. Only then do
    queries attend, as in `condense.ops.attend` or, with a choice, `condense.ops.attend_recall`: so a request may read
    pages that another one writes in the same call. With ``settings.reads_exactly`` several new tokens of a request see
    the stored tokens of all closed groups.
    settings: without a choice, ``summary_delay`` is a multiple of g, a summary query has at most g queries, and there
    are no focal tokens. With a choice, ``summary_delay`` is 0 (`PagedState` says why); where queries see the rest, g is
    at least 2 and the window at least g; a store in host memory on CUDA, as slots anywhere, needs a step of kernels.
    backend: single tokens are read by a step of kernels with "triton" or "hopper", and with "auto" on CUDA where it can
    run. All others are read as in `condense.ops.attend`, requests of like lengths as rows of one call.
    Raises ValueError for an unknown backend, for an explicit one that cannot run here, for settings that pages cannot
    hold, for pages of records that are not as `PagedState` says, and while a graph is captured for requests that no
    step of kernels reads.
    """
    q, k, v = qkv
    _check_settings(settings, state)
    takes, widths = check_backend(backend), (k.shape[2], v.shape[2])
    options = {"latent": state.latent, "entries": state.most_groups(settings.rule.chunk)}
    if takes == "auto":
        takes = step_backend(q.device, q.dtype, widths, settings, **options)
    elif takes in ("triton", "hopper"):
        check_step(q, widths, settings, **options)
    if state.holds_records:
        _check_records(state, k, v, settings)
    step_of: Callable[..., Any] | None = None
    if takes in ("triton", "hopper"):
        from condense.ops.triton.paged_step import PagedStep

        step_of = functools.partial(PagedStep, settings, scale, widths)
    if step_of is None and state.store is not None and q.is_cuda:
        raise ValueError("a store in host memory needs a step of kernels on CUDA, which cannot run: use store='device'")
    if step_of is None and state.slots is not None:
        raise ValueError("slots need a step of kernels, which cannot run here: leave them out of the state")
    steps = 0 if step_of is None else new.num_steps
    # a record with a choice depends on its group's tokens alone, so the step's kernel makes those of prompts too
    layer = PagedLayer(qkv, state, new, settings, scale, backend, None if settings.choice is None else step_of)
    if steps < len(new.seen) and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "requests that no step of kernels reads cannot be captured in a CUDA graph: capture single tokens that "
            "kernels read, or run eagerly"
        )
    if step_of is None or steps == 0:
        layer.read(out, first=0)
        return
    (ones, *kv), step = (x[:steps] for x in qkv), step_of(state.rows(0, steps), new.seen_on_device[:steps])
    to, up = out[:steps], state.up
    if up is not None:
        ones = up.absorb(ones[:, :, None])[:, :, 0]
        to = ones.new_empty(*ones.shape[:2], up.latent_width)
    weighing = ones
    if state.ranks is not None and settings.num_summary > 0:
        # the kernel would average queries over this process's heads alone: give it the mean over all heads
        total = state.ranks.sum(ones.sum(1, keepdim=True, dtype=torch.float32))
        weighing = (total / state.ranks.heads).to(ones.dtype)
    # computed ahead, because a kernel below may start before the operation in front of it has written its result
    before = None if settings.choice is None else new.before
    step.store(weighing, *kv)
    layer.read(out, first=steps)
    step.attend(ones, to, before)
    if up is not None:
        out[:steps] = up.project_out(to[:, :, None])[:, :, 0]


def _check_settings(settings: StepSettings, state: PagedState) -> None:
    """Raise ValueError for settings of a method that these pages cannot hold."""
    if state.ring is not None and state.ring.slots < settings.num_summary:
        raise ValueError(f"pages of the ring must have {settings.num_summary} slots or more, got {state.ring.slots}")
    if not state.holds_records and (settings.entry_bits < 16 or settings.matched or settings.choice is not None):
        raise ValueError(
            "entries must be pages of records, uint8, with a choice, matched biases or fewer than 16 bits, got "
            f"{state.entries.cache.dtype}: pages of the dtype of k hold CCA and LCA alone: use entry_bits=16"
        )
    if settings.coarse is not None:
        raise ValueError(f"pages keep all entries, got {settings.coarse}: use buffers (`condense.ops.decode_step`)")
    if settings.choice is None:
        return
    if settings.summary_delay != 0:
        raise ValueError(f"summary_delay of records must be 0, got {settings.summary_delay}")
    form, on_host = settings.choice.store, state.store is not None
    if form.on_host != on_host:
        raise ValueError(
            "stored tokens stand in records, or in host memory in pages of their own, got a store on the "
            f"{'host' if form.on_host else 'device'} and {'' if on_host else 'no '}pages for it"
        )
    if state.slots is not None and state.slots.held.shape[2] != form.slots:
        raise ValueError(f"state.slots must have {form.slots} slots, got {state.slots.held.shape[2]}")


def _check_records(state: PagedState, k: Tensor, v: Tensor, settings: StepSettings) -> None:
    """Raise ValueError unless the pages of entries hold records of these tokens that kernels can read."""
    x, (K, D), Dv, window = state.entries.cache, k.shape[1:], v.shape[2], state.window.cache
    _, columns = window_columns(D, Dv, settings, k.itemsize)
    if window.shape[3] != columns:
        raise ValueError(f"window must be pages [P, {K}, N, {columns}], got {tuple(window.shape)}")
    nbytes = record_format(settings, (D, Dv), k.dtype).nbytes
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] != K or x.shape[3] != nbytes:
        raise ValueError(f"entries must be pages uint8 [P, {K}, N, {nbytes}], got {tuple(x.shape)} in {x.dtype}")
    stored = state.store
    if stored is not None:
        shape = (*x.shape[:3], record_format(settings, (D, Dv), k.dtype).nbytes_apart)
        is_host = stored.device.type == "cpu" and (not k.is_cuda or stored.is_pinned())
        if stored.shape != shape or stored.dtype != torch.uint8 or not is_host or not stored.is_contiguous():
            raise ValueError(
                f"store must be contiguous pages uint8 {shape} in host memory, pinned beside a GPU, got "
                f"{tuple(stored.shape)} in {stored.dtype} on {stored.device}"
            )
    if x.stride()[2:] != (nbytes, 1) or any(n % RECORD_UNIT for n in (*x.stride()[:2], x.data_ptr())):
        raise ValueError(
            f"records must begin at multiples of {RECORD_UNIT} bytes, those of a page side by side, got pages with "
            f"strides {x.stride()} at address {x.data_ptr()}"
        )
