"""Measuring attention, dense and condensed: sparsity, error of keys and values, noise, conditioning, cost."""

from condense.analysis.conditioning import Conditioning, conditioning, counterexample
from condense.analysis.cost import Cost, Heads, keys_read, measure_cost
from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation
from condense.analysis.noise import noise_effect
from condense.analysis.patterns import HeadPattern, patterns_by_layer, save_patterns, search_patterns
from condense.analysis.recall import LayerRecall, measure_recall
from condense.analysis.sparsity import LayerSparsity, measure_sparsity

__all__ = [
    "Conditioning",
    "Cost",
    "Deviation",
    "HeadPattern",
    "Heads",
    "LayerDeviation",
    "LayerRecall",
    "LayerSparsity",
    "VectorDeviation",
    "conditioning",
    "counterexample",
    "keys_read",
    "measure_cost",
    "measure_deviation",
    "measure_recall",
    "measure_sparsity",
    "noise_effect",
    "patterns_by_layer",
    "save_patterns",
    "search_patterns",
]
