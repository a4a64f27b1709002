"""Hugging Face transformers: condensed attention in stock models, without copied forwards."""

from condense.models.apply import MethodChoice, apply, attention_layers, condensed_layers, restore, use
from condense.models.graph import GraphDecoder
from condense.models.hooks import install

__all__ = ["GraphDecoder", "MethodChoice", "apply", "attention_layers", "condensed_layers", "install", "restore", "use"]
