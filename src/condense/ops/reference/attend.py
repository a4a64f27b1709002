"""The definition of attention: plain PyTorch, the whole mask at once, any device, made for float64 on the CPU.

Shapes: B rows, H query heads, K KV heads, L queries, N entries of one source, S of all sources, D and Dv widths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from condense.ops.extras import soft_cap
from condense.ops.spans import Source, Spans
from condense.ops.tensors.bias import joined_bias


def visible(spans: Spans, start: int, stop: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Mask bool ``[B|1, K|1, L, S]`` of queries ``[start, stop)`` over all sources, of ``sizes`` entries each."""
    masks = []
    for (lo, hi), size in zip(spans.at(start, stop, device), sizes, strict=True):
        entry = torch.arange(size, device=device)
        masks.append((entry >= lo[..., None]) & (entry < hi[..., None]))
    rows, heads = (max(mask.shape[dim] for mask in masks) for dim in (0, 1))
    return torch.cat([mask.expand(rows, heads, -1, -1) for mask in masks], dim=-1)


def attend(
    q: Tensor,
    sources: Sequence[Source],
    spans: Spans,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout_p: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `condense.ops.attend`. Materialises ``[B, H, L, S]`` scores."""
    sizes = [source.k.shape[2] for source in sources]
    k, v = torch.cat([source.k for source in sources], dim=2), torch.cat([source.v for source in sources], dim=2)
    mask = visible(spans, 0, q.shape[2], sizes, q.device)[:, :, None]
    bias = joined_bias([source.bias for source in sources], sizes, q.device)
    out, lse = attend_masked(q, k, v, mask, bias, scale=scale, softcap=softcap, dropout_p=dropout_p)
    return out, lse if return_lse else None


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries over keys k and values v of all sources, where mask ``[B|1, K|1, 1, L, S]``.

    bias: ``[B|1, K|1, S]``, None for none. A query that sees nothing gives 0 and -inf.
    """
    K, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    empty = ~mask.any(-1, keepdim=True)
    # a query that sees nothing, which may hold NaN, is set to 0 and sees all keys here; its output is zeroed below
    q_BKRLD = q.to(wide).unflatten(1, (K, -1)).masked_fill(empty, 0.0)
    scores = soft_cap(torch.einsum("bkrld,bksd->bkrls", q_BKRLD, k.to(wide)) * scale, softcap)
    if bias is not None:
        scores = scores + bias.to(wide)[:, :, None, None, :]
    scores = scores.masked_fill(~(mask | empty), float("-inf"))
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
    out = torch.einsum("bkrls,bksd->bkrld", weights, v.to(wide)).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)
