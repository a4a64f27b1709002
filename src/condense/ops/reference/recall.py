"""The definition of Recall's attention: plain PyTorch, the whole mask at once, made for float64 on the CPU.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, N window tokens, D and Dv widths.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.extras import soft_cap
from condense.ops.recall.choice import Choice
from condense.ops.recall.sources import RecallSources
from condense.ops.tensors.bias import per_entry


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: Choice,
    *,
    scale: float,
    softcap: float,
    pool: bool,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `condense.ops.attend_recall`. pool: queries see the entries of closed groups that they do not open."""
    (entries, store, window, spans), L = sources, q.shape[2]
    K = window.k.shape[1]
    G, N = entries.k.shape[2], window.k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    of_entries, of_window = spans.at(0, L, q.device)
    group, column = torch.arange(G, device=q.device), torch.arange(N, device=q.device)
    chosen = choice.at(0, L, of_entries.hi, G)
    pooled = (group < of_entries.hi[..., None]) & ~chosen & pool
    near = (column >= of_window.lo[..., None]) & (column < of_window.hi[..., None])
    opened = chosen.repeat_interleave(sources.group_size, -1) if G > 0 else chosen
    mask = torch.cat([pooled, opened, near.expand(*chosen.shape[:3], N)], dim=-1)[:, :, None]
    empty = ~mask.any(-1, keepdim=True)
    k = torch.cat([entries.k, store.k, window.k], dim=2).to(wide)
    v = torch.cat([entries.v, store.v, window.v], dim=2).to(wide)
    # a query that sees nothing, which may hold NaN, is set to 0 and sees all keys here; its output is zeroed below
    rows = q.to(wide).unflatten(1, (K, -1)).masked_fill(empty, 0.0)
    scores = soft_cap(torch.einsum("bkrld,bksd->bkrls", rows, k) * scale, softcap)
    bias = per_entry(entries.bias, G, q.device)
    if bias is not None:
        scores = scores + F.pad(bias.to(wide), (0, k.shape[2] - G))[:, :, None, None]
    scores = scores.masked_fill(~(mask | empty), float("-inf"))
    out = torch.einsum("bkrls,bksd->bkrld", scores.softmax(-1), v).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)
