"""What condensing a model would change, layer by layer, by arithmetic alone: no weights, no forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from condense.config import check_int
from condense.functional import SLACK, first_needed, num_entries, step_settings
from condense.methods import DGA, Dense, Method
from condense.models.apply import MethodChoice, attention_layers, check_config, check_latents, chosen_layers
from condense.models.families import is_latent, sliding_window
from condense.ops.triton.limits import settings_obstacle


@dataclass(frozen=True)
class LayerReport:
    """One layer at one length, batch 1.

    width, value_width: of a head's keys and values. Entries per KV head, or for all heads where latents are cached
    (MLA); bytes of the cache after a prefill of that length.

    FLOPs count attention over visible keys and pooling, with the products that only latents need for it, and no
    other projections. pays_from: the shortest length from
    which the condensed layer needs fewer FLOPs than the dense one, None if it never does. method: None for a
    layer that stays stock; then both columns are the stock figures. remark: what the figures do not say, or None.
    """

    layer: int
    width: int
    value_width: int
    method: Method | None
    dense_entries: int
    entries: int
    dense_bytes: int
    bytes: int
    dense_flops: int
    flops: int
    pays_from: int | None
    remark: str | None = None


def inspect(model: nn.Module, method: MethodChoice, length: int, itemsize: int = 2) -> list[LayerReport]:
    """What `condense.apply` with this method, or this choice of methods, would mean for ``length`` tokens.

    itemsize: bytes per cached number (2 for bfloat16). Works on a model on the meta device.
    Raises ValueError as `condense.apply` does, and for a length below 1.
    """
    check_int("length", length, 1)
    attentions = attention_layers(model)
    if isinstance(method, Mapping):
        chosen = {i: Method.parse(method[i]) for i in chosen_layers(model, attentions, method)}
    else:
        chosen = dict.fromkeys(chosen_layers(model, attentions, None), Method.parse(method))
    check_config(attentions)
    check_latents(chosen, attentions)
    return [_report(i, module, chosen.get(i), length, itemsize) for i, module in sorted(attentions.items())]


def _report(index: int, module: nn.Module, method: Method | None, length: int, itemsize: int) -> LayerReport:
    heads, window = _Heads.of(module), sliding_window(module)
    dense_entries = length if window is None else min(length, window)
    dense_bytes = dense_entries * heads.entry_numbers * itemsize
    dense_flops = heads.dense_flops(length, window)
    if method is None:
        stock = (dense_entries, dense_entries, dense_bytes, dense_bytes, dense_flops, dense_flops)
        return LayerReport(index, heads.width, heads.value_width, None, *stock, pays_from=None)
    entries, tail = _kept(method, length)
    numbers = entries * heads.entry_numbers + tail * heads.scored
    return LayerReport(
        layer=index,
        width=heads.width,
        value_width=heads.value_width,
        method=method,
        dense_entries=dense_entries,
        entries=entries,
        dense_bytes=dense_bytes,
        bytes=numbers * itemsize,
        dense_flops=dense_flops,
        flops=heads.flops(method, length),
        pays_from=heads.pays_from(method),
        remark=_remark(method, length),
    )


def _remark(method: Method, length: int) -> str | None:
    if _selects(method) and int(method.num_focal_of_prompt(torch.tensor([length]))) == length:
        cause = f"min_focal={method.min_focal}" if method.min_focal >= length else f"gamma={method.gamma}"
        return f"dga: {cause} keeps all {length} tokens exact: this is dense attention"
    obstacle = settings_obstacle(step_settings(method))
    if obstacle is not None:
        return f"{method.name}: over a static cache its steps run on PyTorch, as the Triton step {obstacle}"
    return None


def _selects(method: Method) -> TypeGuard[DGA]:
    return isinstance(method, DGA) and method.selection == "prompt"


@dataclass(frozen=True)
class _Heads:
    """entry_numbers: in one cache entry of all KV heads. scored: those of them that a summary query scores.

    FLOPs beside attention: summary_flops per token, for its summary query; entry_flops per prefix entry, to make
    keys and values of it.
    """

    num_q: int
    width: int
    value_width: int
    entry_numbers: int
    scored: int
    summary_flops: int
    entry_flops: int

    @classmethod
    def of(cls, module: Any) -> _Heads:
        config = module.config
        num_q = config.num_attention_heads
        if is_latent(module):
            d_n, d_r, d_v = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
            numbers = module.kv_lora_rank + d_r
            absorbed, expanded = (2 * num_q * module.kv_lora_rank * d for d in (d_n, d_n + d_v))
            return cls(num_q, d_n + d_r, d_v, numbers, numbers, absorbed + num_q * d_r, expanded)
        num_kv = getattr(config, "num_key_value_heads", None) or num_q
        width = getattr(config, "head_dim", None) or config.hidden_size // num_q
        return cls(num_q, width, width, num_kv * 2 * width, num_kv * width, num_q * width, 0)

    def dense_flops(self, length: int, window: int | None = None) -> int:
        seen = torch.arange(1, length + 1)
        return int((seen if window is None else seen.clamp(max=window)).sum()) * self._per_key

    def flops(self, method: Method, length: int) -> int:
        if _selects(method):
            return int(self._selected(method, torch.tensor([length])))
        return int(self._cumulative(method, length)[-1])

    def pays_from(self, method: Method) -> int | None:
        """Searched up to 64 windows and chunks and 8 ``min_focal``: a method that does not pay there never does."""
        if method.rule.window is None:
            return None
        limit = 64 * (method.rule.window + method.rule.chunk) + (8 * method.min_focal if _selects(method) else 0)
        seen = torch.arange(1, limit + 1)
        flops = self._selected(method, seen) if _selects(method) else self._cumulative(method, limit)
        dearer = (flops >= seen.cumsum(0) * self._per_key).nonzero()
        last = int(dearer[-1]) if dearer.numel() else -1
        return None if last == limit - 1 else last + 2

    @property
    def _per_key(self) -> int:
        """Score and weighted value of one query position over one key: 2 (D + Dv) per query head."""
        return self.num_q * 2 * (self.width + self.value_width)

    def _cumulative(self, method: Method, length: int) -> torch.Tensor:
        """FLOPs for prompts of 1 to ``length`` tokens, ``[length]``."""
        rule, seen = method.rule, torch.arange(1, length + 1)
        closed = rule.closed(seen)
        visible = rule.visible_entries(closed) + seen - closed * rule.chunk
        entries = num_entries(method, seen)
        chunks = entries // rule.entries
        pooled = chunks * (rule.chunk - rule.entries + 1) * 2 * self.entry_numbers + entries * self.entry_flops
        if method.num_summary > 0:
            # scores of all tokens of a chunk, and the mean over each KV head's queries
            pooled = pooled + chunks * rule.chunk * 2 * self.scored + seen * self.summary_flops
        return visible.cumsum(0) * self._per_key + pooled

    def _selected(self, method: DGA, tokens: torch.Tensor) -> torch.Tensor:
        """FLOPs for prompts of so many tokens, int64 as ``tokens``, if focal tokens spread evenly over them."""
        focal, g = method.num_focal_of_prompt(tokens), method.group_size
        groups = (tokens - focal) // g
        # half of the entries on average, and of the members of the group in progress
        visible = ((tokens + 1) * (focal + groups) + tokens * (g - 1) * (groups > 0)) // 2
        asked = 0 if method.focal == "random" else tokens.clamp(max=method.num_recent + method.num_random)
        selecting = asked * tokens * self.num_q * 2 * self.width
        pooled = groups * (2 * g * (self.scored + self.entry_numbers) + self.summary_flops)
        return visible * self._per_key + (selecting + pooled) * (groups > 0)


def _kept(method: Method, length: int) -> tuple[int, int]:
    """Entries (representatives and exact tokens) and summary queries that a cache holds after ``length`` tokens."""
    seen = torch.tensor([length])
    if isinstance(method, Dense):
        return length, 0
    if _selects(method):
        return int(method.prompt_entries(seen)), 0
    exact = min(length, int(seen - first_needed(method, seen - SLACK)))
    tail = min(length, method.num_summary - 1 + SLACK) if method.num_summary > 1 else 0
    return int(num_entries(method, seen)) + exact, tail
