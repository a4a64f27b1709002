"""One decode step of Recall in Triton: five kernels, no wait for the host, no atomics but a count of programs.

Shapes as in `condense.ops.recall.state`; R = H / K query heads per KV head, S splits of the work on one KV head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.recall.limits import step_obstacle
from condense.ops.recall.state import RecallSettings, RecallState, check_step
from condense.ops.triton.host import dense_rows, power_of_2
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_close_kernels import recall_close_kernel
from condense.ops.triton.recall_step_choice_kernels import recall_choose_kernel
from condense.ops.triton.recall_step_kernels import recall_attend_kernel
from condense.ops.triton.recall_step_plan import plan_of, ranked
from condense.ops.triton.recall_step_score_kernels import recall_score_kernel
from condense.ops.triton.step_kernels import step_join_kernel
from condense.ops.types import NewToken, numbered_settings

_close, _score, _choose = (Launcher(x) for x in (recall_close_kernel, recall_score_kernel, recall_choose_kernel))
_attend, _join = Launcher(recall_attend_kernel), Launcher(step_join_kernel)


def recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Read one token per row: attention output ``[B, H, 1, Dv]`` or ``[B, H, 1, latent]``; ``state`` advances in place.

    token, state as in `condense.ops.recall.state`, the state contiguous; bfloat16, float16 or float32, one dtype; K
    divides H. Rows without a token are not touched and give 0. latent, extras: as of `condense.ops.recall.recall_step`.
    Raises ValueError for what `condense.ops.recall.limits.step_obstacle` names and for a state that does not fit.
    """
    obstacle = step_obstacle(token, state, settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    check_step(token, state, settings)
    assert settings.rule.window is not None
    out: Tensor = torch.ops.condense.recall_step.default(
        *token[:3], *state, token.counter, token.real, extras.sink_logits, settings.number, scale, latent,
        extras.softcap,
    )  # fmt: skip
    return out


class _Scratch(NamedTuple):
    """score ``[B, H, G as a power of two]``, top and total ``[B, H, S0]``, key and candidate int32 ``[B, K, N]``,
    groups and place int32 ``[B, K, r]``, offset ``[B, K, G]``, part ``[B, H, S1, Dv]``, lse ``[B, H, S1]``, arrived
    int32 ``[B, K]``; float32 the others.
    """

    score: Tensor
    top: Tensor
    total: Tensor
    key: Tensor
    candidate: Tensor
    groups: Tensor
    place: Tensor
    offset: Tensor
    part: Tensor
    lse: Tensor
    arrived: Tensor


def _scratch(q: Tensor, K: int, G: int, r: int, splits: tuple[int, int], Dv: int) -> _Scratch:
    B, H = q.shape[:2]
    (S0, S1), (_, C, tiles) = splits, ranked(G, r)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    return _Scratch(
        empty(B, H, power_of_2(max(G, 1))), empty(B, H, S0), empty(B, H, S0),
        empty(B, K, tiles * C, dtype=torch.int32), empty(B, K, tiles * C, dtype=torch.int32),
        empty(B, K, r, dtype=torch.int32), empty(B, K, r, dtype=torch.int32),
        empty(B, K, G), empty(B, H, S1, Dv), empty(B, H, S1), empty(B, K, dtype=torch.int32),
    )  # fmt: skip


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    codes: Tensor,
    grid: Tensor,
    store: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    seen: Tensor,
    slots: Tensor,
    held: Tensor,
    order: Tensor,
    ring_q: Tensor,
    biases: Tensor,
    counter: Tensor | None,
    real: Tensor | None,
    sink: Tensor | None,
    settings: int,
    scale: float,
    latent: int,
    softcap: float,
) -> Tensor:
    taken = (entries_k, entries_v, codes, grid, store, ring_k, ring_v, seen, ring_q, biases)
    if not torch.is_inference_mode_enabled():  # tells autograd of the change, as PyTorch's in-place operations do
        torch.autograd.graph.increment_version((*taken, slots, held, order, *(() if counter is None else (counter,))))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (B, H, _, D), (_, K, _, Dv), G, S, device = q.shape, v.shape, entries_k.shape[2], held.shape[2], q.device
    sizes = (G, ring_k.shape[2], store.shape[2], S, ring_q.shape[2])
    plan = plan_of(device, q.dtype, (B, H, K), (D, Dv, latent), sizes, settings, (scale, softcap), real is not None)
    of_settings: RecallSettings = numbered_settings(settings)
    scratch = _scratch(q, K, G, of_settings.quota.at(G), plan.splits, latent or Dv)
    score, top, total, key, candidate, groups, place, offset, parts, lse, arrived = scratch
    out = torch.empty(B, H, 1, latent or Dv, dtype=q.dtype, device=device)
    counts = seen if real is None else real.contiguous()
    # kernels start on the current device, which may not be that of the tensors in a model spread over several
    with torch.cuda.device_of(q):
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        _launch(_close, plan.close, (q, k, v, *taken, counts, arrived), strides)
        if G > 0:
            words = codes if of_settings.index.bits == 16 else codes.view(torch.int16)
            _launch(_score, plan.score, (q, words, grid, seen, counts, score, top, total), q.stride()[:2])
            chosen = (key, candidate, groups, place, offset, held, order, arrived)
            _launch(_choose, plan.choose, (score, top, total, biases, seen, counts, *chosen), ())
        keys = (entries_k, entries_v, store, ring_k, ring_v, slots)
        _launch(_attend, plan.attend, (q, *keys, groups, place, offset, seen, counts, parts, lse), q.stride()[:2])
        _launch(_join, plan.join, (parts, lse, out, seen, counts, sink, counter), (seen.stride(0), counts.stride(0)))
    return out


def _launch(
    kernel: Launcher, plan: tuple[Any, ...], tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]
) -> None:
    grid, numbers, constants, options = plan
    kernel(grid, tensors, (*strides, *numbers), constants, options)


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    latent = args[-2]
    return q.new_empty(*q.shape[:3], latent or v.shape[3])


def _register() -> torch.library.Library:
    """Define the torch operation; not by `torch.library.custom_op`, see `condense.ops.triton.step`."""
    library = torch.library.Library("condense", "FRAGMENT")
    schema = torch.library.infer_schema(_step, mutates_args=(*RecallState._fields, "counter"), op_name="recall_step")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("recall_step", _step, "CompositeExplicitAutograd")
    torch.library.register_fake("condense::recall_step", _fake, lib=library)
    return library


_LIBRARY = _register()
