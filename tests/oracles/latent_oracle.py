"""Multi-head latent attention by definition: every key and value of every head expanded, loops over all else. Scores of
tokens are means over the heads of each head's own query on each head's own key.

Shapes: B rows, H heads, L tokens, d_c latent width, d_n, d_r, d_v widths of the head's parts.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from oracles import oracle, oracle_dga


class Latents(NamedTuple):
    q_nope: Tensor
    q_rope: Tensor
    c: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor


def random(B, H, L, widths, dtype=torch.float64, seed=0):
    """widths: d_n, d_r, d_c, d_v. Weights are scaled by ``d_c ** -0.5``, so keys and values are as large as latents."""
    d_n, d_r, d_c, d_v = widths
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [normal(*shape) for shape in ((B, H, L, d_n), (B, H, L, d_r), (B, L, d_c), (B, L, d_r))]
    tensors += [normal(H, d_c, width) * d_c**-0.5 for width in (d_n, d_v)]
    return Latents(*(x.to(dtype) for x in tensors))


def attention(x, *, method, scale=None, padding=None, cu_seqlens=None, prompt=None):
    """`condense.latent_attention` in float64: out ``[B, H, L, d_v]`` and lse ``[B, H, L]``; as `oracle.attention`."""
    x = Latents(*(tensor.double() for tensor in x))
    B, H, L, d_n = x.q_nope.shape
    scale = (d_n + x.q_rope.shape[3]) ** -0.5 if scale is None else scale
    at, outs, lses, q = [], [], [], torch.cat([x.q_nope, x.q_rope], -1)
    for b, start, stop in oracle.texts(B, L, padding, cu_seqlens):
        if start < stop:
            row = q[b, :, start:stop], x.c[b, start:stop], x.k_rope[b, start:stop]
            for t, (out, lse) in enumerate(_row(method, *row, x.w_uk, x.w_uv, scale, prompt), start):
                at.append((b, t))
                outs.append(out)
                lses.append(lse)
    out = oracle.placed(x.q_nope.new_zeros(B, L, H, x.w_uv.shape[2]), at, outs)
    return out.transpose(1, 2), oracle.placed(x.q_nope.new_full((B, L, H), -math.inf), at, lses).transpose(1, 2)


def _key(c, k_rope, w_uk):
    return torch.stack([torch.cat([c @ w, k_rope]) for w in w_uk])


def _expand(c, k_rope, w_uk, w_uv):
    return _key(c, k_rope, w_uk), torch.stack([c @ w for w in w_uv])


def _row(method, q, c, k_rope, w_uk, w_uv, scale, prompt):
    """Out ``[H, d_v]`` and lse ``[H]`` of each query; q ``[H, L, d_n + d_r]``, c ``[L, d_c]``, k_rope ``[L, d_r]``."""
    (H, L, _), d_c, made, results = q.shape, c.shape[1], {}, []
    own = [(*_expand(c[i], k_rope[i], w_uk, w_uv), c.new_zeros(())) for i in range(L)]
    # the heads' queries and keys side by side: one product is the mean over heads of each head's own score
    queries, keys = q.transpose(0, 1).flatten(1)[None] / H, torch.stack([key.flatten() for key, *_ in own])
    dga = oracle_dga.Row(method, queries, keys, scale, prompt=0) if method.name == "dga" else None
    for t in range(L):
        if dga is not None:
            exact, parts = dga.sees(t)
            groups = [tuple(members) for members, _ in parts]
            for group, (members, weights) in zip(groups, parts, strict=True):
                if group not in made:
                    expanded = _expand(weights @ c[members], weights @ k_rope[members], w_uk, w_uv)
                    made[group] = *expanded, oracle_dga.group_bias(method, weights)
        else:
            groups, exact = oracle.visible(method, t)
            for j in groups:
                if j not in made:
                    positions = oracle.summary_positions(method, j, L if prompt is None else prompt)
                    summary = q[:, list(positions)].mean(1)
                    pooled = representative(method, j, summary, c, k_rope, w_uk, scale)
                    members = keys[j * method.group_size : (j + 1) * method.group_size]
                    entry = _key(*pooled, w_uk).flatten()
                    bias = oracle.entry_bias(method, summary.flatten() / H, members, entry, scale)
                    # as queries see it: rounded as the one vector that a cache keeps
                    whole = oracle.rounded(torch.cat(pooled), getattr(method, "entry_bits", 16))
                    made[j] = *_expand(whole[:d_c], whole[d_c:], w_uk, w_uv), bias
        seen = [made[j] for j in groups] + [own[i] for i in exact]
        seen_k, seen_v, biases = zip(*seen, strict=True)
        logits = scale * (q[:, t, None] * torch.stack(seen_k, 1)).sum(-1) + torch.stack(biases)
        weights = logits.softmax(-1)
        results.append(((weights[..., None] * torch.stack(seen_v, 1)).sum(1), logits.logsumexp(-1)))
    return results


def representative(method, j, summary, c, k_rope, w_uk, scale):
    """Latent ``[d_c]`` and rope key ``[d_r]`` of group j; summary ``[H, d_n + d_r]``: one query per head."""
    c, k_rope = (x[j * method.group_size : (j + 1) * method.group_size] for x in (c, k_rope))
    keys = (_key(*token, w_uk) for token in zip(c, k_rope, strict=True))
    scores = torch.stack([scale * (summary * key).sum(-1).mean() for key in keys])
    return oracle.pool(c, scores, method.value_pooling), oracle.pool(k_rope, scores, method.key_pooling)
