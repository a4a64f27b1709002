"""A layer of vLLM with condensed attention, the pages that it asks for, and its place in a model.

vLLM asks every layer of a model for one kind of cache. A condensed layer has up to three: the window is its own,
entries and ring are asked for by two more objects, which compute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import vllm
from torch import Tensor, nn, tensor, uint8
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, FullAttentionSpec, SlidingWindowSpec

from condense.serving.blocks import PageSizes, ServedLayer, page_sizes
from condense.serving.engine import EngineSettings, check_engine
from condense.serving.plan import ServingPlan, serving_plans
from condense.serving.vllm.backend import CondensedBackend


class CondensedAttention(Attention):
    """A layer that takes the place of a stock one, under its name, with the backend that reads and writes pages."""

    def __init__(
        self, stock: Attention, served: ServedLayer, model: Sequence[ServedLayer], vllm_config: VllmConfig
    ) -> None:
        """served: this layer; model: all layers, dense ones too."""
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
        assert served.plan is not None
        self.plan, self.served, self.model = served.plan, served, model
        self.longest = vllm_config.model_config.max_model_len
        specs = page_specs(served, page_sizes(model))
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


def page_specs(served: ServedLayer, sizes: PageSizes) -> dict[str, AttentionSpec]:
    """The pages to ask for, by kind; all of bytes: vLLM would zero each block that it hands out if dtypes differed."""
    plan, (D, _) = served.plan, served.widths
    assert plan is not None
    page = {"num_kv_heads": served.heads, "head_size": D, "dtype": uint8}
    specs: dict[str, AttentionSpec] = {
        "window": SlidingWindowSpec(
            block_size=sizes.near, state_content_bytes=served.token_bytes, sliding_window=plan.kept_tokens, **page
        ),
        "entries": FullAttentionSpec(
            block_size=sizes.far,
            state_content_bytes=served.slot_bytes,
            tokens_per_state=sizes.far // plan.entry_slots(sizes.far),
            **page,
        ),
    }
    if plan.ring_slots:
        means = {"block_size": plan.ring_slots, "state_content_bytes": D * served.dtype.itemsize}
        specs["ring"] = CircularBufferSpec(**means, **page)
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
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Attention)
    ]
    layers = [_served(child, plans.get(extract_layer_index(child.layer_name))) for _, _, child in places]
    far, cache = page_sizes(layers).far, vllm_config.cache_config
    if cache.user_specified_block_size and cache.block_size != far:
        raise ValueError(f"--block-size must be {far} for these methods, got {cache.block_size}: leave it out")
    # of dense layers, so that their pages lie in the same blocks as entries; vLLM reads it once the model is built
    cache.block_size, cache.user_specified_block_size = far, True
    for (parent, name, child), served in zip(places, layers, strict=True):
        if served.plan is not None:
            del vllm_config.compilation_config.static_forward_context[child.layer_name]
            setattr(parent, name, CondensedAttention(child, served, layers, vllm_config))


def _served(stock: Attention, plan: ServingPlan | None) -> ServedLayer:
    properties = (
        (stock.sliding_window is not None, "a sliding window"),
        (getattr(stock.impl, "logits_soft_cap", None), "soft-capped scores"),
        (getattr(stock.impl, "alibi_slopes", None) is not None, "scores shifted by position (ALiBi)"),
        (stock.kv_sharing_target_layer_name is not None, "the cache of another layer"),
    )
    found = " and ".join(name for holds, name in properties if holds)
    if found and plan is not None:
        raise ValueError(f"layer {stock.layer_name} has {found} and cannot be condensed: leave it out of the layers")
    widths = stock.head_size, stock.head_size_v
    return ServedLayer(plan, stock.num_kv_heads, widths, stock.kv_cache_torch_dtype)


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
