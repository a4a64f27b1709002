"""The definition: plain PyTorch, the whole mask at once, any device, made for float64 on the CPU.

Shapes: B rows, H query heads, K KV heads, L queries, M prefix entries, N band tokens, D and Dv widths,
G groups of c tokens, Q queries kept from before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.ops.bounds import Bounds


def visible(bounds: Bounds, start: int, stop: int, num_prefix: int, num_band: int, device: torch.device) -> Tensor:
    """Mask bool ``[B|1, K|1, L, M + N]`` of queries ``[start, stop)`` over prefix, then band."""
    rep_end, raw_start, raw_end = (x[..., None] for x in bounds.arrays(start, stop, device))
    entry = torch.arange(num_prefix, device=device)
    column = torch.arange(num_band, device=device)
    in_prefix = (entry < rep_end).expand(*raw_end.shape[:-1], num_prefix)
    return torch.cat([in_prefix, (column >= raw_start) & (column < raw_end)], dim=-1)


def attend(
    q: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    window_k: Tensor,
    window_v: Tensor,
    bounds: Bounds,
    *,
    scale: float,
    prefix_bias: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend`. Materialises ``[B, H, L, M + N]`` scores."""
    B, H, L, _ = q.shape
    K, M, N = window_k.shape[1], entries_k.shape[2], window_k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = torch.cat([entries_k, window_k], dim=2).to(wide)
    v = torch.cat([entries_v, window_v], dim=2).to(wide)
    mask = visible(bounds, 0, L, M, N, q.device)[:, :, None]
    empty = ~mask.any(-1, keepdim=True)
    # a query that sees nothing, whatever is in it, gets a harmless row here and is zeroed below: no NaN in values
    # or gradients
    q_BKRLD = q.to(wide).unflatten(1, (K, H // K)).masked_fill(empty, 0.0)
    scores = torch.einsum("bkrld,bksd->bkrls", q_BKRLD, k) * scale
    if prefix_bias is not None:
        bias = torch.nn.functional.pad(prefix_bias.to(wide), (0, N))
        scores = scores + bias[:, :, None, None, :]
    scores = scores.masked_fill(~(mask | empty), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout_p)
    out = torch.einsum("bkrls,bksd->bkrld", weights, v).masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty[..., 0], float("-inf"))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)
