"""The index of Recall: a sign per number of each stored key, from which a query's score of a token is estimated.

Keys are turned by a fixed rotation, which keeps products and spreads what a key says evenly over its numbers, and of a
turned key the signs are kept and one step: the number that stands for all of them (after RaBitQ, arXiv:2405.12497).
Queries are turned too and rounded to 8 bits, so that a product with signs is a whole number, the same to the bit in all
backends. What is kept of a token depends on its key alone, so that the index of new groups can be appended.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, D key width, W = ceil(D / 8) bytes of signs.
"""

import functools
import random
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

# whole numbers up to this stand for the numbers of a query: bfloat16 holds them too
QUERY_LEVELS = 127


class GroupIndex(NamedTuple):
    """The index of G groups; dimension 2 of both tensors counts groups, as in the entries.

    signs uint8 ``[B, K, G, g * W]``, token by token: bit i of a token's byte c is set if column ``i * W + c`` of its
    turned key is not negative. steps ``[B, K, G, g]`` in the dtype of the keys.
    """

    signs: Tensor
    steps: Tensor

    def narrow(self, start: int, stop: int) -> Self:
        """Groups ``[start, stop)``, a view."""
        return type(self)(*(x[:, :, start:stop] for x in self))

    def turned(self, D: int, dtype: torch.dtype) -> Tensor:
        """The signs of all tokens as 1 and -1, ``[B, K, G, g, D]`` in ``dtype``."""
        bytes = self.signs.unflatten(3, (self.steps.shape[3], 1, -1))
        bit = torch.arange(8, device=bytes.device, dtype=torch.uint8)[:, None]
        return ((bytes >> bit) & 1).flatten(4)[..., :D].to(dtype) * 2 - 1


def sign_bytes(D: int) -> int:
    """Bytes of the signs of a key of width D, W."""
    return -(-D // 8)


def block_width(D: int) -> int:
    """Columns that `rotation` mixes with each other: the largest power of two that divides D, at most 128."""
    return min(D & -D, 128)


@torch.compiler.assume_constant_result  # a trace takes the matrix as it is
def rotation(D: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rotation times the square root of its blocks' width, ``[D, D]``: a vector x is turned by ``x @ it``.

    Hadamard matrices of `block_width` columns along the diagonal, of 1 and -1, so that products with whole numbers are
    whole; rows have fixed random signs, so that keys of a plain form, such as all ones, are spread too.
    """
    return _rotation(D, device, dtype)


@functools.cache
def _rotation(D: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    P = block_width(D)
    block = torch.ones(1, 1)
    while len(block) < P:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    drawn = random.Random(0)  # the same numbers in all versions of Python
    signs = torch.tensor([1.0 if drawn.random() < 0.5 else -1.0 for _ in range(D)])
    return (signs[:, None] * torch.block_diag(*[block] * (D // P))).to(device, dtype)


@torch.no_grad()
def build_index(k_groups: Tensor) -> GroupIndex:
    """The index of groups of keys ``[B, K, G, g, D]``, of any floating dtype. No gradient.

    A token's step keeps its key's product with itself: it is ``sum(x ** 2) / sum(abs(x))`` of the turned key x.
    """
    D = k_groups.shape[4]
    W = sign_bytes(D)
    wide = k_groups.to(torch.promote_types(k_groups.dtype, torch.float32))
    x = wide @ rotation(D, wide.device, wide.dtype)
    # divided by the block's width, as products of two turned vectors are that many times too large
    total = x.abs().sum(4).clamp(min=torch.finfo(x.dtype).tiny) * block_width(D)
    bits = F.pad((x >= 0).to(torch.uint8), (0, 8 * W - D)).unflatten(4, (8, W))
    place = torch.arange(8, device=x.device, dtype=torch.uint8)[:, None]
    signs = (bits << place).sum(4, dtype=torch.uint8)
    return GroupIndex(signs.flatten(3), (x.square().sum(4) / total).to(k_groups.dtype))


@torch.no_grad()
def turned_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Queries ``[..., D]`` as an index is scored with: whole numbers up to `QUERY_LEVELS` and what one of them stands
    for, ``[..., D]`` and ``[..., 1]`` in float32 or wider. No gradient.
    """
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    x = wide @ rotation(q.shape[-1], q.device, wide.dtype)
    # CUDA divides by a constant as it multiplies by its inverse: written out, so that CPUs round alike
    unit = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny * QUERY_LEVELS) * (1 / QUERY_LEVELS)
    return (x / unit).round(), unit
