"""Putting condensed layers into transformers' caches, and refusing what cannot work."""

from __future__ import annotations

from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, StaticCache

from condense.caches import CondensedLayer
from condense.methods import Method


def ensure_layer(cache: Cache, layer_idx: int, method: Method) -> None:
    """Make ``cache.layers[layer_idx]`` a condensed layer of ``method``, if it is not one already.

    Raises ValueError, naming the way out, if the cache is of a kind that cannot be condensed or holds tokens
    that another attention put there.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise ValueError("encoder-decoder caches cannot be condensed: call condense.restore(model) first")
    if isinstance(cache, StaticCache):
        raise ValueError(
            "static caches cannot be condensed yet: leave cache_implementation unset, a condensed cache stays small "
            "while it grows"
        )
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if isinstance(layer, CondensedLayer) and layer.method == method:
        return
    if not isinstance(layer, CondensedLayer) and type(layer) is not DynamicLayer:
        raise ValueError(
            f"a {type(layer).__name__} cannot be condensed: use a plain DynamicCache (cache_implementation unset), or "
            "call condense.restore(model) first"
        )
    if layer.get_seq_length() > 0:
        held = (
            f"tokens condensed by {layer.method}"
            if isinstance(layer, CondensedLayer)
            else (
                "dense entries (from a stock model, or from prefix tuning, which condensed attention does not support)"
            )
        )
        raise ValueError(f"the cache already holds {held}; start {method} from an empty cache")
    cache.layers[layer_idx] = CondensedLayer(method)
