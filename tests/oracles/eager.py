"""The definitions as plain PyTorch in the dtype of the inputs: error budgets are multiples of its error.

Shapes: B rows, H query heads, K KV heads, L tokens, M entries, D and Dv widths.
"""

import math

import torch

from oracles import oracle, oracle_dga


def eager_attention(q, k, v, *, method):
    """`oracle.attention` without padding, in the dtype of the inputs; out ``[B, H, L, Dv]``.

    Entries are pooled in float32 from summary queries in the inputs' dtype and rounded to that dtype once,
    as defined; scores, softmax and weighted sum are ordinary eager operations in that dtype.
    """
    (B, H, L, D), K = q.shape, k.shape[1]
    scale = D**-0.5
    wide = torch.promote_types(q.dtype, torch.float32)
    qbar, wide_k, wide_v = q.unflatten(1, (K, H // K)).mean(2).to(wide), k.to(wide), v.to(wide)
    if method.name == "dga":
        seen, pooled = oracle_dga.seen_and_pooled(method, qbar, wide_k, wide_v, scale)
    else:
        seen = [oracle.visible(method, t) for t in range(L)]
        heads = list(zip(*(x.flatten(0, 1) for x in (qbar, wide_k, wide_v)), strict=True))
        pooled = [oracle.representative(method, j, *head, scale) for head in heads for j in seen[-1].groups]
    keys, values, M = k, v, len(pooled) // (B * K)
    if M:
        entries_k, entries_v = (torch.stack(x).unflatten(0, (B, K, M)) for x in zip(*pooled, strict=True))
        keys, values = torch.cat([entries_k.to(k.dtype), k], 2), torch.cat([entries_v.to(v.dtype), v], 2)
    mask = torch.zeros(L, M + L, dtype=torch.bool)
    for t, (groups, exact) in enumerate(seen):
        mask[t, list(groups)] = True
        mask[t, [M + i for i in exact]] = True
    bias = q.new_zeros(M + L)
    if getattr(method, "rep_bias", "none") == "log_size":
        bias[:M] = math.log(method.group_size)
    keys, values = (x.repeat_interleave(H // K, 1) for x in (keys, values))
    scores = q @ keys.mT * scale + bias
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ values
