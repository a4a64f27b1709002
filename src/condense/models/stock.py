"""Attention of layers that stay stock inside a condensed model.

Shapes: B rows, H query heads, K KV heads, L new tokens, S keys in the cache, D and Dv widths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache, StaticCache

from condense.methods import Layout, Method, StreamingLLM
from condense.methods.layout import MEANS
from condense.models.families import is_chunked, sliding_window
from condense.models.forward import AttentionCall, ForwardBoard, assert_one_document, refuse_cached_documents
from condense.models.masks import is_real
from condense.ops import RuleSpans, Source, UniformRule, attend
from condense.ops.torch.attend import BlockKeys, attend_block
from condense.ops.types import AttendOptions


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


def local_method(module: nn.Module) -> LocalChunks | StreamingLLM | None:
    """The method that computes the same as a stock layer with a sliding window or chunks; None for full attention."""
    size = sliding_window(module)
    if size is None:
        return None
    return LocalChunks(size=size) if is_chunked(module) else StreamingLLM(sink=0, window=size)


class StockAttention:
    """Causal attention, full, sliding or within chunks, of a layer that is not condensed, in a model where others are.

    The mask of a condensed model does not express causality, only padding, so this class counts the tokens seen.
    """

    def __init__(self, local: Method | None, cache: Cache | None, layer_idx: int) -> None:
        """local: as `local_method` returns it."""
        self.rule = UniformRule(chunk=1, window=None, max_chunks=0) if local is None else local.layout.rule
        self.cache = cache
        self.layer_idx = layer_idx
        self.is_static = isinstance(cache, StaticCache)
        # read before the stock forward adds the new tokens; a static layer changes its counter in place, so clone it
        seen = 0 if cache is None else cache.get_seq_length(layer_idx)
        self.seen: Tensor | int = seen.clone() if isinstance(seen, Tensor) else seen

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention ``[B, H, L, Dv]`` over the layer's keys. A static layer's last keys are unused slots."""
        if not self.is_static:
            return self._read(call)
        return self._step(call) if call.q.shape[2] == 1 else self._read_eagerly(call)

    @torch.compiler.disable(reason="a stock layer reads a prompt into a static cache with counts on the host")
    def _read_eagerly(self, call: AttentionCall) -> Tensor:
        """`_read` of a static layer's used slots, outside of compiled graphs: the host must know their number."""
        self.seen = int(self.seen)
        S = self.seen + call.q.shape[2]
        return self._read(call, S)

    def _step(self, call: AttentionCall) -> Tensor:
        """One new token over all slots of a static layer, unused ones masked on the device."""
        q, k, mask = call.q, call.k, call.mask
        S = k.shape[2]
        slot = torch.as_tensor(self.seen, device=q.device)
        real = is_real(mask, slot, S, q.shape[0])
        sees = (torch.arange(S, device=q.device) <= slot)[None, None, None]
        pad = torch.zeros_like(sees[..., :1]) if real is None else ~real[:, None, None, None]
        if mask is not None and real is not None:
            sees = sees & mask | pad
        options = AttendOptions(call.scale, call.extras.softcap, call.dropout, call.extras.needs_lse)
        out, lse = attend_block(q, BlockKeys(k, call.v, sees, pad, None), options)
        return call.extras.finish(out, lse)

    def _read(self, call: AttentionCall, filled: int | None = None) -> Tensor:
        """Attention over the first ``filled`` keys; None: all."""
        q, k, v, L = call.q, call.k[:, :, :filled], call.v[:, :, :filled], call.q.shape[2]
        if torch.compiler.is_compiling() and self.cache is None:
            assert_one_document(call)
            return self._attend(call, q, k, v, L)
        board: ForwardBoard = call.module.condense_board  # type: ignore[assignment]
        forward = board.forward_of(call, self.cache, self.layer_idx)
        S = k.shape[2]
        # the mask has a column for every slot; the cache of a layer with a sliding window holds the keys of the last S
        num_columns = 0 if call.mask is None else call.mask[..., :filled].shape[-1]
        keys = forward.padding(num_columns - S, S)
        queries = keys if S == L else forward.padding(num_columns - L, L)
        documents = forward.documents(plain=self.cache is None and call.mask is None)
        if documents is not None:
            refuse_cached_documents(call.module, self.cache, int(self.seen))
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
