"""The definitions as loops over rows, KV heads and queries, with which every backend is compared.

Independent of the library's code: each query gets an explicit list of the keys that it sees, entries and exact tokens,
and one softmax over them. Differentiable, so that gradients can be compared too.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, D and Dv widths, g tokens per group, w window.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from oracles import oracle_dga, oracle_recall


class Seen(NamedTuple):
    """The keys that a query sees: groups by their number, exact tokens by their position."""

    groups: range
    exact: list[int]


def visible(method, t):
    """The keys that the query at position t of its row sees."""
    if method.name == "dense":
        return Seen(range(0), list(range(t + 1)))
    outside = max(0, t + 1 - method.window)
    if method.name in ("streaming_llm", "lm_infinite"):
        kept = method.sink if method.name == "streaming_llm" else method.n_global
        return Seen(range(0), list(range(min(kept, outside))) + list(range(outside, t + 1)))
    closed = outside // method.group_size
    return Seen(range(closed), list(range(closed * method.group_size, t + 1)))


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


def summary_query(method, j, qbar, prompt):
    """The mean query ``[D]`` that weighs group j; qbar ``[L, D]``; prompt: None if all tokens came at once."""
    positions = summary_positions(method, j, len(qbar) if prompt is None else prompt)
    return torch.stack([qbar[i] for i in positions]).sum(0) / len(positions)


def representative(method, j, qbar, k, v, scale, prompt=None):
    """Key ``[D]`` and value ``[Dv]`` of group j; qbar and k ``[L, D]``, v ``[L, Dv]``."""
    g = method.group_size
    members, summary = range(j * g, (j + 1) * g), summary_query(method, j, qbar, prompt)
    scores = torch.stack([scale * (summary * k[i]).sum() for i in members])
    return pool(k[members], scores, method.key_pooling), pool(v[members], scores, method.value_pooling)


def rounded_entry(method, entry):
    """A key and value as queries see them, in the method's ``entry_bits``."""
    bits = getattr(method, "entry_bits", 16)
    return rounded(entry[0], bits), rounded(entry[1], bits)


def entry_bias(method, j, entry, qbar, k, scale, prompt=None):
    """The bias added to the scaled score of group j's entry, whose key is ``entry`` ``[D]``; others as above."""
    g = method.group_size
    if method.rep_bias != "matched":
        return k.new_tensor(math.log(g) if method.rep_bias == "log_size" else 0.0)
    return match(summary_query(method, j, qbar, prompt), k[j * g : (j + 1) * g], entry, scale)


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


def match(summary, keys, entry, scale):
    """The bias by which ``entry`` ``[D]`` weighs for ``summary`` ``[D]`` what the keys ``[g, D]`` weigh together."""
    return torch.stack([scale * ((key - entry) * summary).sum() for key in keys]).exp().sum().log()


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
    """`condense.attention` by definition, in float64: out ``[B, H, L, Dv]`` and lse ``[B, H, L]``.

    prompt: tokens that came at once, before the others (default: all); matters only for summary="prompt".
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, L, _ = q.shape
    R, outs, lses, at = H // k.shape[1], [], [], []
    compute = {"dga": oracle_dga.row, "recall": _recall_row}.get(method.name, _row)
    for b, start, stop in texts(B, L, padding, cu_seqlens):
        for head in range(k.shape[1]):
            queries = q[b, head * R : (head + 1) * R, start:stop]
            parts = compute(method, queries, k[b, head, start:stop], v[b, head, start:stop], scale, prompt)
            outs.extend(parts[0])
            lses.extend(parts[1])
            at.extend((b, head, t) for t in range(start, stop))
    out = placed(q.new_zeros(B, k.shape[1], L, R, v.shape[3]), at, outs)
    lse = placed(q.new_full((B, k.shape[1], L, R), -math.inf), at, lses)
    return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)


def texts(B, L, padding, cu_seqlens):
    """Row, start and stop of each text: of padded rows or of packed documents."""
    if cu_seqlens is not None:
        return [(0, start, stop) for start, stop in itertools.pairwise(cu_seqlens)]
    return [(b, 0 if padding is None else padding[b], L) for b in range(B)]


def placed(x, at, parts):
    """The tensor with each part at its place, a tuple of numbers."""
    return x.index_put(tuple(torch.tensor(at).T), torch.stack(parts)) if at else x


def _row(method, q, k, v, scale, prompt):
    """One row and KV head. q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``; per query out ``[R, Dv]`` and lse ``[R]``."""
    qbar = q.sum(0) / len(q)
    made, biases, outs, lses = {}, {}, [], []
    for t in range(len(k)):
        groups, exact = visible(method, t)
        for j in groups:
            if j not in made:
                pooled = representative(method, j, qbar, k, v, scale, prompt)
                biases[j] = entry_bias(method, j, pooled[0], qbar, k, scale, prompt)
                made[j] = rounded_entry(method, pooled)
        keys = torch.stack([made[j][0] for j in groups] + [k[i] for i in exact])
        values = torch.stack([made[j][1] for j in groups] + [v[i] for i in exact])
        logits = scale * q[:, t] @ keys.T
        if groups:
            logits = logits + torch.cat([torch.stack([biases[j] for j in groups]), logits.new_zeros(len(exact))])
        outs.append(logits.softmax(-1) @ values)
        lses.append(logits.logsumexp(-1))
    return outs, lses


def _recall_row(method, q, k, v, scale, prompt):
    """As `_row`; what came at once makes no difference."""
    g = method.group_size

    def entry(j):
        members = slice(j * g, (j + 1) * g)
        return *rounded_entry(method, (k[members].sum(0) / g, v[members].sum(0) / g)), math.log(g)

    return oracle_recall.row(method, q, k, v, scale, entry)


def pooled_groups(method, qbar, k, v, scale, groups):
    """Per row, head and group key and value."""

    def entry(b, h, j):
        return rounded_entry(method, representative(method, j, qbar[b, h], k[b, h], v[b, h], scale))

    return [[[entry(b, h, j) for j in groups] for h in range(k.shape[1])] for b in range(len(k))]


def stacked(pooled, part):
    """Keys (part 0) or values (part 1), ``[B, K, M, width]``."""
    return torch.stack([torch.stack([torch.stack([pair[part] for pair in head]) for head in row]) for row in pooled])


def entries_and_window(q, entries_k, entries_v, window_k, window_v, bounds, *, scale, bias=None):
    """Attention over entries and window by definition.

    bounds ``[B, K, L]`` each: a query sees entries ``[0, bounds[0])`` and window tokens ``[bounds[1], bounds[2])``.
    """
    B, H, L, _ = q.shape
    R = H // window_k.shape[1]
    out, lse = q.new_zeros(B, H, L, window_v.shape[3]), q.new_full((B, H, L), -math.inf)
    for b, h, t in itertools.product(range(B), range(H), range(L)):
        num_entries, lo, hi = (int(x[b, h // R, t]) for x in bounds)
        keys = torch.cat([entries_k[b, h // R, :num_entries], window_k[b, h // R, lo:hi]])
        values = torch.cat([entries_v[b, h // R, :num_entries], window_v[b, h // R, lo:hi]])
        if len(keys) == 0:
            continue
        logits = scale * keys @ q[b, h, t]
        if bias is not None:
            logits[:num_entries] += bias[b, h // R, :num_entries]
        lse[b, h, t] = logits.logsumexp(0)
        out[b, h, t] = logits.softmax(0) @ values
    return out, lse


def random_qkv(B, H, K, L, D, Dv, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, K, L, D), (B, K, L, Dv))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v
