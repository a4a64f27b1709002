"""State over time: condensed cache layers for transformers."""

from condense.caches.growing import CondensedLayer
from condense.caches.nbytes import cache_nbytes
from condense.caches.request import ReadRequest, read_request
from condense.caches.static import StaticCondensedLayer

__all__ = ["CondensedLayer", "ReadRequest", "StaticCondensedLayer", "cache_nbytes", "read_request"]
