"""Measuring how much condensing changes a model's keys and values."""

from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation

__all__ = ["Deviation", "LayerDeviation", "VectorDeviation", "measure_deviation"]
