"""What `import condense` adds to transformers: two names in its registries, and two wrapped methods.

`post_init`: a saved condensed model loads condensed in one line. `_prepare_cache_for_generation`: layers are
put into the cache before generate decides about compilation and past recording. Neither does anything for a
model that is not condensed.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, Cache, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from condense.models.apply import condense_from_config, condensed_layers
from condense.models.attention import IMPLEMENTATION, condense_attention
from condense.models.families import max_learned_positions
from condense.models.layers import ensure_layer
from condense.models.masks import condense_mask

_GROWING_CACHES = (None, "dynamic", "dynamic_full", "offloaded")


def install() -> None:
    """Register and wrap, once per process."""
    if getattr(PreTrainedModel.post_init, "_condense", False):
        return
    AttentionInterface.register(IMPLEMENTATION, condense_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, condense_mask)
    PreTrainedModel.post_init = _wrap_post_init(PreTrainedModel.post_init)
    GenerationMixin._prepare_cache_for_generation = _wrap_prepare_cache(GenerationMixin._prepare_cache_for_generation)


def _wrap_post_init(stock: Any) -> Any:
    @functools.wraps(stock)
    def post_init(self: PreTrainedModel) -> None:
        stock(self)
        condense_from_config(self)

    post_init._condense = True  # type: ignore[attr-defined]
    return post_init


def _wrap_prepare_cache(stock: Any) -> Any:
    @functools.wraps(stock)
    def prepare(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        methods = condensed_layers(self) if self.config._attn_implementation == IMPLEMENTATION else {}
        if methods:
            _check_generation(self, generation_config, methods)
        result = stock(self, generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            for index, method in methods.items():
                ensure_layer(cache, index, method)
        return result

    return prepare


def _check_generation(model: Any, generation_config: GenerationConfig, methods: dict[int, Any]) -> None:
    kind = generation_config.cache_implementation
    if kind not in _GROWING_CACHES:
        raise ValueError(
            f"cache_implementation={kind!r} cannot be condensed: leave it unset, a condensed cache stays "
            "small while it grows"
        )
    if generation_config.prefill_chunk_size is not None:
        ahead = next((method for method in methods.values() if method.looks_ahead), None)
        if ahead is not None:
            raise ValueError(
                f"{ahead} needs the whole prompt in one forward: unset prefill_chunk_size or use summary='streaming'"
            )
    positions = max_learned_positions(model.config.get_text_config(decoder=True))
    if positions is not None and generation_config.max_length is not None and generation_config.max_length > positions:
        raise ValueError(
            f"prompt and new tokens must fit the model's {positions} learned positions, got "
            f"{generation_config.max_length}"
        )
