"""Training from scratch and adapting saved models, with dense and condensed steps on the same weights."""

from condense.train.config import PhaseConfig, TrainConfig
from condense.train.recipes import PRESETS, RECIPES, read_recipe
from condense.train.run import new_model, prepare, run_training
from condense.train.tokenizer import train_tokenizer
