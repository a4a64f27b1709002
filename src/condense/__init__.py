"""Condensed attention: far tokens pooled into representatives, near tokens exact, one softmax over both.

model = AutoModelForCausalLM.from_pretrained(name)
condense.apply(model, condense.CCA(group_size=16, window=1024))
model.generate(**inputs)
"""

from importlib.metadata import version as _version

from condense.caches import cache_nbytes
from condense.functional import attention
from condense.methods import CCA, LCA, Dense, LMInfinite, Method, StreamingLLM
from condense.models import apply, install, restore, use

__version__ = _version("condense-attention")

install()

__all__ = [
    "CCA",
    "LCA",
    "Dense",
    "LMInfinite",
    "Method",
    "StreamingLLM",
    "apply",
    "attention",
    "cache_nbytes",
    "restore",
    "use",
]
