"""Finding the cheapest method for every layer of a model that keeps its quality on a given text."""

from condense.calibration.config import CalibrationConfig, default_candidates
from condense.calibration.report import Calibration, CurvePoint, LayerLoss
from condense.calibration.run import calibrate
