"""Attention over a context by the definition, at the queries that are checked, in any dtype; and its gradients.

Which keys a query sees comes from the context's spans; which groups `condense.Recall` opens, from
`condense.testing.oracle_recall.choose`.

Shapes: B rows, H query heads, K KV heads, L queries, S checked queries, n keys that some of them sees, G groups of g
tokens, D and Dv widths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Context, Method, Recall
from condense.ops import Source
from condense.ops.tensors.bias import per_entry
from condense.testing import oracle_recall
from condense.testing.eager import masked_attention


class Checked(NamedTuple):
    """Checked queries ``[B, H, S, D]`` and, source by source, the keys and values that at least one of them sees.

    columns: for each source ``[first, stop)`` of these keys. mask ``[B|1, K|1, S, n]`` and bias ``[B|1, K|1, 1, n]``:
    over the keys of all sources, side by side. clear bool ``[B|1, H|1, S, 1]``: False where rounding decides which
    groups Recall opens.
    """

    q: Tensor
    sources: tuple[Source, ...]
    columns: list[tuple[int, int]]
    mask: Tensor
    bias: Tensor
    clear: Tensor

    def to(self, dtype: torch.dtype) -> Checked:
        """The same in another dtype."""
        sources = tuple(Source(x.k.to(dtype), x.v.to(dtype)) for x in self.sources)
        return self._replace(q=self.q.to(dtype), sources=sources, bias=self.bias.to(dtype))

    def output(self, scale: float) -> Tensor:
        """``[B, H, S, Dv]`` by plain operations in the dtype of q, one KV head at a time; 0 where it is not clear."""
        K = self.sources[-1].k.shape[1]
        outs = []
        for head, q in enumerate(self.q.chunk(K, dim=1)):
            heads = [(x.k[:, head, None], x.v[:, head, None]) for x in self.sources]
            k, v = (torch.cat(x, dim=2).expand(-1, q.shape[1], -1, -1) for x in zip(*heads, strict=True))
            mask, bias = (x[:, min(head, x.shape[1] - 1), None] for x in (self.mask, self.bias))
            # float32 uses PyTorch's fused attention, to have the error of its exp and of its order of sums
            outs.append(masked_attention(q, k, v, mask, bias, scale=scale, fused=q.dtype == torch.float32))
        return torch.cat(outs, dim=1) * self.clear

    def gradients(self, upstream: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Of q, then of keys and values of each source, for an output gradient ``[B, H, S, Dv]``."""
        with torch.enable_grad():
            q, *leaves = [x.detach().requires_grad_() for x in (self.q, *(x for s in self.sources for x in s[:2]))]
            sources = tuple(Source(k, v) for k, v in zip(leaves[::2], leaves[1::2], strict=True))
            out = self._replace(q=q, sources=sources).output(scale)
            return torch.autograd.grad(out, (q, *leaves), upstream.to(out.dtype))


def checked(q: Tensor, context: Context, start: int, *, scale: float, method: Method | None = None) -> Checked:
    """The queries from ``start`` on, q ``[B, H, L, D]``. method: for Recall, whose store becomes the second source."""
    hulls = [(int(lo), int(hi)) for lo, hi in context.spans.hulls([(start, q.shape[2])])[0]]
    spans = context.spans.at(start, q.shape[2], q.device)
    entries, window = context.sources
    if entries.k.shape[3] == 0:  # of a method that leaves them out and keeps none: zeros, which no query sees
        entries = Source(*(x.new_zeros(*entries.k.shape[:3], x.shape[3]) for x in window[:2]))
    sources, masks = [entries, window], []
    for (lo, hi), columns in zip(spans, hulls, strict=True):
        column = torch.arange(*columns, device=q.device)
        masks.append((column >= lo[..., None]) & (column < hi[..., None]))
    bias = per_entry(context.entries.bias, context.entries.k.shape[2], q.device)
    bias = q.new_zeros(1, 1, context.entries.k.shape[2], dtype=torch.float64) if bias is None else bias.double()
    bias = bias[:, :, None, slice(*hulls[0])]
    clear = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    if context.extra:
        assert isinstance(method, Recall)
        codes, grid, *store = context.extra
        index, closed = (codes[:, :, : hulls[0][1]], grid[:, :, : hulls[0][1]]), spans[0].hi
        opened, is_clear = oracle_recall.choose(method, q[:, :, start:], *index, closed, scale=scale)
        clear = is_clear.repeat_interleave(q.shape[1] // codes.shape[1], 1)[..., None]
        pooled = masks[0] & ~opened & (method.unchosen == "pool")
        masks = [
            pooled,
            opened.repeat_interleave(method.group_size, -1),
            masks[1].expand(*opened.shape[:2], -1, -1),
        ]
        sources.insert(1, Source(*oracle_recall.store(method, store, *entries[:2])))
        hulls.insert(1, (0, hulls[0][1] * method.group_size))
    mask = torch.cat(masks, dim=-1)
    bias = F.pad(bias, (0, mask.shape[3] - bias.shape[3]))
    narrow = tuple(Source(x.k[:, :, lo:hi], x.v[:, :, lo:hi]) for x, (lo, hi) in zip(sources, hulls, strict=True))
    return Checked(q[:, :, start:], narrow, hulls, mask, bias, clear)
