"""Measuring attention, dense and condensed: sparsity, error of keys and values, noise, conditioning, cost."""

from condense.analysis.conditioning import Conditioning, conditioning, counterexample, measure_conditioning
from condense.analysis.cost import Cost, keys_read, measure_cost
from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation, stretches
from condense.analysis.noise import VARIANCES, noise_effect
from condense.analysis.patterns import HeadPattern, patterns_by_layer, save_patterns, search_patterns
from condense.analysis.recall import LayerRecall, measure_recall
from condense.analysis.sparsity import EDGES, LayerSparsity, measure_sparsity

__all__ = [
    "EDGES",
    "VARIANCES",
    "Conditioning",
    "Cost",
    "Deviation",
    "HeadPattern",
    "LayerDeviation",
    "LayerRecall",
    "LayerSparsity",
    "VectorDeviation",
    "conditioning",
    "counterexample",
    "keys_read",
    "measure_conditioning",
    "measure_cost",
    "measure_deviation",
    "measure_recall",
    "measure_sparsity",
    "noise_effect",
    "patterns_by_layer",
    "save_patterns",
    "search_patterns",
    "stretches",
]
