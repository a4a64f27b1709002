"""Ways to choose the groups that queries open, in plain PyTorch, over the library's attention: which index is best.

Each chooser is an ``attention(module, q, k, v, scale) -> out`` for `makes.replaced`; groups that it leaves are dropped.
Shapes: H query heads, K KV heads, C heads that choose, R query heads for each, L tokens, Q queries of a block, G groups
of g tokens, D width of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.ops import RuleSpans, Source, UniformRule, attend_recall
from condense.ops.recall import ArrayChoice, RecallSources

Scores = Callable[[Tensor, int], Tensor]
_BLOCK = 512  # queries whose scores are held at a time


@dataclass(frozen=True)
class Index:
    """What a chooser knows of keys: of blocks of ``size`` tokens the bounds in ``bits`` (size 1: the keys themselves).

    bits 16 and size 1: the keys as they are, so the choice is by true attention mass; fewer bits and size 1: rotated
    keys (a fixed Hadamard rotation with random signs), one step per token. Larger sizes: per channel the smallest and
    the largest key of a block, as Quest has them, in fewer bits on a grid per group.
    centred: fewer bits hold the difference of a key from its group's mean, which is kept in 8 bits.
    """

    size: int
    bits: int
    centred: bool = False

    def nbytes(self, width: int, group: int) -> float:
        """Per KV head and group."""
        if self.size == 1:
            mean = width + 2 if self.centred else 0
            return group * (width * self.bits / 8 + (0 if self.bits == 16 else 2)) + mean
        return group // self.size * 2 * width * self.bits / 8 + (0 if self.bits == 16 else 8)


TRUE, KEYS = Index(1, 16), Index(1, 4)
OPENED: dict[Chooser, list[Tensor]] = {}  # per layer and text, the share of closed groups that was opened


@dataclass(frozen=True)
class Chooser:
    """Open ``num`` of the closed groups by an index; the others are dropped.

    least: open only as many of them, up to ``num``, as leave at most this share of any head's attention closed, by the
    index (with ``near``).
    rest: the others are not dropped but seen as their mean value, with the weight that the index says.
    then: the store's own keys (`KEYS`), by which ``num`` of ``factor * num`` groups that the index finds are chosen.
    per_head: each query head opens groups of its own. together: how heads that share a choice join their shares, "max"
    or "sum".
    near: shares are of all attention, that on the window included, so that heads which look near have less to say;
    else of the closed groups alone, as the library's are.
    """

    num: int
    index: Index
    then: Index | None = None
    factor: int = 4
    per_head: bool = False
    together: str = "max"
    near: bool = False
    least: float = 0.0
    rest: bool = False
    group: int = 16
    window: int = 256

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        L = q.shape[2]
        G = max(0, L - self.window) // self.group
        queries, keys = seen_by_index(module, q, k)
        if self.per_head:
            k, v, keys = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v, keys))
        if not G:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        means = v[0, :, : G * self.group].unflatten(1, (G, self.group)).mean(2).float() if self.rest else None
        chosen, rest = choose(self, queries[0], keys[0], scale, G, means)
        late = torch.arange(L // 2, L, device=q.device)
        closed = ((late + 1 - self.window) // self.group).clamp(0, G).sum()
        OPENED.setdefault(self, []).append(chosen[:, L // 2 :].sum((1, 2)).float().mean() / closed)
        out, lse = attended(q, k, v, scale, chosen[None], self.group, self.window)
        if rest is None:
            return out
        total = torch.logaddexp(lse, rest[1][None])
        mixed = out.float() * (lse - total).exp()[..., None] + rest[0][None] * (rest[1][None] - total).exp()[..., None]
        return mixed.to(out.dtype)

    def costs(self, length: int, width: int, value_width: int, heads: int) -> dict[str, float]:
        """Shares of a dense cache of 16 bits: kept on the device with tokens in 4 bits there or in host memory (then
        with a slot for each open group), and read by a step. heads: query heads for each KV head.

        Values of width 0 are part of the keys, as of latents.
        """
        G, g = (length - self.window) // self.group, self.group
        dense, exact = 2.0 * length * (width + value_width), 2.0 * self.window * (width + value_width)
        num = float(sum(OPENED[self]) / len(OPENED[self])) * G if self.least else self.num
        stages = [stage for stage in (self.index, self.then) if stage is not None and stage != TRUE]
        # 4 bits: keys rotated if they are an index too, else with a step and a zero per channel of a group; values with
        # a step and a zero per token; each of 16 bits
        steps = 2 if KEYS in stages else 4 * width / g
        token = width / 2 + steps + (value_width / 2 + 4 if value_width else 0)
        index = stages[0].nbytes(width, g) if stages else 0.0
        beside = 0.0 if stages[:1] == [KEYS] else index  # the store's own keys cost nothing more
        index += (value_width or width) / 2 + 2 if self.rest else 0  # mean values in 4 bits
        again = min(G, self.factor * num) * KEYS.nbytes(width, g) if len(stages) > 1 else 0.0
        opened = num * g * token * (heads if self.per_head else 1)
        return {
            "device": (G * (beside + g * token) + exact) / dense,
            "host_store": (G * index + opened + exact) / dense,
            "read": (G * index + again + opened + exact) / dense,
        }


def seen_by_index(module: torch.nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys as an index sees them: of models with latents (``module.latents`` is set by `keep_latents`)
    absorbed queries ``[1, H, L, d_c + d_r]`` and one head of latents and rotary keys.
    """
    latents = getattr(module, "latents", None)
    if latents is None:
        return q, k
    nope: int = module.qk_nope_head_dim  # type: ignore[assignment]
    up = module.kv_b_proj.weight.unflatten(0, (q.shape[1], -1))[:, :nope]  # type: ignore[union-attr, operator]
    absorbed = torch.einsum("bhld,hdc->bhlc", q[..., :nope].float(), up.float()).to(q.dtype)
    return torch.cat([absorbed, q[..., nope:]], -1), torch.cat([latents[:, None], k[:, :1, :, nope:]], -1)


def keep_latents(model: torch.nn.Module) -> None:
    """From now on the attention modules of a model with latents hold their newest ``latents`` ``[1, L, d_c]``."""

    def hook(module: torch.nn.Module) -> Callable[..., None]:
        return lambda norm, inputs, output: module.__setattr__("latents", output)

    for module in model.modules():
        if hasattr(module, "kv_a_layernorm"):
            module.kv_a_layernorm.register_forward_hook(hook(module))  # type: ignore[union-attr]


def choose(
    chooser: Chooser, q: Tensor, k: Tensor, scale: float, groups: int, means: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The open groups, bool ``[C, L, G]``; q ``[H, L, D]``, k ``[C, L, D]``.

    With means of values ``[K, G, Dv]`` also what the other closed groups give: output ``[H, L, Dv]`` and log-sum-exp
    ``[H, L]``.
    """
    (C, L, _), device, parts, others = k.shape, q.device, [], []
    q, k = q.float(), k.float()
    stages = [_scores(index, k, scale, groups, chooser.group) for index in (chooser.index, chooser.then) if index]
    for start in range(0, L, _BLOCK):
        stop = min(L, start + _BLOCK)
        t = torch.arange(start, stop, device=device)
        num_closed = ((t + 1 - chooser.window) // chooser.group).clamp(min=0)[:, None]
        closed = chosen = (torch.arange(groups, device=device) < num_closed).expand(C, -1, -1)
        heads, shares = q[:, start:stop].unflatten(0, (C, -1)), None
        if int(num_closed[-1]) > chooser.num:
            near = _near(heads, k, scale, num_closed * chooser.group, start, stop) if chooser.near else None
            for stage, scores in enumerate(stages):
                num = min(groups, chooser.num * (chooser.factor if stage < len(stages) - 1 else 1))
                weights = scores(heads, stop)
                shares = weights.masked_fill(~chosen[:, None], -math.inf)
                total = shares.logsumexp(-1, keepdim=True)
                shares = (shares - (total if near is None else torch.logaddexp(total, near))).nan_to_num(nan=-math.inf)
                joined = shares.amax(1) if chooser.together == "max" else shares.logsumexp(1)
                best, places = joined.topk(num, -1)
                # what is left closed if a group and those behind it stay closed
                tail = joined.exp().sum(-1, keepdim=True) - best.exp().cumsum(-1) + best.exp()
                needed = tail > (chooser.least or -math.inf)  # sums are rounded
                chosen = torch.zeros_like(joined, dtype=torch.bool).scatter_(-1, places, needed) & chosen
        if means is not None:
            unopened = (closed & ~chosen)[:, None]
            if shares is None:
                others.append(
                    (q.new_zeros(len(q), stop - start, means.shape[2]), q.new_full((len(q), stop - start), -math.inf))
                )
            else:
                left = weights.masked_fill(~unopened, -math.inf)
                lse = left.logsumexp(-1)
                p = (left - lse[..., None]).nan_to_num(nan=-math.inf).exp()
                p = p.flatten(0, 1).unflatten(0, (means.shape[0], -1))
                others.append(((p @ means[:, None]).flatten(0, 1), lse.flatten(0, 1)))
        parts.append(chosen)
    rest = None if means is None else (torch.cat([x for x, _ in others], 1), torch.cat([x for _, x in others], 1))
    return torch.cat(parts, 1), rest


def _near(heads: Tensor, k: Tensor, scale: float, first: Tensor, start: int, stop: int) -> Tensor:
    """Logarithm of the window's weight, ``[C, R, Q, 1]``: query ``start + i`` sees tokens from ``first[i]`` on."""
    column = torch.arange(int(first[0]), stop, device=k.device)
    scores = (heads @ k[:, None, column].mT) * scale
    t = torch.arange(start, stop, device=k.device)[:, None]
    return scores.masked_fill((column < first) | (column > t), -math.inf).logsumexp(-1, keepdim=True)


def _scores(index: Index, k: Tensor, scale: float, groups: int, group: int) -> Scores:
    """``(heads [C, R, Q, D], stop) -> [C, R, Q, G]``: logarithms of what the index says of attention; any number for
    groups behind ``stop``.
    """
    far = k[:, : groups * group]
    if index.size > 1:
        low, high = _bounds(far.unflatten(1, (groups, group // index.size, index.size)), index.bits)

        def bounds(heads: Tensor, stop: int) -> Tensor:
            scores = heads.clamp(min=0) @ high[:, None].mT + heads.clamp(max=0) @ low[:, None].mT
            return scores.unflatten(-1, (groups, -1)).amax(-1) * scale

        return bounds
    if index == TRUE:
        known = far
    elif index.centred:
        blocks = far.unflatten(1, (groups, group))
        means = blocks.mean(2, keepdim=True)
        step = means.abs().amax(-1, keepdim=True) / 127
        means = (means / step).round() * step
        known = turned_back(rounded(rotated(blocks - means), index.bits)) + means
        known = known.flatten(1, 2)
    else:
        known = turned_back(rounded(rotated(far), index.bits))

    def by_token(heads: Tensor, stop: int) -> Tensor:
        reach = min(groups, -(-stop // group))
        scores = (heads @ known[:, None, : reach * group].mT) * scale
        return F.pad(scores.unflatten(-1, (reach, group)).logsumexp(-1), (0, groups - reach), value=-math.inf)

    return by_token


def _bounds(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest keys of blocks ``[C, G, m, u, D]``, rounded outwards, each ``[C, G * m, D]``."""
    low, high = blocks.amin(3), blocks.amax(3)
    if bits < 16:
        zero = low.amin((2, 3), keepdim=True)
        step = ((high.amax((2, 3), keepdim=True) - zero) / (2**bits - 1)).clamp(min=1e-30)
        low, high = zero + ((low - zero) / step).floor() * step, zero + ((high - zero) / step).ceil() * step
    return low.flatten(1, 2), high.flatten(1, 2)


@cache
def _rotation(width: int, device: torch.device) -> Tensor:
    """Hadamard's matrix of the largest power of two in the width, block after block, with fixed random signs."""
    size = width & -width
    block = torch.ones(1, 1)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    signs = torch.randint(2, (width, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return (signs * torch.block_diag(*[block / size**0.5] * (width // size))).to(device)


def rotated(x: Tensor) -> Tensor:
    """x ``[..., D]`` float32 turned by a fixed rotation, which keeps products."""
    return x @ _rotation(x.shape[-1], x.device)


def turned_back(x: Tensor) -> Tensor:
    """What `rotated` has turned."""
    return x @ _rotation(x.shape[-1], x.device).mT


def rounded(x: Tensor, bits: int) -> Tensor:
    """x ``[..., D]`` in ``bits`` bits with one step per token: 2 ** bits even levels around 0.

    Steps as are best for normal numbers (Max 1960), scaled so that a token's product with itself stays (RaBitQ).
    """
    half, rms = 2 ** (bits - 1), x.square().mean(-1, keepdim=True).sqrt()
    step = rms * {1: 1.596, 2: 0.996, 4: 0.335}[bits]
    levels = (x / step).floor().clamp(-half, half - 1) + 0.5
    return levels * (x.square().sum(-1, keepdim=True) / (x * levels).sum(-1, keepdim=True))


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chosen: Tensor, group: int, window: int
) -> tuple[Tensor, Tensor]:
    """Attention over the chosen groups, bool ``[1, K|1, L, G]``, and the window, by the library; its log-sum-exp."""
    G, rule = chosen.shape[-1], UniformRule(group, window)
    far_k, far_v = (x[:, :, : G * group].contiguous() for x in (k, v))
    entries = Source(k.new_zeros(*k.shape[:2], G, k.shape[3]), v.new_zeros(*v.shape[:2], G, v.shape[3]))
    sources = RecallSources(entries, Source(far_k, far_v), Source(k, v), RuleSpans(rule, 0, 0))
    return attend_recall(q, sources, ArrayChoice(chosen), scale=scale, unchosen="drop", return_lse=True)


def best_tokens(num: int, group: int = 16, window: int = 256, block: int = 256) -> Callable[..., Tensor]:
    """The ``num * group`` tokens with most true attention mass, largest over the heads that share a KV head."""

    def attention(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        shared, L, parts = hasattr(module, "kv_a_layernorm"), q.shape[2], []
        for start in range(0, L, block):
            stop = min(L, start + block)
            t = torch.arange(start, stop, device=q.device)
            heads = q[0, :, start:stop].unflatten(0, (k.shape[1], -1)).float()
            scores = heads @ k[0, :, None, :stop].mT.float() * scale
            column = torch.arange(stop, device=q.device)
            scores.masked_fill_(column > t[:, None], -math.inf)
            closed = (t + 1 - window).clamp(min=0)[:, None] // group * group
            if int(closed[-1]) > num * group:
                mass = scores.softmax(-1)
                best = (mass.flatten(0, 1).amax(0)[None] if shared else mass.amax(1)).masked_fill(column >= closed, -1)
                chosen = torch.zeros_like(best, dtype=torch.bool)
                chosen.scatter_(-1, best.topk(num * group, -1).indices, True)
                scores.masked_fill_(~(chosen | (column >= closed))[:, None], -math.inf)
            parts.append((scores.softmax(-1).to(v.dtype) @ v[0, :, None, :stop]).flatten(0, 1)[None])
        return torch.cat(parts, 2)

    return attention


def indexes(num: int) -> dict[str, Chooser]:
    """The choosers of the question which index is best, by label, those that decide first."""
    true, halves = Chooser(num, TRUE, near=True), Chooser(num, Index(8, 4))
    keys = {bits: Chooser(num, Index(1, bits)) for bits in (1, 2, 4)}
    centred = {bits: Chooser(num, Index(1, bits, centred=True)) for bits in (1, 2)}
    found = {
        "true mass": true,
        "halves 4 bits": halves,
        "keys 2 bits": keys[2],
        "keys 1 bit": keys[1],
        "keys 2 bits, rest": replace(keys[2], rest=True),
        "keys 1 bit, centred": centred[1],
        "keys 2 bits, centred": centred[2],
        "keys 1 bit, centred, rest": replace(centred[1], rest=True),
        "true mass, rest": replace(true, rest=True),
        "halves 4 bits, then keys 4": replace(halves, then=KEYS),
        "keys 1 bit, then keys 4": replace(keys[1], then=KEYS),
        "keys 2 bits, near": replace(keys[2], near=True),
        "keys 4 bits": keys[4],
        "true mass, per head": replace(true, per_head=True),
        "true mass, groups of 8": replace(true, num=2 * num, group=8),
        "keys 2 bits, centred, rest": replace(centred[2], rest=True),
        "keys 2 bits, sum": replace(keys[2], together="sum"),
        "keys 2 bits, groups of 8": replace(keys[2], num=2 * num, group=8),
        "keys 2 bits, per head": replace(keys[2], per_head=True),
        "quarters 4 bits": Chooser(num, Index(4, 4)),
        "halves 8 bits": Chooser(num, Index(8, 8)),
    }
    return {f"{label}: {num}": chooser for label, chooser in found.items()}


def by_mass(groups: int) -> dict[str, Chooser]:
    """Choosers that open as many groups as the attention left closed demands, at most half of them."""
    keys = Chooser(groups // 2, Index(1, 2), near=True)
    return {
        f"keys 2 bits, {least:.0%} closed{', rest' if rest else ''}": replace(keys, least=least, rest=rest)
        for least in (0.1, 0.05, 0.02, 0.2)
        for rest in (False, True)
    }


def costs_of(config: Any, chooser: Chooser, length: int) -> dict[str, float]:
    """`Chooser.costs` for a model's configuration."""
    if getattr(config, "kv_lora_rank", None):
        return chooser.costs(length, config.kv_lora_rank + config.qk_rope_head_dim, 0, config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return chooser.costs(length, width, width, config.num_attention_heads // config.num_key_value_heads)
