"""What every backend is held to: loops over rows, KV heads and queries that follow the definitions word by word.

Nothing here knows how `condense` computes. Each query gets the explicit list of keys that it sees, representatives
and exact tokens, and one softmax over them. Differentiable, so that gradients can be compared too.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, D and Dv widths, g tokens per group, w window.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import oracle_dga
import torch
from torch import Tensor

import condense
from condense import CCA, DGA, LCA, Dense, LMInfinite, StreamingLLM


class Seen(NamedTuple):
    """What a query sees: groups by their number, exact tokens by their position."""

    groups: range
    exact: list[int]


def visible(method: Any, t: int) -> Seen:
    """What the query at position t of its row sees."""
    if method.name == "dense":
        return Seen(range(0), list(range(t + 1)))
    outside = max(0, t + 1 - method.window)
    if method.name in ("streaming_llm", "lm_infinite"):
        kept = method.sink if method.name == "streaming_llm" else method.n_global
        return Seen(range(0), list(range(min(kept, outside))) + list(range(outside, t + 1)))
    closed = outside // method.group_size
    return Seen(range(closed), list(range(closed * method.group_size, t + 1)))


def num_visible(method: Any, q: Tensor, k: Tensor, scale: float) -> list[int]:
    """Keys that each query of a row and KV head sees, representatives included. q ``[R, L, D]``, k ``[L, D]``."""
    L = len(k)
    seen = oracle_dga.Row(method, q, k, scale, L).sees if method.name == "dga" else partial(visible, method)
    return [sum(map(len, seen(t))) for t in range(L)]


def summary_positions(method: Any, j: int, prompt: int) -> range:
    """Positions of the queries whose mean weighs group j of a row that began with ``prompt`` tokens at once."""
    g = method.group_size
    if method.summary == "last":
        return range((j + 1) * g - 1, (j + 1) * g)
    count = method.num_summary_queries or g
    closing = (j + 1) * g + method.window
    # what closes after the prompt follows the streaming rule
    end = prompt if method.summary == "prompt" and closing <= prompt else closing
    return range(max(0, end - count), end)


def representative(
    method: Any, j: int, qbar: Tensor, k: Tensor, v: Tensor, scale: float, prompt: int | None = None
) -> tuple[Tensor, Tensor]:
    """Key ``[D]`` and value ``[Dv]`` of group j; qbar and k ``[L, D]``, v ``[L, Dv]``."""
    g = method.group_size
    members = range(j * g, (j + 1) * g)
    positions = summary_positions(method, j, len(k) if prompt is None else prompt)
    summary = torch.stack([qbar[i] for i in positions]).sum(0) / len(positions)
    scores = torch.stack([scale * (summary * k[i]).sum() for i in members])
    return _pool(k[members], scores, method.key_pooling), _pool(v[members], scores, method.value_pooling)


def _pool(x: Tensor, scores: Tensor, how: str) -> Tensor:
    if how == "weighted":
        weights = (scores - scores.max()).exp()
        return (weights[:, None] * x).sum(0) / weights.sum()
    if how == "mean":
        return x.sum(0) / len(x)
    if how == "max":
        return x.amax(0)
    best = max(scores.tolist())
    return x[scores.tolist().index(best)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Any,
    scale: float | None = None,
    padding: list[int] | None = None,
    cu_seqlens: list[int] | None = None,
    prompt: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`condense.attention` by definition, in float64: out ``[B, H, L, Dv]`` and lse ``[B, H, L]``.

    prompt: tokens that came at once, before the others (default: all); only the prompt summary cares.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, L, _ = q.shape
    R = H // k.shape[1]
    spans = [(b, 0 if padding is None else padding[b], L) for b in range(B)]
    if cu_seqlens is not None:
        spans = [(0, start, stop) for start, stop in itertools.pairwise(cu_seqlens)]
    outs, lses, at = [], [], []
    for b, start, stop in spans:
        for head in range(k.shape[1]):
            queries = q[b, head * R : (head + 1) * R, start:stop]
            compute = oracle_dga.row if method.name == "dga" else _row
            out, lse = compute(method, queries, k[b, head, start:stop], v[b, head, start:stop], scale, prompt)
            outs.extend(out)
            lses.extend(lse)
            at.extend((b, head, t) for t in range(start, stop))
    out = q.new_zeros(B, k.shape[1], L, R, v.shape[3])
    lse = q.new_full((B, k.shape[1], L, R), -math.inf)
    if at:
        index = tuple(torch.tensor(column) for column in zip(*at, strict=True))
        out = out.index_put(index, torch.stack(outs))
        lse = lse.index_put(index, torch.stack(lses))
    return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)


def _row(
    method: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, prompt: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    """One row and KV head. q ``[R, L, D]``, k ``[L, D]``, v ``[L, Dv]``; per query out ``[R, Dv]`` and lse ``[R]``."""
    qbar = q.sum(0) / len(q)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    outs, lses = [], []
    for t in range(len(k)):
        groups, exact = visible(method, t)
        for j in groups:
            if j not in made:
                made[j] = representative(method, j, qbar, k, v, scale, prompt)
        keys = torch.stack([made[j][0] for j in groups] + [k[i] for i in exact])
        values = torch.stack([made[j][1] for j in groups] + [v[i] for i in exact])
        logits = scale * q[:, t] @ keys.T
        if getattr(method, "rep_bias", "none") == "log_size":
            logits = logits + logits.new_tensor([math.log(method.group_size)] * len(groups) + [0.0] * len(exact))
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp()
        outs.append(weights @ values / weights.sum(-1, keepdim=True))
        lses.append(top[:, 0] + weights.sum(-1).log())
    return outs, lses


def eager(q: Tensor, k: Tensor, v: Tensor, *, method: Any, scale: float | None = None, fused: bool = False) -> Tensor:
    """The same formula as plain PyTorch in the dtype of the inputs: the yardstick of the error budgets.

    Representatives are pooled in float32 from summary queries in the inputs' dtype and rounded to that dtype once,
    as defined; scores, softmax and weighted sum are ordinary eager operations in that dtype, or one call of PyTorch's
    fused attention over all keys with the whole mask.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, L, D = q.shape
    K = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    qbar, wide_k, wide_v = q.unflatten(1, (K, H // K)).mean(2).to(wide), k.to(wide), v.to(wide)
    if method.name == "dga":
        seen, pooled = oracle_dga.seen_and_pooled(method, qbar, wide_k, wide_v, scale)
        M = len(pooled[0][0])
    else:
        seen = [visible(method, t) for t in range(L)]
        M = max(len(groups) for groups, _ in seen)
        pooled = [
            [[representative(method, j, qbar[b, h], wide_k[b, h], wide_v[b, h], scale) for j in range(M)]
             for h in range(K)]
            for b in range(B)
        ]  # fmt: skip
    keys, values = k, v
    if M:
        rep_k, rep_v = (
            torch.stack([torch.stack([torch.stack([rep[i] for rep in head]) for head in row]) for row in pooled])
            for i in (0, 1)
        )
        keys, values = torch.cat([rep_k.to(k.dtype), k], 2), torch.cat([rep_v.to(v.dtype), v], 2)
    mask = torch.zeros(L, M + L, dtype=torch.bool)
    for t, (groups, exact) in enumerate(seen):
        mask[t, list(groups)] = True
        mask[t, [M + i for i in exact]] = True
    mask = mask.to(q.device)
    bias = q.new_zeros(M + L)
    if getattr(method, "rep_bias", "none") == "log_size":
        bias[:M] = math.log(method.group_size)
    keys, values = (x.repeat_interleave(H // K, 1) for x in (keys, values))
    if fused:
        attn_mask = bias.expand(L, -1).masked_fill(~mask, -math.inf)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=attn_mask, scale=scale)
    scores = q @ keys.mT * scale + bias
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ values


def prefix_band(
    q: Tensor,
    entries_k: Tensor,
    entries_v: Tensor,
    window_k: Tensor,
    window_v: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefix-band attention by definition; bounds ``[B, K, L]`` each: rep_end, raw_start, raw_end."""
    B, H, L, _ = q.shape
    R = H // window_k.shape[1]
    out, lse = q.new_zeros(B, H, L, window_v.shape[3]), q.new_full((B, H, L), -math.inf)
    for b, h, t in itertools.product(range(B), range(H), range(L)):
        rep_end, raw_start, raw_end = (int(x[b, h // R, t]) for x in bounds)
        keys = torch.cat([entries_k[b, h // R, :rep_end], window_k[b, h // R, raw_start:raw_end]])
        values = torch.cat([entries_v[b, h // R, :rep_end], window_v[b, h // R, raw_start:raw_end]])
        if len(keys) == 0:
            continue
        logits = scale * keys @ q[b, h, t]
        if bias is not None:
            logits[:rep_end] += bias[b, h // R, :rep_end]
        lse[b, h, t] = logits.logsumexp(0)
        out[b, h, t] = logits.softmax(0) @ values
    return out, lse


def random_qkv(
    B: int, H: int, K: int, L: int, D: int, Dv: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, K, L, D), (B, K, L, Dv))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


POOLINGS = ("weighted", "mean", "max", "select")

# one per kind of plan and state: what most properties are checked on
PLANS: dict[str, condense.Method] = {
    "dense": Dense(),
    "streaming_llm": StreamingLLM(sink=3, window=7),
    "streaming_llm-no-sink": StreamingLLM(sink=0, window=5),
    "lm_infinite": LMInfinite(n_global=6, window=4),
    "cca": CCA(group_size=4, window=8),
    "cca-log_size": CCA(group_size=4, window=8, rep_bias="log_size"),
    "cca-window0": CCA(group_size=4, window=0),
    "cca-odd-window": CCA(group_size=4, window=5),
    "cca-g1": CCA(group_size=1, window=3),
    "cca-streaming": CCA(group_size=4, window=6, summary="streaming"),
    "cca-streaming-window0": CCA(group_size=5, window=0, summary="streaming"),
    "lca": LCA(group_size=4, window=8),
    "lca-log_size": LCA(group_size=5, window=3, rep_bias="log_size"),
    "lca-1-query": LCA(group_size=4, window=6, num_summary_queries=1),
    "lca-3-queries": LCA(group_size=4, window=6, num_summary_queries=3),
    "lca-9-queries": LCA(group_size=4, window=3, num_summary_queries=9),
    "lca-mean-max": LCA(group_size=4, window=6, key_pooling="mean", value_pooling="max"),
    "dga": DGA(group_size=4, gamma=0.3),
    "dga-window0": DGA(group_size=4, window=0, gamma=0.1),
    "dga-no-focal-log_size": DGA(group_size=5, window=5, gamma=0, rep_bias="log_size"),
    "dga-all-focal": DGA(group_size=3, gamma=1, weight_scale=1.0),
    "dga-streaming-log_size": DGA(group_size=4, window=5, gamma=0.3, summary="streaming", rep_bias="log_size"),
    "dga-streaming-window0": DGA(group_size=3, window=0, gamma=0.5, summary="streaming"),
    "dga-random": DGA(group_size=4, gamma=0.5, focal="random", seed=3),
}

PROMPTS: dict[str, condense.Method] = {
    "prompt": CCA(group_size=4, window=8, summary="prompt"),
    "prompt-select": LCA(group_size=4, window=5, summary="prompt", rep_bias="log_size"),
    "prompt-1-query": CCA(group_size=4, window=5, summary="prompt", num_summary_queries=1),
    "prompt-9-queries": CCA(group_size=4, window=0, summary="prompt", num_summary_queries=9),
    "prompt-1000-queries": CCA(group_size=4, window=3, summary="prompt", num_summary_queries=1000),
}

# DGA that selects over the whole prompt, and goes on as the rest of its settings say
SELECTIONS: dict[str, condense.Method] = {
    "select": DGA(group_size=4, gamma=0.2, min_focal=3, selection="prompt", num_recent=3, num_random=4),
    "select-log_size": DGA(
        group_size=3,
        window=0,
        gamma=0.3,
        min_focal=0,
        selection="prompt",
        summary="streaming",
        num_recent=1,
        num_random=9,
        seed=5,
        rep_bias="log_size",
    ),
    "select-no-focal": DGA(group_size=2, gamma=0, min_focal=0, selection="prompt", num_random=0, weight_scale=1.0),
    "select-random": DGA(group_size=4, window=5, gamma=0.5, min_focal=1, selection="prompt", focal="random", seed=2),
    "select-not-complementary": DGA(
        group_size=5, gamma=0.1, min_focal=4, selection="prompt", complementary=False, rep_bias="log_size"
    ),
    "select-all": DGA(group_size=4, selection="prompt", rep_bias="log_size"),
    "select-gamma1": DGA(group_size=4, gamma=1, min_focal=0, selection="prompt"),
}

GRID: dict[str, condense.Method] = {
    f"{summary}-{key}-{value}": CCA(group_size=4, window=5, summary=summary, key_pooling=key, value_pooling=value)
    for summary, key, value in itertools.product(("last", "streaming", "prompt"), POOLINGS, POOLINGS)
}
