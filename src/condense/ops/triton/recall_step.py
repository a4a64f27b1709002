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
from condense.ops.triton.host import cdiv, on_device_of, power_of_2
from condense.ops.triton.launch import Launcher, Prepared
from condense.ops.triton.prepared import PreparedStep
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
    _check(token, state, settings, latent)
    out: Tensor = torch.ops.condense.recall_step.default(
        *token[:3], *state, token.counter, token.real, extras.sink_logits, settings.number, scale, latent,
        extras.softcap,
    )  # fmt: skip
    return out


def _check(token: NewToken, state: RecallState, settings: RecallSettings, latent: int) -> None:
    obstacle = step_obstacle(token, state, settings, latent=latent)
    if obstacle is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    check_step(token, state, settings)
    assert settings.rule.window is not None


class _Scratch(NamedTuple):
    """Memory of one step, one piece in place of several, each of one dimension in the order of the shape given here.

    float32: score ``[B, H, G as a power of two]``, top and total ``[B, H, S0]``, offset ``[B, K, G]``, part
    ``[B, H, S1, Dv]``, lse ``[B, H, S1]``; int32: key and candidate ``[B, K, N]``, groups and place ``[B, K, r]``,
    arrived ``[B, K]``.
    """

    score: Tensor
    top: Tensor
    total: Tensor
    offset: Tensor
    part: Tensor
    lse: Tensor
    key: Tensor
    candidate: Tensor
    groups: Tensor
    place: Tensor
    arrived: Tensor


# fields of `_Scratch` that are float32
_NUM_FLOATS = 6


def _scratch_sizes(rows: tuple[int, int], G: int, r: int, splits: tuple[int, int], Dv: int) -> tuple[int, ...]:
    """Numbers in each field of `_Scratch`, rounded up so that all begin at whole 128 bytes; rows: B * H and B * K."""
    (queries, heads), (S0, S1), (_, C, tiles) = rows, splits, ranked(G, r)
    scores = power_of_2(max(G, 1))
    floats = queries * scores, queries * S0, queries * S0, heads * G, queries * S1 * Dv, queries * S1
    integers = heads * tiles * C, heads * tiles * C, heads * r, heads * r, heads
    return tuple(cdiv(n, 32) * 32 for n in (*floats, *integers))


def _scratch(sizes: tuple[int, ...], device: torch.device) -> _Scratch:
    """In two allocations, because a loop on the host waits for every one."""
    floats, integers = sizes[:_NUM_FLOATS], sizes[_NUM_FLOATS:]
    return _Scratch(
        *torch.empty(sum(floats), dtype=torch.float32, device=device).split_with_sizes(floats),
        *torch.empty(sum(integers), dtype=torch.int32, device=device).split_with_sizes(integers),
    )


class _RecallKernels(PreparedStep):
    """The kernels of `recall_step`."""

    __slots__ = ("_attend", "_choose", "_close", "_join", "_score", "_sizes", "_width", "_words")

    state: RecallState

    def __init__(
        self,
        token: NewToken,
        state: RecallState,
        settings: RecallSettings,
        *,
        scale: float,
        latent: int = 0,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        """Arguments as of `PreparedStep` and `recall_step`, which has checked them all."""
        super().__init__(token, state, scale, extras)
        q, k, v = self._dense(token)
        (B, H, _, D), (_, K, _, Dv), G, S = q.shape, v.shape, state.entries_k.shape[2], state.held.shape[2]
        sizes = (G, state.ring_k.shape[2], state.store.shape[2], S, state.ring_q.shape[2])
        widths, scores, has_real = (D, Dv, latent), (scale, extras.softcap), token.real is not None
        plan = plan_of(q.device, q.dtype, (B, H, K), widths, sizes, settings.number, scores, has_real)
        self._width = latent or Dv
        self._sizes = _scratch_sizes((B * H, B * K), G, settings.quota.at(G), plan.splits, self._width)
        self._words = state.codes if settings.index.bits == 16 else state.codes.view(torch.int16)
        of_q = q.stride()[:2]
        self._close = _prepared(_close, plan.close, (*of_q, *k.stride()[:2], *v.stride()[:2]))
        self._score = _prepared(_score, plan.score, of_q)
        self._choose = _prepared(_choose, plan.choose, ())
        self._attend = _prepared(_attend, plan.attend, of_q)
        # rows that count are read as contiguous
        self._join = _prepared(_join, plan.join, (1, 1))

    def __call__(self, token: NewToken, sink: Tensor | None) -> Tensor:
        """Attention ``[B, H, 1, Dv]``, or ``[B, H, 1, latent]``."""
        q, k, v = self._dense(token)
        entries_k, entries_v, codes, grid, store, ring_k, ring_v, seen, slots, held, order, ring_q, biases = self.state
        scratch = _scratch(self._sizes, q.device)
        score, top, total, offset, part, lse, key, candidate, groups, place, arrived = scratch
        out = torch.empty(*q.shape[:3], self._width, dtype=q.dtype, device=q.device)
        counts = seen if token.real is None else token.real.contiguous()
        changed = (entries_k, entries_v, codes, grid, store, ring_k, ring_v, seen, ring_q, biases)
        # kernels start on the current device, which may not be that of the tensors in a model spread over several
        with on_device_of(q):
            self._close((q, k, v, *changed, counts, arrived))
            if entries_k.shape[2] > 0:
                self._score((q, self._words, grid, seen, counts, score, top, total))
                chosen = (key, candidate, groups, place, offset, held, order, arrived)
                self._choose((score, top, total, biases, seen, counts, *chosen))
            keys = (entries_k, entries_v, store, ring_k, ring_v, slots)
            self._attend((q, *keys, groups, place, offset, seen, counts, part, lse))
            self._join((part, lse, out, seen, counts, sink, token.counter))
        return out


def _prepared(kernel: Launcher, plan: tuple[Any, ...], strides: tuple[int, ...]) -> Prepared:
    grid, numbers, constants, options = plan
    return Prepared(kernel, grid, (*strides, *numbers), constants, options)


def prepare_recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> PreparedStep:
    """As `condense.ops.triton.step.prepare_step`, for `recall_step`."""
    _check(token, state, settings, latent)
    return _RecallKernels(token, state, settings, scale=scale, latent=latent, extras=extras)


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
    changed = (entries_k, entries_v, codes, grid, store, ring_k, ring_v, seen, slots, held, order, ring_q, biases)
    if not torch.is_inference_mode_enabled():  # tells autograd of the change, as PyTorch's in-place operations do
        torch.autograd.graph.increment_version(changed if counter is None else (*changed, counter))
    token, state, extras = NewToken(q, k, v, real, counter), RecallState(*changed), Extras(softcap, sink)
    of_settings: RecallSettings = numbered_settings(settings)
    return _RecallKernels(token, state, of_settings, scale=scale, latent=latent, extras=extras)(token, sink)


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
