"""The backends by name: the operations that each offers, its limits, and when "auto" chooses it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.hopper import limits as hopper_limits
from condense.ops.recall import rest
from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.reference import operations as reference
from condense.ops.step.settings import StepSettings
from condense.ops.torch import attend as torch_attend
from condense.ops.torch import pool as torch_pool
from condense.ops.triton import limits as triton_limits
from condense.ops.types import Problem


class Operations(NamedTuple):
    """One backend's version of the functions of `condense.ops` that have these names.

    attend is ``attend(q, sources, spans, options) -> (out, lse)``, and attend_recall ``attend_recall(q, sources,
    choice, options, means) -> (out, lse)``, with `AttendOptions`; lse may be None unless they ask for it. means: as in
    `condense.ops.attend_recall`.
    store_groups is ``store_groups(form, k, v) -> (signs, steps, rows)``: what `condense.ops.recall.split_keys` and
    `condense.ops.recall.StoreFormat.pack` make of groups of tokens ``[B, K, G, g, D]`` and ``[B, K, G, g, Dv]``.
    running_sums is ``running_sums(before, groups, counts) -> (sums, means)``, as `condense.ops.api.running_sums`.
    pool_groups: None if `condense.ops.pool_groups` is to call this backend's group_scores and pool.
    """

    attend: Callable[..., tuple[Tensor, Tensor | None]]
    attend_recall: Callable[..., tuple[Tensor, Tensor | None]]
    summarize: Callable[..., Tensor]
    group_scores: Callable[..., Tensor]
    pool: Callable[..., Tensor]
    importance: Callable[..., Tensor]
    largest_weights: Callable[..., Tensor]
    store_groups: Callable[..., tuple[Tensor, Tensor, Tensor]]
    unpack_store: Callable[..., tuple[Tensor, Tensor]]
    running_sums: Callable[..., tuple[Tensor, Tensor]]
    pool_groups: Callable[..., tuple[Tensor, ...]] | None = None


@dataclass(frozen=True)
class Backend:
    """A backend's operations and limits.

    imports: imports the modules of its operations and returns these. attend_obstacle, pool_obstacle, weights_obstacle:
    all reasons why its attention, its pooling, stores and sums, and its `condense.ops.largest_weights` cannot run for a
    `Problem`, as clauses that follow the backend's name, joined by "; "; None if it can. recall_obstacle: the same for
    `condense.ops.attend_recall`, from its arguments. instead: the backend that an error recommends in its place.
    is_fast: whether "auto" takes it for attention of a `Problem` on a GPU.
    """

    imports: Callable[[], Operations]
    attend_obstacle: Callable[[Problem], str | None] = lambda problem: None
    recall_obstacle: Callable[..., str | None] = lambda *args, **kwargs: None
    pool_obstacle: Callable[[Problem], str | None] = lambda problem: None
    weights_obstacle: Callable[[Problem], str | None] = lambda problem: None
    instead: str = "torch"
    is_fast: Callable[[Problem], bool] = lambda problem: True

    _loaded: list[Operations] = field(default_factory=list)

    def load(self) -> Operations:
        """The operations, imported by the first call."""
        if not self._loaded:
            self._loaded.append(self.imports())
        return self._loaded[0]


def _operations_in(*modules: ModuleType) -> dict[str, Any]:
    """Operation name to function, for the functions of modules that are named like an operation."""
    return {name: getattr(module, name) for module in modules for name in Operations._fields if hasattr(module, name)}


_TORCH = Operations(**_operations_in(torch_attend, torch_pool, rest))
_REFERENCE = _TORCH._replace(**_operations_in(reference))


def _triton() -> Operations:
    from condense.ops.triton import attend, largest_weights, pool, recall_attend, recall_store, running_sums

    modules = attend, largest_weights, pool, recall_attend, recall_store, running_sums
    return _TORCH._replace(**_operations_in(*modules))


def _hopper() -> Operations:
    from condense.ops.hopper import attend

    return _triton()._replace(**_operations_in(attend))


_POOL_LIMITS = triton_limits.pool_obstacle, triton_limits.weights_obstacle
_TRITON_LIMITS = triton_limits.attend_obstacle, triton_limits.recall_obstacle, *_POOL_LIMITS
_HOPPER_LIMITS = hopper_limits.attend_obstacle, hopper_limits.recall_obstacle, *_POOL_LIMITS
BACKENDS = {
    "reference": Backend(lambda: _REFERENCE),
    "torch": Backend(lambda: _TORCH),
    "triton": Backend(_triton, *_TRITON_LIMITS),
    "hopper": Backend(_hopper, *_HOPPER_LIMITS, instead="triton", is_fast=hopper_limits.fills_gpu),
}
# backends with kernels, in the order in which "auto" tries them
_KERNELS = ("hopper", "triton")


def check_backend(backend: str) -> str:
    """The name of a backend, or "auto", unchanged. Raises ValueError for any other."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return backend


def resolve_backend(backend: str, problem: Problem) -> str:
    """The attention backend that runs: "auto" decides, an explicit one is never exchanged for another.

    "auto" is, on CUDA and for more than one query, "hopper" where it can run and the rows and heads fill the GPU, else
    "triton" where it has kernels for dtype and widths; in all other cases it is "torch" (`condense.ops.attend` also
    takes "torch" where nothing is condensed).
    Raises ValueError for an unknown backend, and for an explicit one that cannot run.
    """
    names = _KERNELS if problem.num_queries > 1 else ()
    return _resolve(
        backend, problem.device, names, lambda each: each.attend_obstacle(problem), lambda each: each.is_fast(problem)
    )


def resolve_recall(backend: str, q: Tensor, sources: RecallSources, choice: IndexChoice, *, softcap: float) -> str:
    """The backend of `condense.ops.attend_recall`, chosen as in `resolve_backend`, but "auto" always tries "hopper"."""
    names = _KERNELS if q.shape[2] > 1 else ()
    return _resolve(backend, q.device, names, lambda each: each.recall_obstacle(q, sources, choice, softcap=softcap))


def resolve_pooling(backend: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> str:
    """The backend of entries, stores and sums of values, chosen as in `resolve_backend` by the limits of pooling."""
    problem = Problem(device, dtype, widths)
    return _resolve(backend, device, ("triton",), lambda each: each.pool_obstacle(problem))


def resolve_weights(backend: str, problem: Problem) -> str:
    """The backend of `condense.ops.largest_weights`, chosen as in `resolve_backend`, but "auto" tries only "triton"."""
    return _resolve(backend, problem.device, ("triton",), lambda each: each.weights_obstacle(problem))


def plain(backend: str) -> Operations:
    """The backend of operations without kernels: "reference" if it is asked for, else "torch"."""
    return BACKENDS["reference" if check_backend(backend) == "reference" else "torch"].load()


def _resolve(
    backend: str,
    device: torch.device,
    names: Sequence[str],
    obstacle_of: Callable[[Backend], str | None],
    is_fast: Callable[[Backend], bool] = lambda each: True,
) -> str:
    """The backend asked for; "auto" is on CUDA the first fast one of ``names`` without an obstacle, else "torch"."""
    if check_backend(backend) != "auto":
        if (obstacle := obstacle_of(BACKENDS[backend])) is not None:
            raise ValueError(f"backend {backend!r} {obstacle}; use backend={BACKENDS[backend].instead!r}")
        return backend
    for name in names if device.type == "cuda" else ():
        if obstacle_of(BACKENDS[name]) is None and is_fast(BACKENDS[name]):
            return name
    return "torch"


def step_backend(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], settings: StepSettings, **room: int
) -> str:
    """The backend of decode steps: "triton" on CUDA where it can run, else "torch".

    widths: of keys and values. room: ``latent`` and ``entries`` of `condense.ops.triton.limits.step_obstacle`.
    """
    if device.type != "cuda" or triton_limits.step_obstacle(device, dtype, widths, settings, **room) is not None:
        return "torch"
    return "triton"
