"""Condensed cache layers for transformers: growing ones, and static ones for CUDA graphs."""

from condense.caches.growing import CondensedLayer
from condense.caches.nbytes import cache_nbytes
from condense.caches.request import ReadRequest, read_request
from condense.caches.static import StaticCondensedLayer

__all__ = ["CondensedLayer", "ReadRequest", "StaticCondensedLayer", "cache_nbytes", "read_request"]
