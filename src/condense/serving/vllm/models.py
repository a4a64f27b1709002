"""vLLM's own model classes with condensed attention: built as stock models, then layer by layer replaced; and what
keeps an engine of vLLM from serving them.
"""

import importlib
from collections.abc import Collection
from typing import Any

import vllm
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from condense.architectures import condensed_architecture
from condense.serving.blocks import ServedLayer, own_page, page_sizes
from condense.serving.engine import GPT_OSS, EngineSettings, check_engine
from condense.serving.host import HostMemory
from condense.serving.plan import ServingPlan, serving_plans
from condense.serving.vllm.backend import CondensedAttention
from condense.serving.vllm.register import ARCHITECTURES


def condense_layers(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Replace the attention of the layers that ``config.condense`` names, except for those that it names dense.

    Raises ValueError if the engine, a method or a layer cannot be served condensed.
    """
    settings = getattr(vllm_config.model_config.hf_text_config, "condense", None)
    if settings is None:
        raise ValueError(
            "the model's configuration must name its methods as `condense`, got none: start it with `condense serve`"
        )
    plans = serving_plans(settings, vllm_config.model_config.max_model_len)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Attention | MLAAttention)
    ]
    numbers = [extract_layer_index(child.layer_name) for _, _, child in places]
    widths: list[tuple[int, int] | None] = [None] * len(places)
    if any(hasattr(parent, "kv_lora_rank") for parent, _, _ in places):
        # imported here, as it takes more of vLLM's insides than other models need
        from condense.serving.vllm.latents import CondensedLatents, entry_widths

        widths = [entry_widths(parent) for parent, _, _ in places]
    dense = sorted({*numbers} - {*plans})
    check_engine(engine_settings(vllm_config, plans.values(), any(widths), dense))
    dtype = vllm_config.model_config.dtype
    layers = [
        _served(child, plans.get(number))
        if latents is None
        else ServedLayer(plans.get(number), 1, (sum(latents), 0), dtype, latents[0])
        for (_, _, child), number, latents in zip(places, numbers, widths, strict=True)
    ]
    page, cache = own_page(layers, page_sizes(layers)), vllm_config.cache_config
    if cache.user_specified_block_size and cache.block_size != page:
        raise ValueError(f"--block-size must be {page} for these methods, got {cache.block_size}: leave it out")
    # the page size of vLLM's own layers, with which their pages share blocks with entries or windows; vLLM reads it
    # once the model is built
    cache.block_size, cache.user_specified_block_size = page, True
    parallel = vllm_config.parallel_config
    # engines whose processes run on this host, as far as is known
    engines = parallel.pipeline_parallel_size * max(1, parallel.data_parallel_size_local)
    host = HostMemory(layers, parallel.tensor_parallel_size * engines)
    for (parent, name, child), latents, served in zip(places, widths, layers, strict=True):
        if served.plan is not None:
            del vllm_config.compilation_config.static_forward_context[child.layer_name]
            others = served, host, vllm_config
            if latents is None:
                # the module's own sinks, which are loaded later, and no backend's, which may be a copy
                sinks: Any = parent.sinks if child.has_sink else None
                setattr(parent, name, CondensedAttention(child, *others, sinks))
            else:
                setattr(parent, name, CondensedLatents(child, parent, *others))


def _served(stock: Attention, plan: ServingPlan | None) -> ServedLayer:
    properties = (
        (stock.sliding_window is not None, "a sliding window"),
        (getattr(stock.impl, "logits_soft_cap", None), "soft-capped scores"),
        (getattr(stock.impl, "alibi_slopes", None) is not None, "scores shifted by position (ALiBi)"),
        (stock.kv_sharing_target_layer_name is not None, "the cache of another layer"),
        # all other layers of the models served are AttentionType.DECODER
        (stock.attn_type == AttentionType.ENCODER_ONLY, "bidirectional attention (is_causal=False)"),
    )
    found = " and ".join(name for holds, name in properties if holds)
    if found and plan is not None:
        raise ValueError(f"layer {stock.layer_name} has {found} and cannot be condensed: leave it out of the layers")
    widths, sliding = (stock.head_size, stock.head_size_v), stock.sliding_window
    return ServedLayer(plan, stock.num_kv_heads, widths, stock.kv_cache_torch_dtype, sliding=sliding)


def engine_settings(
    config: VllmConfig, plans: Collection[ServingPlan], has_latents: bool = False, dense: Collection[int] = ()
) -> EngineSettings:
    """The settings of an engine that are checked. plans: of condensed layers. dense: numbers of vLLM's own layers."""
    parallel, cache, drafts = config.parallel_config, config.cache_config, config.speculative_config
    # only then are drafts found, and lengths known, on the host
    served = all(plan.takes_back for plan in plans) and not config.scheduler_config.async_scheduling
    return EngineSettings(
        version=vllm.__version__,
        kv_heads=None if has_latents else config.model_config.get_total_num_kv_heads(),
        tensor_parallel=parallel.tensor_parallel_size,
        cache_dtype=cache.cache_dtype,
        model_dtype=str(config.model_config.dtype).removeprefix("torch."),
        kv_transfer=config.kv_transfer_config is not None,
        offloading=bool(cache.kv_offloading_size),
        one_manager=bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
        speculative=drafts is not None and not (served and drafts.method == "ngram"),
        shared_context=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        microbatches=parallel.use_ubatching,
        dense_latents=dense if has_latents else (),
        choosing_latents=has_latents
        and any(p.settings.choice is not None and not p.settings.reads_exactly for p in plans),
        adapted_latents=has_latents and config.lora_config is not None,
        adapted_gpt_oss=config.lora_config is not None and config.model_config.hf_text_config.model_type == GPT_OSS,
        uneven_stages=parallel.pipeline_parallel_size > 1 and len({p.pages for p in plans} | {*dense}) > 1,
        dual_chunks=hasattr(config.model_config.hf_text_config, "dual_chunk_attention_config"),
        sleeping_host=config.model_config.enable_sleep_mode and any(plan.on_host for plan in plans),
    )


class _Condensed:
    """Mixin before a stock class: once the model is built, condenses the layers that ``config.condense`` names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        condense_layers(self, vllm_config)  # type: ignore[arg-type]


def __getattr__(name: str) -> type:
    """The condensed class of that name; made, and vLLM's module of its stock class imported, when it is asked for."""
    stock = next((each for each in ARCHITECTURES if condensed_architecture(each) == name), None)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{ARCHITECTURES[stock]}"), stock)
    made = type(name, (_Condensed, base), {"__doc__": f"{stock}, condensed.", "__module__": __name__})
    return globals().setdefault(name, made)
