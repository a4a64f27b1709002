"""Attention written out, for arms that the library has no method for and to look at why arms lose.

Each is ``attention(module, q, k, v, scale) -> out`` for `makes.replaced`, over whole sequences of one row.
Shapes: H query heads, K KV heads, R of H for each of K, L tokens, Q queries of a block, G groups of g tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[..., Tensor]
_EXACT, _ROUNDED = 128, 64  # KIVI: newest tokens that stay exact, tokens that share a channel's step


def _rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """x in ``bits`` bits between the smallest and the largest number along ``dim``."""
    low, high = x.amin(dim, keepdim=True).float(), x.amax(dim, keepdim=True).float()
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
    return (((x.float() - low) / step).round() * step + low).to(x.dtype)


def fewer_bits(bits: int, block: int = 128) -> Attention:
    """A dense cache in fewer bits: keys per channel over 64 tokens, values per token (KIVI, arXiv:2402.02750)."""

    def attention(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        L = q.shape[2]
        n = L // _ROUNDED * _ROUNDED
        k_low = _rounded(k[:, :, :n].unflatten(2, (-1, _ROUNDED)), bits, 3).flatten(2, 3)
        v_low, parts = _rounded(v, bits, 3), []
        for start in range(0, L, block):
            stop, old = min(L, start + block), max(0, start - _EXACT) // _ROUNDED * _ROUNDED
            keys = torch.cat([k_low[:, :, :old], k[:, :, old:stop]], 2)
            values = torch.cat([v_low[:, :, :old], v[:, :, old:stop]], 2)
            t = torch.arange(start, stop, device=q.device)[:, None]
            mask = torch.arange(stop, device=q.device)[None] <= t
            repeated = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
            parts.append(F.scaled_dot_product_attention(q[:, :, start:stop], *repeated, attn_mask=mask, scale=scale))
        return torch.cat(parts, 2)

    return attention


def bits_share(bits: int, length: int, width: int) -> float:
    """Bytes of `fewer_bits` as a share of a dense cache of 16 bits; steps and zeros are 16 bits each."""
    old = max(0, length - _EXACT) / length
    low = bits / 16 + (2 / _ROUNDED + 2 / width) / 2  # of keys, of values
    return old * low + 1 - old


def _choosing(shares: Tensor, closed: Tensor, num: int) -> Tensor:
    """Bool ``[K, Q, G]``: the ``num`` closed groups with the largest of the heads' shares ``[K, R, Q, G]``."""
    best = shares.amax(1).masked_fill(~closed, -1.0)
    chosen = best.topk(min(num, best.shape[2]), -1).indices
    return torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True) & closed


def _visible(open_groups: Tensor, closed: Tensor, group: int, t: Tensor, size: int) -> Tensor:
    """Bool ``[K, Q, size]``: tokens of open groups, and those up to t that no closed group holds."""
    shut = F.pad((closed & ~open_groups).repeat_interleave(group, -1), (0, size))[..., :size]
    return ~shut & (torch.arange(size, device=t.device) <= t[:, None])


def diagnosis(
    num: int, record: list[dict[str, Any]], group: int = 16, window: int = 256, queries: int = 96
) -> Attention:
    """Dense attention that also appends, per layer, what `num` open groups and the others' entries do to its output.

    Of queries in the second half, means over heads. far, closed, best: attention mass of closed groups, of those that
    the bounds of half groups leave unopened, and that the best choice leaves so. mass_*: what entries of the unopened
    weigh, as shares of the true total, with ln g (log), without bias (none), and what the index says of them (bounds,
    middles of the bounds). error_*: change of the output over its
    norm: with these entries, with entries that weigh exactly what their tokens do (exact), without any (drop), and
    with ln g where groups of the 64 tokens that draw most attention have no entry (log_without). strong_*: of these
    tokens the share of the far mass, and norms of key and value over the mean. spread: of scores within a group.
    """

    def attention(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        L, K, D = q.shape[2], k.shape[1], q.shape[3]
        s = D**-0.5 if scale is None else scale
        t = torch.linspace(L // 2, L - 1, queries, device=q.device).long()
        heads, keys, values = (q[0][:, t].unflatten(0, (K, -1)).float(), k[0].float(), v[0].float())
        scores = heads @ keys[:, None].mT * s
        scores.masked_fill_(torch.arange(L, device=q.device) > t[:, None], -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        p, G = (scores - total).exp(), (L - window) // group
        closed = torch.arange(G, device=q.device) < ((t + 1 - window) // group)[:, None]
        mass = p[..., : G * group].unflatten(-1, (G, group)).sum(-1) * closed
        halves = keys[:, : G * group].unflatten(1, (2 * G, group // 2))
        low, high = halves.amin(2)[:, None], halves.amax(2)[:, None]
        bounds = (heads.relu() @ high.mT + heads.clamp(max=0) @ low.mT).unflatten(-1, (G, 2)) * s
        middles = (heads @ ((low + high) / 2).mT).unflatten(-1, (G, 2)) * s
        bound = bounds.amax(-1)
        ranks = bound.masked_fill(~closed, -math.inf).softmax(-1)
        opened = _choosing(ranks, closed, num)
        shut = (closed & ~opened)[:, None]
        best = mass * ~_choosing(mass, closed, num)[:, None]
        mean_k, mean_v = (x[:, : G * group].unflatten(1, (G, group)).mean(2) for x in (keys, values))
        entry = ((heads @ mean_k[:, None].mT) * s - total).exp() * shut
        seen = _visible(opened, closed, group, t, L)[:, None]
        near, out = (p * seen), p @ values[:, None]
        drawn = (p * (torch.arange(L, device=q.device) < (t + 1 - window)[:, None])).sum((1, 2))  # [K, L]
        strong = drawn.topk(64, -1).indices
        holds = (
            torch.zeros(K, G, device=q.device).scatter_(1, (strong // group).clamp(max=G - 1), 1.0)[:, None, None] > 0
        )

        def error(weights: Tensor) -> float:
            changed = near @ values[:, None] + weights @ mean_v[:, None]
            changed = changed / (near.sum(-1, keepdim=True) + weights.sum(-1, keepdim=True))
            return float(((changed - out).norm(dim=-1) / out.norm(dim=-1)).mean())

        def norms(x: Tensor) -> float:
            norm = x.norm(dim=-1)
            return float((norm.gather(1, strong).mean(1) / norm.mean(1)).mean())

        inside = scores[..., : G * group].unflatten(-1, (G, group)).std(-1)
        weights = {"log": entry * group, "none": entry, "exact": mass * shut, "drop": entry * 0}
        guesses = {
            name: ((x - total[..., None]).exp().sum(-1) * shut).sum(-1) * group / 2
            for name, x in (("bounds", bounds), ("middles", middles))
        }
        record.append({
            "layer": int(module.layer_idx), "far": float(mass.sum(-1).mean()),  # type: ignore[arg-type]
            "closed": float((mass * shut).sum(-1).mean()), "best": float(best.sum(-1).mean()),
            **{f"mass_{name}": float(weights[name].sum(-1).mean()) for name in ("log", "none")},
            **{f"mass_{name}": float(guess.mean()) for name, guess in guesses.items()},
            **{f"error_{name}": error(value) for name, value in weights.items()},
            "error_log_without": error(entry * group * ~holds),
            "strong_share": float(drawn.gather(1, strong).sum() / drawn.sum()),
            "strong_key": norms(keys), "strong_value": norms(values), "key_norm": float(keys.norm(dim=-1).mean()),
            "spread": float(inside[closed.expand_as(inside)].mean()),
        })  # fmt: skip
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return attention
