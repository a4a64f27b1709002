"""FlexAttention over two sources: their keys side by side, and the blocks of them that each block of queries reads.

The condensed source is padded to whole blocks, so that no block holds keys of both sources.

Shapes: B rows, H query heads, K KV heads, L queries, M entries (P once padded), N tokens of the window,
D and Dv widths, n and m blocks of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Context
from condense.ops.tensors.right_aligned import per_entry

BLOCK = 128


def joined_keys(sources: Context) -> tuple[Tensor, Tensor]:
    """Keys ``[B, K, P + N, D]`` and values ``[B, K, P + N, Dv]``: entries, zeros, window."""
    pad = -sources.entries.k.shape[2] % BLOCK
    return (
        torch.cat([F.pad(sources.entries.k, (0, 0, 0, pad)), sources.window.k], dim=2),
        torch.cat([F.pad(sources.entries.v, (0, 0, 0, pad)), sources.window.v], dim=2),
    )


def block_mask(sources: Context, length: int) -> Any:
    """The visible keys of each of ``length`` queries, for spans that are the same in all heads and rows.

    Made from the spans of the first and last query of each block, so memory stays linear in L.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = sources.window.k.device
    M, N = sources.entries.k.shape[2], sources.window.k.shape[2]
    P = M + -M % BLOCK
    entries_span, window_span = sources.spans.at(0, length, device)
    ends_of_spans = (entries_span.hi, *window_span)
    if any(x.shape[:2] != (1, 1) for x in ends_of_spans):
        raise ValueError("FlexAttention with our mask is for spans that all heads and rows share")
    # queries that fill up the last block get the spans of the last query
    entries_hi, window_lo, window_hi = (
        torch.cat([x[0, 0], x[0, 0, -1:].expand(-length % BLOCK)]).to(torch.int32) for x in ends_of_spans
    )

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_window = (key - P >= window_lo[query]) & (key - P < window_hi[query])
        return torch.where(key < P, key < entries_hi[query], in_window)

    first, last = slice(0, None, BLOCK), slice(BLOCK - 1, None, BLOCK)
    entries = torch.arange(0, P, BLOCK, device=device)[None]
    columns = torch.arange(0, N, BLOCK, device=device)[None]
    ends = (columns + BLOCK).clamp(max=N)
    some = torch.cat(
        [entries < entries_hi[last, None], (columns < window_hi[last, None]) & (ends > window_lo[first, None])], dim=1
    )
    whole = torch.cat(
        [
            entries + BLOCK <= entries_hi[first, None],
            (columns >= window_lo[last, None]) & (columns + BLOCK <= window_hi[first, None]),
        ],
        dim=1,
    )
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, P + N)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks per query block, ``[1, 1, n]``, and their indices, first in ``[1, 1, n, m]``."""
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def flex_attention(sources: Context, length: int, *, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention of q ``[B, H, L, D]`` over `joined_keys`: a function of q, keys and values."""
    from torch.nn.attention import flex_attention as flex

    mask = block_mask(sources, length)
    score_mod = None
    bias = per_entry(sources.entries.bias, sources.entries.k.shape[2], sources.entries.k.device)
    if bias is not None:
        if bias.shape[:2] != (1, 1):
            raise ValueError("FlexAttention with our mask is for a bias that all heads and rows share")
        M, total = bias.shape[2], mask.seq_lengths[1]
        padded = F.pad(bias[0, 0].float(), (0, total - M))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + padded[key]

    # compiled for fixed shapes; the reset keeps guards of earlier lengths from being checked in every call
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return attend
