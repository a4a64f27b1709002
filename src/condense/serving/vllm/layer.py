"""A layer of vLLM with condensed attention, the pages that it asks for, and its place in a model.

vLLM asks every layer of a model for one kind of cache. A condensed layer has up to three: the window is its own,
entries and ring are asked for by two more objects, which compute nothing.
"""

from __future__ import annotations

import dataclasses

import vllm
from torch import Tensor, nn, tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, FullAttentionSpec, SlidingWindowSpec

from condense.serving.plan import EngineSettings, ServingPlan, check_engine, serving_plans
from condense.serving.vllm.backend import CondensedBackend


class CondensedAttention(Attention):
    """A layer that takes the place of a stock one, under its name, with the backend that reads and writes pages."""

    def __init__(self, stock: Attention, plan: ServingPlan, vllm_config: VllmConfig) -> None:
        super().__init__(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=stock.layer_name,
            attn_backend=CondensedBackend,
        )
        self.plan = plan
        specs = _specs(self, plan)
        self.window_spec = specs.pop("window")
        self.sides = {kind: SideCache(f"{stock.layer_name}.{kind}", spec) for kind, spec in specs.items()}
        context = vllm_config.compilation_config.static_forward_context
        context.update({side.layer_name: side for side in self.sides.values()})

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Pages of the window."""
        return self.window_spec


class SideCache(AttentionLayerBase):
    """An object that asks for the pages of a condensed layer's entries, or of its ring, and holds them."""

    def __init__(self, layer_name: str, spec: AttentionSpec) -> None:
        self.layer_name, self.spec = layer_name, spec
        self.kv_cache: Tensor = tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of condensed layers, which makes the metadata of their pages too."""
        return CondensedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Pages of this kind."""
        return self.spec


def _specs(layer: Attention, plan: ServingPlan) -> dict[str, AttentionSpec]:
    """The pages to ask for, by kind. All have N slots of a key and a value, so vLLM pads none."""
    page = AttentionSpec(
        block_size=plan.slots,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=layer.kv_cache_torch_dtype,
    )
    fields = {field.name: getattr(page, field.name) for field in dataclasses.fields(page)}
    entries = {**fields, "block_size": plan.tokens_per_page, "tokens_per_state": plan.group_size}
    specs: dict[str, AttentionSpec] = {
        "window": SlidingWindowSpec(**fields, sliding_window=plan.kept_tokens),
        "entries": FullAttentionSpec(**entries),
    }
    if plan.has_ring:
        specs["ring"] = CircularBufferSpec(**fields)
    return specs


def condense_layers(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Replace the attention of the layers that ``config.condense`` names, except for those that it names dense.

    Raises ValueError if the engine, a method or a layer cannot be served condensed.
    """
    check_engine(_engine_settings(vllm_config))
    settings = getattr(vllm_config.model_config.hf_text_config, "condense", None)
    if settings is None:
        raise ValueError(
            "the model's configuration must name its methods as `condense`, got none: start it with `condense serve`"
        )
    plans = serving_plans(settings)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Attention):
                plan = plans.get(extract_layer_index(child.layer_name))
                if plan is not None:
                    setattr(parent, name, _condensed(child, plan, vllm_config))


def _condensed(stock: Attention, plan: ServingPlan, vllm_config: VllmConfig) -> CondensedAttention:
    properties = (
        (stock.sliding_window is not None, "a sliding window"),
        (getattr(stock.impl, "logits_soft_cap", None), "soft-capped scores"),
        (getattr(stock.impl, "alibi_slopes", None) is not None, "scores shifted by position (ALiBi)"),
        (stock.kv_sharing_target_layer_name is not None, "the cache of another layer"),
    )
    if found := " and ".join(name for holds, name in properties if holds):
        raise ValueError(f"layer {stock.layer_name} has {found} and cannot be condensed: leave it out of the layers")
    del vllm_config.compilation_config.static_forward_context[stock.layer_name]
    return CondensedAttention(stock, plan, vllm_config)


def _engine_settings(config: VllmConfig) -> EngineSettings:
    parallel, cache = config.parallel_config, config.cache_config
    return EngineSettings(
        version=vllm.__version__,
        kv_heads=config.model_config.get_total_num_kv_heads(),
        tensor_parallel=parallel.tensor_parallel_size,
        cache_dtype=cache.cache_dtype,
        model_dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv_transfer=config.kv_transfer_config is not None,
        offloading=bool(cache.kv_offloading_size),
        one_manager=bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
        speculative=config.speculative_config is not None,
        shared_context=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        microbatches=parallel.use_ubatching,
    )
