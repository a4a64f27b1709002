"""One decode step over a fixed-address condensed cache in Triton: one kernel or two, and no wait for the host.

Shapes: B rows, H query heads, K KV heads, R = H / K, M entries of capacity, W and Q slots of the rings of tokens and
of queries, S splits, D and Dv widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.triton.host import on_device_of
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.limits import step_obstacle
from condense.ops.triton.prepared import PreparedStep
from condense.ops.triton.step_kernels import step_join_kernel, step_kernel
from condense.ops.triton.step_plan import Sizes, launch_of
from condense.ops.types import NewToken, StepSettings, StepState, numbered_settings

_step_kernel, _join_kernel = Launcher(step_kernel), Launcher(step_join_kernel)


def step(
    token: NewToken,
    state: StepState,
    settings: StepSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row: attention output ``[B, H, 1, Dv]``; ``state`` advances in place.

    bfloat16, float16 or float32, one dtype; K divides H; any strides, the state's last dimensions contiguous. Rows
    without a token are not touched and give 0.
    latent: values are the first ``latent`` columns of the keys (absorbed MLA: 512 of 576), Dv of v and state is 0 and
    the output ``latent`` wide; an entry's latent is pooled by value_pooling, the rest by key_pooling.
    extras: as of `condense.ops.attend`.
    Entries beyond the capacity are dropped and never seen, without an error: ``seen`` is on the device.
    Raises ValueError for a device without kernels, another dtype, methods whose settings do not say how entries are
    made, chunks of more than 128 tokens with focal ones, a width above 256 (512 of a latent) and a state that does not
    fit.
    """
    _check(token, state, settings, latent)
    q, k, v, real, counter = token
    out: Tensor = torch.ops.condense.step.default(
        q, k, v, *state, counter, real, extras.sink_logits, settings.number, scale, latent, extras.softcap
    )
    return out


def _check(token: NewToken, state: StepState, settings: StepSettings, latent: int) -> None:
    q, k, v, real, _ = token
    D, Dv = k.shape[3], v.shape[3]
    obstacle = step_obstacle(q.device, q.dtype, (D, Dv), settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    B, K, M, W = k.shape[0], k.shape[1], state.entries_k.shape[2], state.ring_k.shape[2]
    dtype, device, Q = q.dtype, q.device, max(settings.num_summary, state.ring_q.shape[2])
    form = settings.entry_format
    of_entry, (C, Cv) = form.dtype(dtype), (form.width(x, dtype.itemsize) for x in (D, Dv))
    for name, x, wanted, kind in (
        ("k", k, (B, K, 1, D), dtype),
        ("v", v, (B, K, 1, Dv), dtype),
        ("q", q, (B, q.shape[1] // K * K, 1, D), dtype),
        ("entries_k", state.entries_k, (B, K, M, C), of_entry),
        ("entries_v", state.entries_v, (B, K, M, Cv), of_entry),
        ("ring_k", state.ring_k, (B, K, W, D), dtype),
        ("ring_v", state.ring_v, (B, K, W, Dv), dtype),
        ("ring_q", state.ring_q, (B, K, Q, D), dtype),
    ):
        if x.shape != wanted or x.dtype != kind or x.device != device:
            raise ValueError(
                f"{name} must be {wanted} in {kind} on {device}, got {tuple(x.shape)} in {x.dtype} on {x.device}"
            )
    for name, x, size, number in (
        ("seen", state.seen, (B,), torch.int64),
        ("first", state.first, (B, 2), torch.int64),
        ("arrived", state.arrived, (B, K + 1), torch.int32),
    ):
        if x.shape != size or x.dtype != number or x.device != device:
            raise ValueError(f"{name} must be {number} of shape {size} on {device}, got {x}")
    biases, wanted = state.biases, (B, K, M if settings.matched else 0, 1)
    if biases.shape != wanted or biases.dtype != torch.float32 or biases.device != device or not biases.is_contiguous():
        raise ValueError(
            f"biases must be contiguous {wanted} in {torch.float32} on {device}, got {tuple(biases.shape)} in "
            f"{biases.dtype} on {biases.device}"
        )
    if real is not None and (real.shape != (B,) or real.is_floating_point() or real.device != q.device):
        raise ValueError(f"real must be bool or integer of shape ({B},) on {q.device}, got {real}")
    for name, x in zip(state._fields, state[:5], strict=False):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")
        if x.dtype == torch.uint8 and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


class _StepKernels(PreparedStep):
    """The kernels of `step`."""

    __slots__ = ("_join", "_latent", "_num_splits", "_step")

    state: StepState

    def __init__(
        self,
        token: NewToken,
        state: StepState,
        settings: StepSettings,
        *,
        scale: float,
        latent: int = 0,
        extras: Extras = NO_EXTRAS,
        host_bound: bool = False,
    ) -> None:
        """host_bound: as of `launch_of`. Others as of `PreparedStep` and `step`, which has checked them all."""
        super().__init__(token, state, scale, extras)
        q, k, v = self._dense(token)
        (B, H, _, D), self._latent = q.shape, latent
        sizes = Sizes(B, H, k.shape[1], D, latent or v.shape[3], *_columns(state))
        has_real = token.real is not None
        launch = launch_of(
            settings.number, (scale, extras.softcap), latent, sizes, q.dtype, q.device, has_real, host_bound
        )
        has_token = state.seen if token.real is None else token.real
        strides = (
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *(n for x in state[:5] for n in x.stride()[:3]),
            state.seen.stride(0), *state.first.stride(), *state.arrived.stride(), has_token.stride(0),
        )  # fmt: skip
        self._num_splits = launch.num_splits
        self._step = Prepared(
            _step_kernel, launch.grid, strides + launch.numbers, (launch.fixed, launch.kind), launch.options
        )
        self._join: Prepared | None = None
        if launch.join_grid is not None:
            numbers = (state.seen.stride(0), has_token.stride(0), H, launch.num_splits)
            self._join = Prepared(_join_kernel, launch.join_grid, numbers, launch.join_constants, launch.join_options)

    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Attention ``[B, H, 1, Dv]``."""
        q, k, v = self._dense(token)
        state, real, counter = self.state, token.real, token.counter
        Dv = self._latent or v.shape[3]
        part, lse = _scratch(q, self._num_splits, Dv)
        out = torch.empty(*q.shape[:3], Dv, dtype=q.dtype, device=q.device)
        has_token = state.seen if real is None else real
        # kernels start on the current device, which may not be that of the tensors in a model spread over several
        with on_device_of(q):
            self._step((q, k, v, *state, has_token, sink, counter, part, lse, out))
            if self._join is not None:
                self._join((part, lse, out, state.seen, has_token, sink, counter))
        return out


def prepare_step(
    token: NewToken,
    state: StepState,
    settings: StepSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> PreparedStep:
    """The steps of a state in a loop on the host, for tokens that are laid out as this one, which is not read.

    Autograd is not told that the state changes: nothing that it keeps may share memory with the state. Arguments and
    errors as of `step`.
    """
    _check(token, state, settings, latent)
    return _StepKernels(token, state, settings, scale=scale, latent=latent, extras=extras, host_bound=True)


def _columns(state: StepState) -> tuple[int, int, int]:
    """Columns of entries, tokens and queries."""
    return state.entries_k.shape[2], state.ring_k.shape[2], state.ring_q.shape[2]


def _scratch(q: Tensor, S: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, S, Dv]`` and log-sum-exp ``[B, H, S]`` of every split."""
    B, H = q.shape[:2]
    part = torch.empty(B, H, S, Dv, dtype=torch.float32, device=q.device)
    return part, torch.empty(B, H, S, dtype=torch.float32, device=q.device)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_q: Tensor,
    seen: Tensor,
    first: Tensor,
    arrived: Tensor,
    biases: Tensor,
    counter: Tensor | None,
    real: Tensor | None,
    sink: Tensor | None,
    settings: int,
    scale: float,
    latent: int,
    softcap: float,
) -> Tensor:
    if not torch.is_inference_mode_enabled():  # tells autograd of the change, as PyTorch's in-place operations do
        changed = (entries_k, entries_v, ring_k, ring_v, ring_q, seen, arrived, biases)
        torch.autograd.graph.increment_version(changed if counter is None else (*changed, counter))
    state = StepState(entries_k, entries_v, ring_k, ring_v, ring_q, seen, first, arrived, biases)
    token, extras = NewToken(q, k, v, real, counter), Extras(softcap, sink)
    of_settings: StepSettings = numbered_settings(settings)
    return _StepKernels(token, state, of_settings, scale=scale, latent=latent, extras=extras)(token, sink)


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    latent = args[-2]
    return q.new_empty(*q.shape[:3], latent or v.shape[3])


def _register() -> torch.library.Library:
    """Define the torch operation without `torch.library.custom_op`, whose calls of in-place operations parse the whole
    schema for every argument: several times as long as the rest of the host's work in a step.
    """
    library = torch.library.Library("condense", "FRAGMENT")
    mutated = ("entries_k", "entries_v", "ring_k", "ring_v", "ring_q", "seen", "arrived", "biases", "counter")
    schema = torch.library.infer_schema(_step, mutates_args=mutated, op_name="step")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("step", _step, "CompositeExplicitAutograd")
    torch.library.register_fake("condense::step", _fake, lib=library)
    return library


_LIBRARY = _register()
