"""A method on trial: Recall in some of a layer's KV heads. Not part of the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from condense import Recall
from condense.methods import Method
from condense.methods.base import Context


@dataclass(frozen=True, kw_only=True)
class HeadRecall(Recall):
    """Recall in the KV heads ``heads``; the others see every group behind the window as its entry."""

    name: ClassVar[str] = "head_recall"
    heads: tuple[int, ...] = ()

    def attend(self, q: Tensor, context: Context, **settings: Any) -> tuple[Tensor, Tensor | None]:
        """See `condense.Recall.attend`; without log-sum-exp."""
        recalled, _ = super().attend(q, context, **settings)
        pooled, _ = Method.attend(self, q, Context(context.sources, context.spans), **settings)
        K = context.entries.k.shape[1]
        recalls = torch.tensor([head in self.heads for head in range(K)], device=q.device)
        return torch.where(recalls.repeat_interleave(q.shape[1] // K)[None, :, None, None], recalled, pooled), None
