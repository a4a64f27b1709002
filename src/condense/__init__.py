"""Condensed attention: far tokens pooled in groups into one entry each, near tokens exact, one softmax over both.

model = AutoModelForCausalLM.from_pretrained(name)
condense.apply(model, condense.CCA(group_size=16, window=1024))
model.generate(**inputs)
"""

from condense.baselines import AShape, BlockSparse, FlexPrefill, MInference, SnapKV, VerticalSlash
from condense.caches import cache_nbytes
from condense.calibration import Calibration, CalibrationConfig, calibrate
from condense.demo import demo_model
from condense.functional import attention
from condense.latent import latent_attention
from condense.methods import CCA, DGA, LCA, Dense, LMInfinite, Method, Recall, StreamingLLM
from condense.models import GraphDecoder, apply, install, register, restore, use
from condense.version import __version__

install()

__all__ = [
    "CCA",
    "DGA",
    "LCA",
    "AShape",
    "BlockSparse",
    "Calibration",
    "CalibrationConfig",
    "Dense",
    "FlexPrefill",
    "GraphDecoder",
    "LMInfinite",
    "MInference",
    "Method",
    "Recall",
    "SnapKV",
    "StreamingLLM",
    "VerticalSlash",
    "__version__",
    "apply",
    "attention",
    "cache_nbytes",
    "calibrate",
    "demo_model",
    "latent_attention",
    "register",
    "restore",
    "use",
]
