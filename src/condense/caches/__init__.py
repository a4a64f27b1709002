"""Condensed cache layers for transformers: growing ones, and static ones for CUDA graphs."""

from condense.caches.base import CondensedCacheLayer
from condense.caches.growing import CondensedLayer
from condense.caches.growing_recall import RecallLayer
from condense.caches.nbytes import cache_nbytes
from condense.caches.request import ReadRequest, read_request
from condense.caches.static import Expected, StaticCondensedLayer
from condense.caches.static_recall import StaticRecallLayer

__all__ = [
    "CondensedCacheLayer",
    "CondensedLayer",
    "Expected",
    "ReadRequest",
    "RecallLayer",
    "StaticCondensedLayer",
    "StaticRecallLayer",
    "cache_nbytes",
    "read_request",
]
