"""Evaluation mode in a ``with`` block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for the length of a ``with`` block; afterwards each module is in the mode it was in before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
