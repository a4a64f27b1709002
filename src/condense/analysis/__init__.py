"""Looking into models: what condensing does to keys and values."""

from condense.analysis.deviation import Deviation, LayerDeviation, VectorDeviation, measure_deviation

__all__ = ["Deviation", "LayerDeviation", "VectorDeviation", "measure_deviation"]
