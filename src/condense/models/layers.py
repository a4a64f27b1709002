"""Putting condensed layers into transformers' caches, and refusing what cannot work."""

from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache, StaticCache, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from condense.caches import CondensedCacheLayer, CondensedLayer, ReadRequest, StaticCondensedLayer
from condense.functional import extend
from condense.methods import Context, Method, StreamingLLM
from condense.models.forward import AttentionCall
from condense.models.stock import LocalChunks


def read_tokens(
    call: AttentionCall, method: Method, q: Tensor, k: Tensor, v: Tensor, *, latent_width: int | None = None
) -> Context:
    """Add new tokens to the call's condensed cache layer, and return what they attend to; without a cache, themselves.

    q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``, aligned. latent_width: as in
    `condense.Method.for_latents`, None for ordinary keys.
    """
    cache, layer_idx = call.cache, call.layer_idx
    if cache is None:
        method = method if latent_width is None else method.for_latents(latent_width)
        return extend(method, None, q, k, v, scale=call.scale, plan=call.plan)[0]
    assert call.plan is not None
    trailing = q.shape[2] if call.padding is None else call.padding.trailing
    request = ReadRequest(q, call.scale, call.plan, trailing, latent_width)
    context = cache.update(k, v, layer_idx, request=request)[0]
    # begin to copy the stored tokens of the next layer with a store; single tokens mostly go through steps instead
    if q.shape[2] > 1:
        for layer in cache.layers[layer_idx + 1 :]:
            if isinstance(layer, CondensedCacheLayer) and layer.fetch():
                break
    return context


def condensed_layer(cache: Cache, layer_idx: int, method: Method) -> CondensedLayer | StaticCondensedLayer:
    """Layer ``layer_idx`` of a cache, first made a layer of ``method`` if it is none; raises as `ensure_layers`."""
    layers: Any = getattr(cache, "layers", ())  # an encoder-decoder cache has none, and is refused
    if layer_idx >= len(layers) or getattr(layers[layer_idx], "method", None) is not method:
        ensure_layers(cache, {layer_idx: method})
    return layers[layer_idx]


def ensure_layers(cache: Cache, methods: dict[int, Method]) -> None:
    """Make ``cache.layers[i]`` a condensed layer of ``methods[i]``, unless it is one already.

    Raises ValueError, naming the way out, if the cache is of a kind that cannot be condensed or holds tokens
    that another attention put there; no layer is changed then.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise ValueError("encoder-decoder caches cannot be condensed: call condense.restore(model) first")
    if all(i < len(cache.layers) and _holds(cache.layers[i], method) for i, method in methods.items()):
        return
    if isinstance(cache, StaticCache):
        _check_static(cache, methods)
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= max(methods):
            cache.layers.append(cache.layer_class_to_replicate())
    # a model that leaves early (assistant_early_exit) has a cache for its first layers only
    held = ((i, method) for i, method in methods.items() if i < len(cache.layers))
    new = {i: method for i, method in held if not _is_ready(cache.layers[i], method)}
    static = (layer for layer in cache.layers if isinstance(layer, StaticLayer | StaticCondensedLayer))
    room = max((layer.max_cache_len for layer in static), default=0)  # in tokens; 0 for a cache that grows
    for index, method in new.items():
        layer = cache.layers[index]
        is_static = isinstance(layer, StaticLayer | StaticCondensedLayer)
        cache.layers[index] = StaticCondensedLayer(method, room) if is_static else CondensedLayer(method)
        cache.layers[index].is_sliding = layer.is_sliding  # transformers reads it to choose a layer's mask


def _check_static(cache: StaticCache, methods: dict[int, Method]) -> None:
    without = next((method for method in methods.values() if not method.has_step), None)
    if without is not None:
        raise ValueError(
            f"{without} attends in its own way, which the step of a static cache does not: leave cache_implementation "
            "unset, for a cache that grows"
        )
    if cache.offloading:
        raise ValueError(
            "offloaded static caches cannot be condensed: leave offloading out, a condensed cache is small enough"
        )


def _holds(layer: CacheLayerMixin, method: Method) -> bool:
    """True if the layer was filled by the method, or by one whose steps read as the method does (`Method.as_steps`)."""
    # most often it is the same object; comparing the fields of a dataclass takes longer
    return isinstance(layer, CondensedCacheLayer) and (
        layer.method is method or method in (layer.method, layer.method.as_steps)
    )


def _is_ready(layer: CacheLayerMixin, method: Method) -> bool:
    """True if the layer can stay, False if it can be replaced. Raises ValueError if neither."""
    if _holds(layer, method):
        return True
    condensed = isinstance(layer, CondensedCacheLayer)
    windows = (cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticSlidingWindowLayer)
    own = windows if isinstance(method, StreamingLLM | LocalChunks) else ()
    if not condensed and type(layer) not in (DynamicLayer, StaticLayer, *own):
        raise ValueError(
            f"a {type(layer).__name__} cannot be condensed: use a plain DynamicCache (cache_implementation unset), or "
            "call condense.restore(model) first"
        )
    if layer.get_seq_length() > 0 and condensed:
        # the error names no settings, because the first layer's are not those that the user gave (`Method.of_layer`)
        held, new = type(layer.method).__name__, type(method).__name__
        other = "with other settings" if held == new else f"not {new}"
        raise ValueError(f"the cache already holds tokens condensed by {held}, {other}; give the model a new cache")
    if layer.get_seq_length() > 0:
        # the error names no method, because nobody chose the method of a layer with a sliding window
        raise ValueError(
            "the cache already holds dense entries (from a stock model, or from prefix tuning, which condensed "
            "attention does not support); give the model a new cache: none, or DynamicCache(config=model.config)"
        )
    return False
