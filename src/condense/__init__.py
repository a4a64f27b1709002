"""Attention over long contexts in a fraction of the cache, on a model's own weights.

model = AutoModelForCausalLM.from_pretrained(name)
condense.apply(model, "recall-device")  # Recall, which needs no training; `condense methods` lists other names
model.generate(**inputs)

`Recall` keeps every token and opens for each query the few groups that matter to it. Pooling (`CCA`, `LCA`, `DGA`) is
for models that were adapted to it (`condense train adapt`): one entry stands for a group of far tokens.
"""

from condense.baselines import AShape, BlockSparse, FlexPrefill, MInference, SnapKV, VerticalSlash
from condense.caches import cache_nbytes
from condense.calibration import Calibration, CalibrationConfig, calibrate
from condense.demo import demo_model
from condense.functional import attention
from condense.latent import latent_attention
from condense.methods import CCA, DGA, LCA, Dense, LMInfinite, Method, Recall, Reread, StreamingLLM
from condense.models import GraphDecoder, apply, closed_mass, install, register, restore, use
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
    "Reread",
    "SnapKV",
    "StreamingLLM",
    "VerticalSlash",
    "__version__",
    "apply",
    "attention",
    "cache_nbytes",
    "calibrate",
    "closed_mass",
    "demo_model",
    "latent_attention",
    "register",
    "restore",
    "use",
]
