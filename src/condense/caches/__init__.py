"""Condensed cache layers for transformers: growing ones, and static ones for CUDA graphs."""

from condense.caches.base import CACHE, CondensedCacheLayer, Expected, ReadRequest, cache_nbytes
from condense.caches.growing import CondensedLayer
from condense.caches.static import StaticCondensedLayer
