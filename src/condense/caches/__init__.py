"""State over time: condensed cache layers for transformers."""

from condense.caches.dynamic import CondensedLayer
from condense.caches.nbytes import cache_nbytes

__all__ = ["CondensedLayer", "cache_nbytes"]
