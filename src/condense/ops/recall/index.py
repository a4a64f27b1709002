"""The index of Recall: centres and signs of stored keys, from which a query's scores of tokens are estimated.

Keys are rotated: multiplied by a fixed orthogonal matrix, which keeps products and spreads a key's information evenly
over its numbers. A group has a *centre*, the mean of its rotated keys in 4 bits per number. Of each key the index keeps
the difference from the centre: the signs of its numbers, and one step, their size (after RaBitQ, arXiv:2405.12497).
Without centres, signs would say little about keys that have a large part in common, as those of trained models have.
Queries are rotated too and rounded to 8 bits, so that products with signs and with codes are whole numbers, the same to
the bit in all backends. The index of a group depends on its keys alone, so new groups can be appended.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, D key width, W = ceil(D / 8) bytes of signs.
"""

import functools
import random
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.tensors.codes import from_bytes, to_bytes

# a query's numbers are rounded to whole numbers up to this, which bfloat16 holds exactly
QUERY_LEVELS = 127
# a number of a centre is ``2 * code - CENTRE_LEVELS`` steps
CENTRE_LEVELS = 15
# last bits of a float32 number that are 0 in a centre's step, so that bfloat16 holds the numbers of a centre
CENTRE_DROPPED = 20
_BELOW = (1 << CENTRE_DROPPED) - 1


class GroupIndex(NamedTuple):
    """The index of G groups; dimension 2 of both tensors counts groups.

    signs uint8 ``[B, K, G, (g + 4) * W]``: first those of the tokens, one after another: bit i of a token's byte c is
    set if its rotated key is not below the centre in column ``i * W + c``. Then the 4-bit codes of the centre, of ``8 *
    W`` columns (`condense.ops.tensors.codes`). steps ``[B, K, G, g + 1]`` in the dtype of the keys, the centre's last.
    """

    signs: Tensor
    steps: Tensor

    @property
    def group_size(self) -> int:
        """Tokens per group, g."""
        return self.steps.shape[3] - 1

    def narrow(self, start: int, stop: int) -> Self:
        """Groups ``[start, stop)``, a view."""
        return type(self)(*(x[:, :, start:stop] for x in self))

    def token_signs(self, D: int, dtype: torch.dtype) -> Tensor:
        """The signs of all tokens as 1 and -1, ``[B, K, G, g, D]`` in ``dtype``."""
        g = self.group_size
        bytes = self.signs[..., : g * sign_bytes(D)].unflatten(3, (g, 1, -1))
        bit = torch.arange(8, device=bytes.device, dtype=torch.uint8)[:, None]
        return ((bytes >> bit) & 1).flatten(4)[..., :D].to(dtype).mul_(2).sub_(1)

    def centres(self, D: int, dtype: torch.dtype) -> Tensor:
        """The numbers of all centres in steps, whole numbers, ``[B, K, G, D]`` in ``dtype``."""
        return from_bytes(self.signs[..., self.group_size * sign_bytes(D) :], 4)[..., :D].to(dtype) * 2 - CENTRE_LEVELS

    def opened(self, groups: Tensor) -> Self:
        """The index of some groups, by their numbers ``[B, K, r]``."""
        return type(self)(*(x.gather(2, groups[..., None].expand(-1, -1, -1, x.shape[3])) for x in self))


def sign_bytes(D: int) -> int:
    """Bytes of the signs of a key of width D, W."""
    return -(-D // 8)


def index_widths(g: int, D: int) -> tuple[int, int]:
    """Columns of the signs and of the steps of a group of g keys of width D."""
    # kernels call this, so it may not call Python functions
    return (g + 4) * -(-D // 8), g + 1


def block_width(D: int) -> int:
    """Columns that `rotation` mixes with each other: the largest power of two that divides D, at most 128."""
    return min(D & -D, 128)


@torch.compiler.assume_constant_result  # torch.compile takes the matrix as a constant
def rotation(D: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rotation times the square root of its blocks' width, ``[D, D]``: a vector x is rotated by ``x @ it``.

    Hadamard matrices of `block_width` columns along the diagonal, of 1 and -1, so that products with whole numbers are
    whole; rows have fixed random signs, so that keys of a plain form, such as all ones, are spread too.
    """
    return _rotation(D, device, dtype)


@functools.cache
def _rotation(D: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    P = block_width(D)
    block = torch.ones(1, 1, device="cpu")
    while len(block) < P:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    drawn = random.Random(0)  # the same numbers in all versions of Python
    signs = torch.tensor([1.0 if drawn.random() < 0.5 else -1.0 for _ in range(D)], device="cpu")
    return (signs[:, None] * torch.block_diag(*[block] * (D // P))).to(device, dtype)


@torch.no_grad()
def split_keys(k_groups: Tensor) -> tuple[GroupIndex, Tensor]:
    """The index of groups of keys ``[B, K, G, g, D]``, of any floating dtype, and the differences of the rotated keys
    from their centre, ``[B, K, G, g, D]`` in float32 or wider. No gradient.

    A token's step is ``sum(x ** 2) / sum(abs(x))`` for x, its rotated key minus the centre, divided by P: so the
    product of x with ``step * sign(x)`` is that of x with itself, over P. A centre's step is rounded up to 4
    significant bits.
    """
    (*_, g, D), dtype = k_groups.shape, k_groups.dtype
    W, P = sign_bytes(D), block_width(D)
    wide = k_groups.to(torch.promote_types(dtype, torch.float32))
    x = wide @ rotation(D, wide.device, wide.dtype)
    tiny = torch.finfo(x.dtype).tiny
    # the rotation multiplies products by P, the width of its blocks, so steps are divided by P
    mean = x.sum(3) * (1 / g)
    step = (mean.abs().amax(3, keepdim=True) * (1 / (CENTRE_LEVELS * P))).float().view(torch.int32)
    step = ((step + _BELOW) & ~_BELOW).view(torch.float32).to(dtype)
    unit = step.to(x.dtype) * P
    codes = (mean / (2 * unit).clamp(min=tiny) + (CENTRE_LEVELS + 1) / 2).floor().clamp(0, CENTRE_LEVELS)
    x = x - (unit * (2 * codes - CENTRE_LEVELS))[:, :, :, None]
    total = x.abs().sum(4).clamp(min=tiny) * P
    steps = torch.cat([(x.square().sum(4) / total).to(dtype), step], dim=3)
    bits = F.pad((x >= 0).to(torch.uint8), (0, 8 * W - D)).unflatten(4, (8, W))
    place = torch.arange(8, device=x.device, dtype=torch.uint8)[:, None]
    signs = (bits << place).sum(4, dtype=torch.uint8).flatten(3)
    of_centre = to_bytes(F.pad(codes.to(torch.uint8), (0, 8 * W - D)), 4)
    return GroupIndex(torch.cat([signs, of_centre], dim=3), steps), x


@torch.no_grad()
def rotated_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries ``[..., D]`` in whole numbers up to `QUERY_LEVELS`, and the value of 1 in these numbers,
    ``[..., 1]``; both float32 or wider. No gradient.
    """
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    x = wide @ rotation(q.shape[-1], q.device, wide.dtype)
    # CUDA replaces a division by a constant by a product with its inverse: written out, so that CPUs round alike
    unit = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny * QUERY_LEVELS) * (1 / QUERY_LEVELS)
    return (x / unit).round(), unit
