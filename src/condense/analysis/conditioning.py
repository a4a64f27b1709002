"""The effect of grouping on the condition number: DGA's Theorem 3 in the form that holds, and as printed, which fails.

The theorem says that the Hessian of min_a |y - a V|^2 (Problem 1) is conditioned no worse once tokens are grouped. The
variable of that problem are the weights a in R^L, so the Hessian is 2 V V^T. Grouping makes it 2 M V V^T M^T, where M
takes the means of groups. The rows of M are orthogonal and of one length, so Poincare's separation theorem gives
kappa(M V V^T M^T) <= kappa(V V^T). The printed proof takes 2 V^T V instead, a matrix of the size of the values; for it
the statement is false, as `counterexample` shows.

Shapes: L tokens in groups of m, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Conditioning:
    """Condition numbers of one set of values.

    weights, weights_grouped: of ``V V^T`` and ``M V V^T M^T``, the form that holds. values, values_grouped: of
    ``V^T V`` and ``(M V)^T (M V)``, the printed form.
    """

    weights: float
    weights_grouped: float
    values: float
    values_grouped: float


def group_means(v: Tensor, m: int) -> Tensor:
    """``M V`` ``[L / m, d]``: means of groups of m rows of v ``[L, d]``. Raises ValueError if m does not divide L."""
    if len(v) % m:
        raise ValueError(f"v: wanted a number of rows that {m} divides, got {len(v)}")
    return v.unflatten(0, (-1, m)).mean(1)


def condition_number(a: Tensor) -> float:
    """``kappa(a a^T)`` of a ``[n, d]``, n <= d, from its singular values: largest over smallest, squared.

    Infinite for rows that depend on each other, as those of repeated tokens do in a model's first layer.
    """
    singular = torch.linalg.svdvals(a.double())
    if singular[-1] <= torch.finfo(torch.float64).eps * max(a.shape) * singular[0]:
        return math.inf
    return float((singular[0] / singular[-1]).square())


def conditioning(v: Tensor, m: int) -> Conditioning:
    """Both forms for values v ``[L, d]``: the one that holds on the first ``d // m * m`` rows, the printed one on all.

    Raises ValueError if v has fewer than m * d rows, with which grouped values could not have rank d, or a number of
    rows that m does not divide.
    """
    d = v.shape[1]
    if len(v) < m * d:
        raise ValueError(f"v: wanted at least {m * d} rows, so that {m} times fewer still have rank {d}, got {len(v)}")
    few = v[: d // m * m]
    return Conditioning(
        weights=condition_number(few),
        weights_grouped=condition_number(group_means(few, m)),
        values=condition_number(v.T),
        values_grouped=condition_number(group_means(v, m).T),
    )


@torch.no_grad()
def measure_conditioning(model: PreTrainedModel, ids: Tensor, m: int) -> dict[int, Conditioning]:
    """`conditioning` of the values of one KV head of every layer that caches them, over a text ``[L]``.

    All layers have as many values: as few as serve the widest. Raises ValueError for a text with fewer tokens.
    """
    cache = model(ids[None].to(model.device), use_cache=True, logits_to_keep=1).past_key_values
    assert isinstance(cache, DynamicCache)
    held = {i: getattr(layer, "values", None) for i, layer in enumerate(cache.layers)}
    values = {i: x[0, 0].cpu() for i, x in held.items() if x is not None}
    few = min(max(x.shape[1] for x in values.values()) * m, *(len(x) // m * m for x in values.values()))
    return {i: conditioning(x[:few], m) for i, x in values.items()}


def counterexample() -> tuple[Tensor, int]:
    """Values ``[4, 2]`` and a group size of 2, for which grouping makes the printed form's condition number explode.

    The two dimensions weigh alike, but the second nearly cancels within each group.
    """
    return torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [1.0, -0.98]], dtype=torch.float64), 2
