"""Measuring what condensing changes: keys and values by pooling, attention's weights by Recall."""

from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation
from condense.analysis.recall import LayerRecall, measure_recall

__all__ = ["Deviation", "LayerDeviation", "LayerRecall", "VectorDeviation", "measure_deviation", "measure_recall"]
