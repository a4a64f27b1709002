"""Attention that the study measures beside the library's methods: a dense cache in few bits.

Shapes: K KV heads, G groups of g tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.ops import RuleSpans, Source, UniformRule, attend
from condense.ops.tensors.codes import dequantise, quantise


@dataclass(frozen=True)
class Cache:
    """Dense attention over tokens in 4 bits but for the newest: an ``attention(module, q, k, v, scale) -> out``.

    After KIVI (arXiv:2402.02750): keys have a step and a zero per channel of 64 tokens, values per token, both in the
    dtype of the tokens; the newest 128 tokens stay exact.
    """

    bits: int = 4
    group: int = 64
    window: int = 128

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        G = max(0, k.shape[2] - self.window) // self.group
        if G == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        groups = (x[:, :, : G * self.group].contiguous().unflatten(2, (G, self.group)) for x in (k, v))
        store = Source(*(self._rounded(x, dim).flatten(2, 3) for x, dim in zip(groups, (3, 4), strict=True)))
        spans = RuleSpans(UniformRule(self.group, self.window, entries=self.group), 0, 0)
        return attend(q, [store, Source(k, v)], spans, scale=q.shape[3] ** -0.5 if scale is None else scale)[0]

    def costs(self, length: int, width: int) -> dict[str, float]:
        """Bytes as a share of a dense cache of 16 bits; a step reads all of them."""
        tokens, exact = (length - self.window) // self.group * self.group, 4.0 * self.window * width
        of_key = width * self.bits / 8 + 4 * width / self.group
        kept = (tokens * (of_key + width * self.bits / 8 + 4) + exact) / (4.0 * length * width)
        return {"device": kept, "host_store": kept, "read": kept}

    def _rounded(self, x: Tensor, dim: int) -> Tensor:
        """Numbers ``[1, K, G, g, D]`` as they are read, with a step and a zero along a dimension."""
        codes, step, zero = quantise(x, dim, self.bits, x.dtype)
        return dequantise(codes, step, zero)
