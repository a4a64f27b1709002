"""FlexAttention over two sources: their keys side by side, under a mask of what each query sees.

The condensed source is padded to whole blocks, so that no block holds keys of both sources.

Shapes: B rows, H query heads, K KV heads, L queries, M entries (P once padded), N tokens of the window,
D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Context
from condense.ops.tensors.bias import per_entry

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

    Compiled, so that no mask of all queries and keys stands in memory.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    M, N = sources.entries.k.shape[2], sources.window.k.shape[2]
    P = M + -M % BLOCK
    spans = sources.spans.at(0, length, sources.window.k.device)
    if any(x.shape[:2] != (1, 1) for span in spans for x in span):
        raise ValueError("FlexAttention with our mask is for spans that all heads and rows share")
    (_, entries_hi), (window_lo, window_hi) = ((x[0, 0].to(torch.int32) for x in span) for span in spans)

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_window = (key - P >= window_lo[query]) & (key - P < window_hi[query])
        return torch.where(key < P, key < entries_hi[query], in_window)

    create = torch.compile(create_block_mask)
    return create(mask_mod, None, None, length, P + N, device=str(window_lo.device), BLOCK_SIZE=BLOCK)


def flex_attention(sources: Context, length: int, *, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention of q ``[B, H, L, D]`` over `joined_keys`: a function of q, keys and values."""
    from torch.nn.attention import flex_attention as flex

    # compiled for fixed shapes; the reset keeps guards of earlier lengths from being checked in every call
    torch.compiler.reset()
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

    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return attend
