"""Additions of some models to attention: soft-capped scores, and sinks, which are logits without a value.

Shapes: B rows, H query heads, L queries, Dv value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Extras(NamedTuple):
    """Additions of a model to attention; by default none.

    softcap: scaled scores s become ``softcap * tanh(s / softcap)`` before biases are added (Gemma 2), 0.0 for none.
    sink_logits: float ``[H]``: each head's softmax also has this logit, which has no value, so the weights of the keys
    sum up to less than 1 (GPT-OSS); it gets a gradient. None for none.
    """

    softcap: float = 0.0
    sink_logits: Tensor | None = None

    @property
    def needs_lse(self) -> bool:
        """True if `finish` needs the log-sum-exp."""
        return self.sink_logits is not None

    def finish(self, out: Tensor, lse: Tensor | None) -> Tensor:
        """Add sink logits to an output ``[B, H, L, Dv]`` without them. lse: its log-sum-exp ``[B, H, L]``.

        With a sink logit z every key has ``exp(lse - logaddexp(lse, z))`` times the weight that it has without.
        """
        if self.sink_logits is None:
            return out
        assert lse is not None
        weight = torch.sigmoid(lse - self.sink_logits.to(lse.dtype)[:, None])
        return (out * weight[..., None]).to(out.dtype)


def soft_cap(scores: Tensor, softcap: float) -> Tensor:
    """``softcap * tanh(scores / softcap)``; for 0.0 the scores as they are."""
    return scores if softcap == 0.0 else torch.tanh(scores / softcap) * softcap


NO_EXTRAS = Extras()
