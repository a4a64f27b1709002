"""Methods on trial: what wins becomes part of the library, what does not stays here as evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from condense import DGA
from condense.methods.prompt import take
from condense.ops import Chunks, group_scores, pool


@dataclass(frozen=True, kw_only=True)
class AnchoredDGA(DGA):
    """Streaming DGA whose group keeps the key of its best token, as LCA does, and the weighted mean of its values."""

    name: ClassVar[str] = "anchored_dga"

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """See `condense.DGA.represent`."""
        assert summary is not None
        k, v = chunks.tokens()
        num_focal = k.shape[3] - self.group_size
        scores = group_scores(summary, k, scale=scale, backend=backend)
        order = scores.detach().argsort(stable=True, descending=True)
        focal, rest = (x.sort(-1).values for x in order.split([num_focal, self.group_size], dim=-1))
        weights = scores.gather(-1, rest)
        group_k = pool(take(k, rest), weights, how="select", backend=backend)
        group_v = pool(take(v, rest), weights, how="weighted", backend=backend)
        entries_k = torch.cat([take(k, focal), group_k[..., None, :]], dim=3)
        entries_v = torch.cat([take(v, focal), group_v[..., None, :]], dim=3)
        return entries_k.flatten(2, 3), entries_v.flatten(2, 3)
