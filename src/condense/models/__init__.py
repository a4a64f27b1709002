"""Hugging Face transformers: condensed attention in stock models, without copied forwards."""

from condense.models.apply import apply, chosen_methods, restore, use
from condense.models.choice import MethodChoice, as_steps, choice_from_text, described, methods_of, parse_choice
from condense.models.graph import GraphDecoder
from condense.models.hooks import install
from condense.models.modules import attention_layers, check_stock, condensed_layers
from condense.models.registration import in_eval_mode, register
from condense.models.watch import closed_mass
