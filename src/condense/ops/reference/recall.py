"""The definition of Recall's attention: plain PyTorch, the whole mask at once, made for float64 on the CPU.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, N window tokens, D and Dv widths.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.recall.choice import Choice, RecallSources
from condense.ops.reference.attend import attend_masked
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
    G, N = entries.k.shape[2], window.k.shape[2]
    of_entries, of_window = spans.at(0, L, q.device)
    group, column = torch.arange(G, device=q.device), torch.arange(N, device=q.device)
    chosen = choice.at(0, L, of_entries.hi, G)
    pooled = (group < of_entries.hi[..., None]) & ~chosen & pool
    near = (column >= of_window.lo[..., None]) & (column < of_window.hi[..., None])
    opened = chosen.repeat_interleave(sources.group_size, -1) if G > 0 else chosen
    mask = torch.cat([pooled, opened, near.expand(*chosen.shape[:3], N)], dim=-1)[:, :, None]
    k, v = (torch.cat(parts, dim=2) for parts in ([entries.k, store.k, window.k], [entries.v, store.v, window.v]))
    bias = per_entry(entries.bias, G, q.device)
    bias = None if bias is None else F.pad(bias, (0, k.shape[2] - G))
    return attend_masked(q, k, v, mask, bias, scale=scale, softcap=softcap)
