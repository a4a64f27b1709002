"""Long prompts in `generate` and `GraphDecoder`: norms and rotations compiled, feed-forward modules in pieces.

A feed-forward module makes numbers three to four times as wide as a token, which for a whole prompt of 131,072 tokens
takes more memory than all else. It reads each token by itself, so it can read them piece by piece.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from condense.models.fused import OF_MODELS, Form, fused, is_stock

# fewest tokens of a prompt that is read so, and most tokens of a piece
_LONG, _PIECE = 2**15, 2**14


@contextmanager
def long_prompt(model: PreTrainedModel, rows: int, tokens: int) -> Iterator[None]:
    """For the length of a ``with`` block, read prompts with norms and rotations as `condense.models.fused` compiles
    them, and with feed-forward modules of at most `_PIECE` tokens. Results differ by rounding.

    tokens: the most that one forward reads of a row. If it reads fewer than `_LONG` in all, nothing is changed.
    """
    if rows * tokens < _LONG:
        yield
        return
    with fused(model, (rows, tokens), Form.PROMPT), _feed_forward_in_pieces(model):
        yield


@contextmanager
def _feed_forward_in_pieces(model: nn.Module) -> Iterator[None]:
    modules = [module for module in model.modules() if _is_feed_forward(module)]
    for module in modules:
        module.forward = MethodType(_in_pieces(type(module).forward), module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _is_feed_forward(module: nn.Module) -> bool:
    """True for a feed-forward module of transformers that reads tokens alone, and that nothing was added to."""
    cls = type(module)
    is_named = cls.__module__.startswith(OF_MODELS) and cls.__name__.endswith("MLP") and not hasattr(module, "experts")
    return is_named and is_stock(module) and len(inspect.signature(cls.forward).parameters) == 2


def _in_pieces(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward of ``x [..., L, D]`` that calls ``forward`` with at most `_PIECE` tokens."""

    def read(module: nn.Module, x: Tensor) -> Tensor:
        pieces = -(-x.shape[:-1].numel() // _PIECE)
        if pieces <= 1:
            return forward(module, x)
        return torch.cat([forward(module, piece.contiguous()) for piece in x.chunk(pieces, -2)], -2)

    return read
