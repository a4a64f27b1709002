"""Evaluating a model under several attention methods, on the same questions and texts."""

from condense.evaluate.intervals import Proportion
from condense.evaluate.retrieval import RetrievalResult, passkey_sequences, retrieval
from condense.evaluate.text_loss import TextLossResult, text_loss, text_sequences

__all__ = [
    "Proportion",
    "RetrievalResult",
    "TextLossResult",
    "passkey_sequences",
    "retrieval",
    "text_loss",
    "text_sequences",
]
