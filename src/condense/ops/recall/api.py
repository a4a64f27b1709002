"""Recall's attention and decode step, dispatched to a backend.

Shapes: B rows, H query heads, L queries, G groups of g tokens, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from condense.ops.backends import check_backend
from condense.ops.extras import NO_EXTRAS, Extras
from condense.ops.recall.choice import Choice
from condense.ops.recall.limits import attend_obstacle, hopper_obstacle, step_obstacle
from condense.ops.recall.sources import RecallSources
from condense.ops.recall.state import RecallSettings, RecallState
from condense.ops.reference import recall as reference_recall
from condense.ops.torch import recall as torch_recall
from condense.ops.torch import recall_step as torch_step
from condense.ops.types import NewToken

if TYPE_CHECKING:
    from condense.ops.triton.prepared import PreparedStep

Unchosen = Literal["pool", "drop"]
# why a backend cannot attend, None if it can
Obstacle = Callable[[], str | None]


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: Choice,
    *,
    scale: float,
    unchosen: Unchosen = "pool",
    backend: str = "auto",
    return_lse: bool = False,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over entries of closed groups that are not open, tokens of open groups, and the window.

    q ``[B, H, L, D]`` in the dtype of the sources. choice: the groups that each query opens (`IndexChoice`,
    `ArrayChoice`); its tensors get no gradient. unchosen: "pool", or "drop" to leave out the entries (Quest). backend:
    "reference", "torch", "triton", "hopper" or "auto": on CUDA and for more than one query "hopper" or else "triton"
    where `condense.ops.recall.limits` allows it; in all other cases "torch". extras: as in `condense.ops.attend`;
    groups are chosen without them.

    Returns out ``[B, H, L, Dv]`` in the dtype of q and, with ``return_lse``, the log-sum-exp ``[B, H, L]`` in float32
    or wider, else None. A query that sees nothing gives 0 and -inf.
    Raises ValueError for another backend, an explicit backend that cannot run, another ``unchosen`` and a store that
    does not fit the entries.
    """
    if unchosen not in ("pool", "drop"):
        raise ValueError(f"unchosen must be 'pool' or 'drop', got {unchosen!r}")
    G, tokens = sources.entries.k.shape[2], sources.store.k.shape[2]
    if (tokens % G if G > 0 else tokens) or (G > 0 and tokens == 0):
        raise ValueError(f"store must hold g tokens for each of the {G} entries, got {tokens} tokens")
    pool = unchosen == "pool"
    if check_backend(backend) == "reference":
        out, lse = reference_recall.attend_recall(q, sources, choice, scale=scale, softcap=extras.softcap, pool=pool)
        return extras.finish(out, lse), lse if return_lse else None
    of_hopper = partial(hopper_obstacle, q, sources, choice, softcap=extras.softcap)
    of_triton = partial(attend_obstacle, q, sources, choice)
    kernels = _resolve(backend, of_hopper, of_triton, for_prompt=q.device.type == "cuda" and q.shape[2] > 1)
    attend = torch_recall.attend_recall
    if kernels == "triton":
        from condense.ops.triton import recall_attend

        attend = recall_attend.attend_recall
    elif kernels == "hopper":
        from condense.ops.hopper import recall as hopper_recall

        attend = hopper_recall.attend_recall_hopper
    out, of_keys = attend(
        q, sources, choice, scale=scale, softcap=extras.softcap, pool=pool, return_lse=return_lse or extras.needs_lse
    )
    return extras.finish(out, of_keys), of_keys if return_lse else None


def _resolve(backend: str, of_hopper: Obstacle, of_triton: Obstacle, *, for_prompt: bool) -> str:
    """The backend that attends. for_prompt: True for several queries on a GPU, for which "auto" prefers kernels.

    Raises ValueError if an explicit backend cannot run.
    """
    if backend == "auto" and for_prompt:
        if of_hopper() is None:
            return "hopper"
        return "torch" if of_triton() else "triton"
    if backend == "hopper" and (obstacle := of_hopper()) is not None:
        raise ValueError(f"backend 'hopper' {obstacle}; use backend='triton'")
    if backend == "triton" and (obstacle := of_triton()) is not None:
        raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    return "torch" if backend == "auto" else backend


def recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
    backend: str = "auto",
) -> Tensor:
    """Read one token per row into ``state``, in place, and attend; `condense.ops.recall.state` defines the step.

    latent: if > 0, values are the first ``latent`` columns of the keys and Dv is 0 (absorbed MLA). extras: as in
    `attend_recall`. backend: "torch", "triton" or "auto": "triton" on CUDA where `condense.ops.recall.limits` allows
    it.
    Returns ``[B, H, 1, Dv]``, or ``[B, H, 1, latent]``; no gradient flows through a step.
    Raises ValueError for another backend, for an explicit "triton" that cannot run, and for a store in host memory
    beside tensors on a GPU where the step does not run on Triton.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if backend != "torch" and (backend == "triton" or token.q.device.type == "cuda"):
        obstacle = step_obstacle(token, state, settings, latent=latent)
        if obstacle is None:
            from condense.ops.triton import recall_step as triton_step

            return triton_step.recall_step(token, state, settings, scale=scale, latent=latent, extras=extras)
        if backend == "triton":
            raise ValueError(f"backend 'triton' {obstacle}; use backend='torch'")
    if state.store.device != token.q.device:
        raise ValueError(
            "a store in host memory needs the Triton step, which "
            f"{step_obstacle(token, state, settings, latent=latent) or 'was not asked for'}; use store='device'"
        )
    return torch_step.recall_step(token, state, settings, scale=scale, latent=latent, extras=extras)


def prepare_recall_step(
    token: NewToken,
    state: RecallState,
    settings: RecallSettings,
    *,
    scale: float,
    latent: int = 0,
    extras: Extras = NO_EXTRAS,
) -> PreparedStep | None:
    """As `condense.ops.prepare_step`, for `recall_step`; None where its backend is not "triton".

    Raises ValueError for a state that does not fit.
    """
    if token.q.device.type != "cuda" or step_obstacle(token, state, settings, latent=latent) is not None:
        return None
    from condense.ops.triton import recall_step as triton_step

    return triton_step.prepare_recall_step(token, state, settings, scale=scale, latent=latent, extras=extras)
