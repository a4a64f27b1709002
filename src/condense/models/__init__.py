"""Hugging Face transformers: condensed attention in stock models, without copied forwards."""

from condense.models.apply import (
    MethodChoice,
    apply,
    attention_layers,
    condensed_layers,
    methods_of,
    restore,
    use,
    use_choice,
)
from condense.models.graph import GraphDecoder
from condense.models.hooks import install
from condense.models.registration import register

__all__ = [
    "GraphDecoder",
    "MethodChoice",
    "apply",
    "attention_layers",
    "condensed_layers",
    "install",
    "methods_of",
    "register",
    "restore",
    "use",
    "use_choice",
]
