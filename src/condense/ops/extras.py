"""What some models add to attention: a logit without a value in every softmax (attention sinks).

Shapes: B rows, H query heads, L queries, Dv value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Extras(NamedTuple):
    """What a model's attention has beside scaled scores and a softmax.

    sink_logits: float ``[H]``: each head's softmax has this logit too, which has no value, so that the weights of the
    keys sum up to less than 1 (GPT-OSS); gets a gradient. None for none.
    """

    sink_logits: Tensor | None = None

    @property
    def needs_lse(self) -> bool:
        """True if `finish` needs the log-sum-exp."""
        return self.sink_logits is not None

    def finish(self, out: Tensor, lse: Tensor | None) -> Tensor:
        """Output ``[B, H, L, Dv]`` with the sink logits, of the output without them and its log-sum-exp ``[B, H, L]``.

        The softmax over the scores s and a sink logit z gives every key ``exp(lse - logaddexp(lse, z))`` times the
        weight that it has without z.
        """
        if self.sink_logits is None:
            return out
        assert lse is not None
        weight = torch.sigmoid(lse - self.sink_logits.to(lse.dtype)[:, None])
        return (out * weight[..., None]).to(out.dtype)


NO_EXTRAS = Extras()
