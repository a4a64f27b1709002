"""Hugging Face transformers: condensed attention in stock models, without copied forwards."""

from condense.models.apply import apply, condensed_layers, restore, use
from condense.models.hooks import install

__all__ = ["apply", "condensed_layers", "install", "restore", "use"]
