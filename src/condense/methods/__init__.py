"""Attention methods, one file each: settings, the layout of chunks and window, and how a chunk becomes entries."""

from condense.methods.base import Context, Method, Prompt, check_trainable, entry_bias, split_bias, step_settings
from condense.methods.cca import CCA
from condense.methods.dense import Dense
from condense.methods.dga import DGA
from condense.methods.flex_prefill import FlexPrefill
from condense.methods.layout import NO_FIRST, ChunkPooling, FirstEntries, Layout, Lookahead, first_tokens
from condense.methods.lca import LCA
from condense.methods.lm_infinite import LMInfinite
from condense.methods.minference import AShape, BlockSparse, MInference, VerticalSlash
from condense.methods.recall import Recall
from condense.methods.saved import check_names, methods_in, settings_of
from condense.methods.snapkv import SnapKV
from condense.methods.sparse_prefill import SparsePrefill
from condense.methods.streaming_llm import StreamingLLM
from condense.ops import Chunks

__all__ = [
    "CCA",
    "DGA",
    "LCA",
    "NO_FIRST",
    "AShape",
    "BlockSparse",
    "ChunkPooling",
    "Chunks",
    "Context",
    "Dense",
    "FirstEntries",
    "FlexPrefill",
    "LMInfinite",
    "Layout",
    "Lookahead",
    "MInference",
    "Method",
    "Prompt",
    "Recall",
    "SnapKV",
    "SparsePrefill",
    "StreamingLLM",
    "VerticalSlash",
    "check_names",
    "check_trainable",
    "entry_bias",
    "first_tokens",
    "methods_in",
    "settings_of",
    "split_bias",
    "step_settings",
]
