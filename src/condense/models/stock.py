"""Attention of layers that stay stock inside a condensed model.

Shapes: B rows, H query heads, K KV heads, L new tokens, S keys in the cache, D and Dv widths.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from condense.methods import Dense, Layout, Method, StreamingLLM
from condense.methods.layout import MEANS
from condense.models.families import is_chunked, sliding_window
from condense.models.forward import AttentionCall, assert_one_document, forward_of, refuse_cached_documents
from condense.ops import RuleSpans, Source, UniformRule, attend


@dataclass(frozen=True, kw_only=True)
class LocalChunks(Method):
    """The exact tokens of a query's own chunk of ``size`` tokens.

    It has no ``name``, because it computes what stock layers compute and is never saved.
    """

    size: int

    @property
    def layout(self) -> Layout:
        """A chunk's first token closes the chunks before it, which leave no entries."""
        return Layout(UniformRule(chunk=self.size, window=1, max_chunks=0), pooling=MEANS)


def stock_method(module: nn.Module) -> Method:
    """The method that computes the same as a stock layer."""
    size = sliding_window(module)
    if size is None:
        return Dense()
    return LocalChunks(size=size) if is_chunked(module) else StreamingLLM(sink=0, window=size)


def method_of(module: nn.Module) -> Method:
    """The method that a layer computes: its own, or for a layer that stays stock that of `stock_method`."""
    method: Any = module.condense_method or module.condense_stock
    return method


class StockAttention:
    """Causal attention, full, sliding or within chunks, of a layer that is not condensed, in a model where others are.

    The mask of a condensed model does not express causality, only padding, so this class counts the tokens seen.
    Layers in a static cache have condensed layers in it (`stock_method`) and do not come here.
    """

    def __init__(self, rule: UniformRule, cache: Cache | None, layer_idx: int) -> None:
        self.rule = rule
        self.cache = cache
        self.layer_idx = layer_idx
        # read before the stock forward adds the new tokens
        self.seen = 0 if cache is None else int(cache.get_seq_length(layer_idx))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention ``[B, H, L, Dv]`` over the layer's keys."""
        q, k, v, L = call.q, call.k, call.v, call.q.shape[2]
        if torch.compiler.is_compiling() and self.cache is None:
            assert_one_document(call)
            return self._attend(call, q, k, v, L)
        forward = forward_of(call)
        S = k.shape[2]
        # the mask has a column for every slot; the cache of a layer with a sliding window holds the keys of the last S
        num_columns = 0 if call.mask is None else call.mask.shape[-1]
        keys = forward.padding(num_columns - S, S)
        queries = keys if S == L else forward.padding(num_columns - L, L)
        documents = forward.documents(plain=self.cache is None and call.mask is None)
        if documents is not None:
            refuse_cached_documents(call, self.seen)
            parts = zip(*(x.split(documents, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([self._attend(call, a, b, c, a.shape[2]) for a, b, c in parts], dim=2)
        everything = forward.padding(0, num_columns)
        seen = self.seen + L if everything is None else everything.counts
        if keys is None:
            return self._attend(call, q, k, v, seen)
        q = q if queries is None else queries.align(q)
        out = self._attend(call, q, keys.align(k), keys.align(v), seen)
        return out if queries is None else queries.restore(out)

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | int) -> Tensor:
        spans = RuleSpans(self.rule, seen - q.shape[2], seen - k.shape[2])
        sources = (Source(k[:, :, :0], v[:, :, :0]), Source(k, v))
        return attend(q, sources, spans, scale=call.scale, dropout_p=call.dropout, extras=call.extras)[0]
