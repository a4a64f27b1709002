"""Attention methods: settings, the layout of chunks and window, and how a chunk becomes entries."""

from condense.methods.base import Context, Method, Prompt, check_trainable, split_bias, step_settings
from condense.methods.dga import DGA
from condense.methods.exact import Dense, LMInfinite, StreamingLLM
from condense.methods.grouped import CCA, LCA
from condense.methods.layout import NO_FIRST, ChunkPooling, FirstEntries, Layout, Lookahead, first_tokens
from condense.methods.recall import Recall
from condense.methods.reread import Reread
from condense.methods.saved import check_names, layers_as_text, methods_in, settings_of
from condense.ops import Chunks
