"""Arguments of ``read``, and errors that growing and static condensed layers have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from condense.plan import ForwardPlan


class ReadRequest(NamedTuple):
    """Arguments that a condensed model gives to a layer with new keys and values.

    q ``[B, H, L, D]``: summary queries are means of these. scale: softmax scale. plan: which of the tokens are real.
    trailing: number of last slots that are real in every row, before rows were aligned. latent_width: as in
    `condense.Method.for_latents`, None for ordinary keys and values.
    """

    q: Tensor
    scale: float
    plan: ForwardPlan
    trailing: int
    latent_width: int | None = None


def read_request(
    q: Tensor, *, scale: float, counts: Tensor | None = None, latent_width: int | None = None
) -> ReadRequest:
    """A request with a plan of its own. counts: real tokens at the end of each row, int64 CPU ``[B]``, None: all."""
    trailing = q.shape[2] if counts is None else int(counts.min())
    return ReadRequest(q, scale, ForwardPlan(q.shape[2], counts), trailing, latent_width)


def check_request(request: object) -> ReadRequest:
    """The request that came with new tokens. Raises ValueError for a caller that is not a condensed model."""
    if not isinstance(request, ReadRequest):
        raise ValueError(
            "this cache holds condensed layers, which only a condensed model can fill: call condense.apply(model, "
            "...) on the model, or give the stock model a new cache"
        )
    return request


def refuse_other_dtype(held: torch.dtype, new: torch.dtype) -> None:
    """Raise ValueError if ``new``, the dtype of new tokens, is not that of the tokens that a layer holds."""
    if new != held:
        raise ValueError(
            f"condensed cache: wanted {held}, for which it was made, got {new}; make a new cache, and use autocast in "
            "all calls or in none"
        )
