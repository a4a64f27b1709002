"""Entries, bytes and FLOPs of each layer, dense and condensed, by arithmetic alone: no weights, no forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from condense.config import check_int
from condense.methods import DGA, Dense, Method, step_settings
from condense.models.apply import chosen_methods
from condense.models.choice import MethodChoice
from condense.models.counts import (
    DTYPES,
    CachedHeads,
    chooses_from_prompt,
    kept_on_device,
    sum_closed,
    sum_opened,
    tokens_left,
)
from condense.models.families import is_latent, sliding_window
from condense.models.modules import attention_layers
from condense.models.stock import stock_method
from condense.ops import ChoiceSettings
from condense.ops.recall.choice import OWN_CHOICES, SHARED
from condense.ops.triton.limits import settings_obstacle
from condense.serving.blocks import ServedLayer
from condense.serving.plan import serving_plan
from condense.state import num_entries


@dataclass(frozen=True)
class LayerReport:
    """One layer at one length, batch 1.

    method: None for a layer that stays stock; then both columns, dense and condensed, are the stock figures.
    entries: entries and exact tokens on the device, those in Recall's store or slots included, per KV head, or for all
    heads together with latents (MLA). bytes: of the cache on the device after the prompt, without the spare room in its
    buffers (1/32 and some columns). host_bytes: of exact tokens in host memory (``Recall(store="host")``). read_bytes:
    what the next step reads, on the device or the host. flops: of reading the prompt: attention over visible keys,
    pooling, the scores of Recall's index, and the products that only latents need for it; no other projections.
    remark: what the figures do not say, or None.
    """

    layer: int
    method: Method | None
    dense_entries: int
    entries: int
    dense_bytes: int
    bytes: int
    dense_flops: int
    flops: int
    read_bytes: int
    remark: str | None = None
    host_bytes: int = 0


def inspect(model: nn.Module, method: MethodChoice | str, length: int, itemsize: int = 2) -> list[LayerReport]:
    """Entries, bytes and FLOPs per layer for ``length`` tokens under this method, or this choice of methods by layer.

    itemsize: bytes per cached number (2 for bfloat16). Works on a model on the meta device.
    Raises ValueError as `condense.apply` does, and for a length below 1.
    """
    check_int("length", length, 1)
    chosen, attentions = chosen_methods(model, method), attention_layers(model)
    return [_report(i, module, chosen.get(i), length, itemsize) for i, module in sorted(attentions.items())]


def cache_shares(layers: Sequence[LayerReport]) -> tuple[float, float]:
    """Bytes on the device and in host memory, as shares of a dense cache's."""
    dense = sum(layer.dense_bytes for layer in layers)
    return sum(layer.bytes for layer in layers) / dense, sum(layer.host_bytes for layer in layers) / dense


def served_layers(model: nn.Module, method: MethodChoice, longest: int | None, itemsize: int = 2) -> list[ServedLayer]:
    """The layers as vLLM runs them for requests of up to ``longest`` tokens (None: of any length).

    Raises ValueError as `inspect`, and for methods and layers that are not served.
    """
    chosen, layers = chosen_methods(model, method), []
    for i, module in attention_layers(model).items():
        heads, own = _Heads.of(module).cached, chosen.get(i, Dense())
        plan = None if isinstance(own, Dense) else serving_plan(own, longest)
        if plan is None and is_latent(module):
            raise ValueError(f"layer {i} has latents and no method, which is not served")
        widths, sliding = (heads.width, heads.value_width), sliding_window(module)
        layers.append(ServedLayer(plan, heads.num, widths, DTYPES[itemsize], sliding=sliding))
    return layers


def _report(index: int, module: nn.Module, method: Method | None, length: int, itemsize: int) -> LayerReport:
    heads, window = _Heads.of(module), sliding_window(module)
    dense_entries = length if window is None else min(length, window)
    dense_bytes = dense_entries * heads.entry_numbers * itemsize
    # a stock layer of a condensed model keeps a few tokens more than its window, so that some can be taken back
    own = stock_method(module)
    used = own if method is None else method
    on_device, on_host = heads.cached.cached_bytes(used, length, itemsize)
    read = dense_bytes if method is None else on_device
    if used.layout.choice is not None:
        read = heads.cached.step_bytes(used, length, itemsize)
    remark = None if method is None else _remark(method, length, on_host, read)
    return LayerReport(
        index, method,
        dense_entries=dense_entries, dense_bytes=dense_bytes, entries=kept_on_device(used, length), bytes=on_device,
        host_bytes=on_host, read_bytes=read, remark=remark,
        dense_flops=heads.flops(own, length), flops=heads.flops(used, length),
    )  # fmt: skip


def _remark(method: Method, length: int, on_host: int, read_bytes: int) -> str | None:
    twice = (
        "the prompt is read twice, over a dense cache; entries and bytes are means over the layers: each keeps its own "
        "number"
    )
    if (choice := method.layout.choice) is not None:
        read, left = f"a step after them reads {read_bytes:,} bytes", tokens_left(method, length)
        if choice.prompt == "exact":
            read = f"{twice if left < length else 'the prompt is read with dense attention'}; {read}"
        if choice.store.on_host:
            return f"{method.name}: of {length} tokens, {on_host:,} bytes per layer lie in host memory; {read}"
        larger = ", so the cache is larger than a dense one" if choice.store.bits == 16 and left == length else ""
        stay = f"all {length} tokens stay" if left == length else f"{left} of {length} tokens stay"
        return f"{method.name}: {stay} on the device{larger}; {read} of it"
    if chooses_from_prompt(method) and method.prompt_focal(length) == length:
        cause = f"min_focal={method.min_focal}" if method.min_focal >= length else f"gamma={method.gamma}"
        return f"dga: {cause} keeps all {length} tokens exact: this is dense attention"
    if method.reread is not None:
        return f"{method.name}: {twice}"
    if method.reads_prompt and not chooses_from_prompt(method):
        return f"{method.name}: FLOPs are those of dense attention over the prompt; what it leaves out is its own"
    obstacle = settings_obstacle(step_settings(method))
    if obstacle is not None:
        return f"{method.name}: over a static cache its steps run on PyTorch, as the Triton step {obstacle}"
    return None


@dataclass(frozen=True)
class _Heads:
    """A layer's heads and the cost of its attention.

    cached: the heads that are cached: KV heads, one for latents, whose values are part of its keys.
    FLOPs beside attention: summary_flops per token, for its summary query; entry_flops per condensed entry, to expand
    it to keys and values; absorb_flops per token, to turn its query into a query on latents.
    """

    num_q: int
    width: int
    value_width: int
    cached: CachedHeads
    summary_flops: int
    entry_flops: int = 0
    absorb_flops: int = 0

    @classmethod
    def of(cls, module: Any) -> Self:
        config = module.config
        num_q = config.num_attention_heads
        if is_latent(module):
            d_n, d_r, d_v = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
            absorbed, expanded = (2 * num_q * module.kv_lora_rank * d for d in (d_n, d_n + d_v))
            latents = CachedHeads(1, module.kv_lora_rank + d_r, 0)
            return cls(num_q, d_n + d_r, d_v, latents, absorbed + num_q * d_r, expanded, absorbed)
        # the module is asked first: layers of one model may differ, and not every configuration says how
        width = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // num_q
        value_width, groups = getattr(module, "v_head_dim", width), getattr(module, "num_key_value_groups", None)
        num_kv = num_q // groups if groups else getattr(config, "num_key_value_heads", None) or num_q
        return cls(num_q, width, value_width, CachedHeads(num_kv, width, value_width), num_q * width)

    @property
    def scored(self) -> int:
        """Numbers in the keys of one entry, or one token, over all KV heads: the part that a summary query scores."""
        return self.cached.num * self.cached.width

    @property
    def entry_numbers(self) -> int:
        """Numbers in the keys and values of one entry, or one token, over all KV heads."""
        return self.scored + self.cached.num * self.cached.value_width

    def flops(self, method: Method, length: int) -> int:
        """FLOPs of a prompt of ``length`` tokens."""
        if chooses_from_prompt(method):
            return self._selected(method, length)
        if (choice := method.layout.choice) is not None:
            return self._recalled(method, choice, length)
        rule = method.layout.rule
        visible = length * (length + 1) // 2 - sum_closed(rule, length, None) * rule.chunk
        visible += sum_closed(rule, length, rule.max_chunks) * rule.entries
        if (scales := method.layout.coarse_rule) is not None:
            visible -= sum_closed(scales.made_by[0], length, None) * (scales.coarse.chunks - 1)
        chunks = rule.pooled(length, method.layout.summary_delay)
        entries = chunks * rule.entries
        pooled = chunks * (rule.chunk - rule.entries + 1) * 2 * self.entry_numbers + entries * self.entry_flops
        if method.layout.num_summary > 0:
            # scores of all tokens of a chunk, and the mean over each KV head's queries
            pooled += chunks * rule.chunk * 2 * self.scored + length * self.summary_flops
        return (visible + _reread_pairs(method, length)) * self._per_key + pooled

    @property
    def _per_key(self) -> int:
        """Score and weighted value of one query position over one key: 2 (D + Dv) per query head."""
        return self.num_q * 2 * (self.width + self.value_width)

    def _selected(self, method: DGA, tokens: int) -> int:
        """FLOPs of a prompt of ``tokens`` tokens whose focal tokens DGA chooses, if these are spread evenly."""
        focal, g = int(method.prompt_focal(tokens)), method.group_size
        groups = (tokens - focal) // g
        # half of the entries on average, and of the members of the group in progress
        visible = ((tokens + 1) * (focal + groups) + tokens * (g - 1) * (groups > 0)) // 2
        asked = 0 if method.focal == "random" else min(tokens, method.num_recent + method.num_random)
        selecting = asked * tokens * self.num_q * 2 * self.width
        pooled = groups * (2 * g * (self.scored + self.entry_numbers) + self.summary_flops)
        return visible * self._per_key + (selecting + pooled) * (groups > 0)

    def _recalled(self, method: Method, choice: ChoiceSettings, length: int) -> int:
        """FLOPs of a prompt that Recall reads: every query scores the index of all closed groups, then attends.

        Where all groups are open, no query scores it. With ``prompt="shared"`` one query per `SHARED` groups does, and
        the last `OWN_CHOICES`, which are counted as opening no more groups than the others. With latents, absorbed
        queries score the index, and stored tokens are expanded.
        """
        rule, groups = method.layout.rule, int(num_entries(method, tokens_left(method, length)))
        closed, opened = sum_closed(rule, length, None), sum_opened(rule, choice.prompt_quota, length)
        visible = length * (length + 1) // 2 - (closed - opened) * rule.chunk + _reread_pairs(method, length)
        last = rule.closed(length)
        if choice.prompt_quota.at(last) == last:
            closed = 0
        elif choice.prompt == "shared":
            closed = closed // (SHARED * rule.chunk) + min(OWN_CHOICES, length) * last
        asked = self.num_q * 2 * closed * rule.chunk * self.cached.width
        asked += length * self.absorb_flops if closed else 0
        return visible * self._per_key + asked + groups * rule.chunk * self.entry_flops


def _reread_pairs(method: Method, length: int) -> int:
    """Keys that the queries of a second reading of a prompt see, summed over them."""
    return 0 if method.reread is None else method.reread.num_pairs(length)
