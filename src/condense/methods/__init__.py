"""One file per method: its settings, who sees what, how tokens become representatives."""

from condense.methods.base import ChunkPooling, Method
from condense.methods.cca import CCA
from condense.methods.dense import Dense
from condense.methods.dga import DGA
from condense.methods.latent import for_latents
from condense.methods.lca import LCA
from condense.methods.lm_infinite import LMInfinite
from condense.methods.streaming_llm import StreamingLLM

__all__ = ["CCA", "DGA", "LCA", "ChunkPooling", "Dense", "LMInfinite", "Method", "StreamingLLM", "for_latents"]
