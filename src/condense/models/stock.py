"""Layers that stay as they are inside a condensed model.

Shapes: B rows, H query heads, K KV heads, L new tokens, S keys at hand, D and Dv widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, StaticCache

from condense.models.padding import documents_of, is_real, padding_of, refuse_cached_documents
from condense.ops import RuleSpans, Source, UniformRule, attend


class StockAttention:
    """For a layer that stays as it is inside a condensed model: full or sliding causal attention.

    The model has one mask for all layers and it says nothing of causality, so this layer counts what it has seen.
    """

    def __init__(self, window: int | None, cache: Cache | None, layer_idx: int) -> None:
        self.rule = UniformRule(chunk=1, window=window, max_chunks=0)
        self.cache = cache
        self.layer_idx = layer_idx
        self.is_static = isinstance(cache, StaticCache)
        # counted before the stock forward adds the new tokens; a static layer's counter goes on by itself
        seen = 0 if cache is None else cache.get_seq_length(layer_idx)
        self.seen: Tensor | int = seen.clone() if isinstance(seen, Tensor) else seen

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        dropout: float,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Attention ``[B, H, L, Dv]`` over keys that end with the new tokens, or with room for more if static."""
        if not self.is_static:
            return self._read(module, q, k, v, mask, scale, dropout, kwargs)
        if q.shape[2] == 1:
            return self._step(q, k, v, mask, scale, dropout)
        return self._read_eagerly(module, q, k, v, mask, scale, dropout, kwargs)

    @torch.compiler.disable
    def _read_eagerly(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *args: Any
    ) -> Tensor:
        """The filled part of a static layer; a compiled forward breaks here, as in condensed layers."""
        self.seen = int(self.seen)
        S = self.seen + q.shape[2]
        return self._read(module, q, k[:, :, :S], v[:, :, :S], None if mask is None else mask[..., :S], *args)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        """One new token over all slots of a static layer, without a look from the host."""
        S = k.shape[2]
        slot = torch.as_tensor(self.seen, device=q.device)
        real = is_real(mask, slot, S, q.shape[0])
        pad = None if real is None else ~real[:, None, None, None]
        sees = (torch.arange(S, device=q.device) <= slot)[None, None, None]
        if mask is not None and pad is not None:
            sees = sees & mask | pad
        # heads that share a KV head become rows of one call
        rows = q[:, :, 0].unflatten(1, (k.shape[1], -1))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=sees, dropout_p=dropout, scale=scale)
        out = out.flatten(1, 2)[:, :, None]
        return out if pad is None else out.masked_fill(pad, 0)

    def _read(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        dropout: float,
        kwargs: dict[str, Any],
    ) -> Tensor:
        B, _, L, _ = q.shape
        S = k.shape[2]
        # a sliding layer's mask covers the keys at hand only: both are counted from its end
        num_columns = 0 if mask is None else mask.shape[-1]
        keys = padding_of(mask, num_columns - S, B, S, self.layer_idx)
        queries = keys if S == L else padding_of(mask, num_columns - L, B, L, self.layer_idx)
        documents = documents_of(kwargs, B, L, self.layer_idx, plain=self.cache is None and keys is None)
        if documents is not None:
            refuse_cached_documents(module, self.cache, int(self.seen))
            parts = zip(*(x.split(documents, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([self._band(a, b, c, a.shape[2], scale, dropout) for a, b, c in parts], dim=2)
        if keys is None:
            return self._band(q, k, v, self.seen + L, scale, dropout)
        q = q if queries is None else queries.align(q)
        # positions may start anywhere as long as queries and keys agree: count what is still at hand
        out = self._band(q, keys.align(k), keys.align(v), keys.counts, scale, dropout)
        return out if queries is None else queries.restore(out)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | int, scale: float, dropout: float) -> Tensor:
        spans = RuleSpans(self.rule, seen - q.shape[2], seen - k.shape[2])
        sources = (Source(k[:, :, :0], v[:, :, :0]), Source(k, v))
        return attend(q, sources, spans, scale=scale, dropout_p=dropout)[0]
