"""The definitions as loops over rows, KV heads and queries: each query gets an explicit list of the keys that it sees,
entries and exact tokens, and one softmax over them. Differentiable.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, D and Dv widths, g tokens per group, w window.
"""

import itertools
import math
from functools import partial

import torch

from oracles import oracle_dga, oracle_recall


def visible(method, t):
    """The keys that the query at position t of its row sees: groups by their number, exact tokens by their position."""
    if method.name == "dense":
        return range(0), list(range(t + 1))
    outside = max(0, t + 1 - method.window)
    if method.name in ("streaming_llm", "lm_infinite"):
        kept = method.sink if method.name == "streaming_llm" else method.n_global
        return range(0), [*range(min(kept, outside)), *range(outside, t + 1)]
    closed = outside // method.group_size
    return range(closed), [*range(closed * method.group_size, t + 1)]


def num_visible(method, q, k, scale):
    """Number of entries and tokens that each query of a row and KV head sees. q ``[R, L, D]``, k ``[L, D]``."""
    L = len(k)
    sees = oracle_dga.Row(method, q, k, scale, L).sees if method.name == "dga" else partial(visible, method)
    return [sum(map(len, sees(t))) for t in range(L)]


def summary_positions(method, j, prompt):
    """Positions of the queries whose mean weighs group j of a row that began with ``prompt`` tokens at once."""
    g = method.group_size
    if method.summary == "last":
        return range((j + 1) * g - 1, (j + 1) * g)
    count = method.num_summary_queries or g
    closing = (j + 1) * g + method.window
    # groups that close after the prompt follow the streaming rule
    end = prompt if method.summary == "prompt" and closing <= prompt else closing
    return range(max(0, end - count), end)


def entry(method, j, qbar, k, v, scale, prompt=None):
    """Key ``[D]``, value ``[Dv]`` and bias of group j; qbar and k ``[L, D]``, v ``[L, Dv]``; prompt: None for all L."""
    k, v = (x[j * method.group_size : (j + 1) * method.group_size] for x in (k, v))
    positions = summary_positions(method, j, len(qbar) if prompt is None else prompt)
    summary = torch.stack([qbar[i] for i in positions]).sum(0) / len(positions)
    scores = torch.stack([scale * (summary * key).sum() for key in k])
    key = pool(k, scores, method.key_pooling)
    return key, pool(v, scores, method.value_pooling), entry_bias(method, summary, k, key, scale)


def entry_bias(method, summary, keys, entry, scale):
    """A matched one is that by which the entry weighs for ``summary`` ``[D]`` what ``keys`` weigh together."""
    if method.rep_bias != "matched":
        return entry.new_tensor(math.log(method.group_size) if method.rep_bias == "log_size" else 0.0)
    return torch.stack([scale * ((key - entry) * summary).sum() for key in keys]).exp().sum().log()


def rounded(x, bits):
    """The vector x ``[width]`` as an entry of 8 or 4 bits holds it; gradients as if it were x."""
    if bits == 16:
        return x
    parts = []
    for block in x.detach().split(32):
        lowest, levels = block.min(), 2**bits - 1
        # 8 significant bits, and never so few that the largest number is out of reach
        step = ((block.max() - lowest) * (1 + 2**-7) / levels).to(torch.bfloat16).to(x.dtype)
        parts.append(lowest + step * ((block - lowest) / step.clamp(min=1e-30) + 0.5).floor())
    return x + (torch.cat(parts) - x.detach())


def pool(x, scores, how):
    """Rows of x ``[g, width]`` as one, ``[width]``, by a pooling's name; scores ``[g]``."""
    if how == "weighted":
        weights = (scores - scores.max()).exp()
        return (weights[:, None] * x).sum(0) / weights.sum()
    if how == "mean":
        return x.sum(0) / len(x)
    if how == "max":
        return x.amax(0)
    best = max(scores.tolist())
    return x[scores.tolist().index(best)]


def attention(q, k, v, *, method, scale=None, padding=None, cu_seqlens=None, prompt=None):
    """`condense.attention` in float64: out ``[B, H, L, Dv]``, lse ``[B, H, L]``. prompt: tokens that came at once."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, L, _ = q.shape
    R, outs, lses, at = H // k.shape[1], [], [], []
    seen_keys = {"dga": oracle_dga.seen_keys, "recall": oracle_recall.seen_keys}.get(method.name, _seen_keys)
    for b, start, stop in texts(B, L, padding, cu_seqlens):
        for head in range(k.shape[1]):
            queries = q[b, head * R : (head + 1) * R, start:stop]
            row = seen_keys(method, queries, k[b, head, start:stop], v[b, head, start:stop], scale, prompt)
            for t, seen in enumerate(row):
                keys, values = (torch.stack([each[i] for each in seen]) for i in range(2))
                logits = scale * queries[:, t] @ keys.T + torch.stack([bias.expand(R) for *_, bias in seen], 1)
                outs.append(logits.softmax(-1) @ values)
                lses.append(logits.logsumexp(-1))
                at.append((b, head, start + t))
    out = placed(q.new_zeros(B, k.shape[1], L, R, v.shape[3]), at, outs)
    lse = placed(q.new_full((B, k.shape[1], L, R), -math.inf), at, lses)
    return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)


def texts(B, L, padding, cu_seqlens):
    if cu_seqlens is not None:
        return [(0, start, stop) for start, stop in itertools.pairwise(cu_seqlens)]
    return [(b, 0 if padding is None else padding[b], L) for b in range(B)]


def placed(x, at, parts):
    return x.index_put(tuple(torch.tensor(at).T), torch.stack(parts)) if at else x


def _seen_keys(method, q, k, v, scale, prompt):
    """For each query of one row and KV head a list of what it sees: key, value, bias. q ``[R, L, D]``, k ``[L, D]``."""
    qbar, made = q.sum(0) / len(q), {}
    for t in range(len(k)):
        groups, exact = visible(method, t)
        for j in groups:
            if j not in made:
                *pooled, bias = entry(method, j, qbar, k, v, scale, prompt)
                made[j] = *(rounded(x, getattr(method, "entry_bits", 16)) for x in pooled), bias
        yield [made[j] for j in groups] + [(k[i], v[i], k.new_zeros(())) for i in exact]


def entries_and_window(q, entries_k, entries_v, window_k, window_v, bounds, *, scale, bias=None):
    """By definition; bounds ``[B, K, L]`` each: a query sees entries ``[0, bounds[0])`` and tokens ``bounds[1:3]``."""
    B, H, L, _ = q.shape
    R, M = H // window_k.shape[1], entries_k.shape[2]
    out, lse = q.new_zeros(B, H, L, window_v.shape[3]), q.new_full((B, H, L), -math.inf)
    k, v = torch.cat([entries_k, window_k], 2), torch.cat([entries_v, window_v], 2)
    for b, h, t in itertools.product(range(B), range(H), range(L)):
        num_entries, lo, hi = (int(x[b, h // R, t]) for x in bounds)
        seen = [*range(num_entries), *range(M + lo, M + hi)]
        if seen:
            logits = scale * k[b, h // R, seen] @ q[b, h, t]
            if bias is not None:
                logits[:num_entries] += bias[b, h // R, :num_entries]
            lse[b, h, t] = logits.logsumexp(0)
            out[b, h, t] = logits.softmax(0) @ v[b, h // R, seen]
    return out, lse


def random_qkv(B, H, K, L, D, Dv, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, K, L, D), (B, K, L, Dv))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v
