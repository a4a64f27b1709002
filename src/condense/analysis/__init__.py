"""Measuring attention, dense and condensed: error of keys and values, what Recall opens, patterns of sparse prefill."""

from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation, stretches
from condense.analysis.patterns import HeadPattern, patterns_by_layer, save_patterns, search_patterns
from condense.analysis.recall import LayerRecall, measure_recall

__all__ = [
    "Deviation",
    "HeadPattern",
    "LayerDeviation",
    "LayerRecall",
    "VectorDeviation",
    "measure_deviation",
    "measure_recall",
    "patterns_by_layer",
    "save_patterns",
    "search_patterns",
    "stretches",
]
