"""Vectors of 4 bits as words of any number, in parts whose widths are powers of two.

The D / 4 words of a vector are cut into two pieces, as rows of any width are (`condense.ops.triton.device.parts`): 144
words are 128 + 16. The first piece is in the four parts of `condense.ops.triton.device.codes.to_words`. The rest, if
there is one, is one part: the four columns of each of its words stand side by side.

Shapes: n rows of a tile, D width of vectors, P columns of a part.
"""

import triton
import triton.language as tl

from condense.ops.triton.device.parts import tile_width


@triton.constexpr_function
def word_pieces(D):
    """Words of both pieces of a vector: the largest power of two of them, and those that are left."""
    first = 1 << ((D // 4).bit_length() - 1)
    return first, D // 4 - first


@triton.constexpr_function
def num_parts(D):
    """Parts of a vector."""
    return 5 if word_pieces(D)[1] > 0 else 4


@triton.jit
def beside(x):
    """The part of the rest, ``[n, 4 P]``, of its four parts ``[n, P]``."""
    columns = tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))  # [n, P, 2, 2]
    return tl.reshape(columns, (x[0].shape[0], 4 * x[0].shape[1]))


@triton.jit
def part_columns(PART: tl.constexpr, D: tl.constexpr):
    """The columns that are in a part, in its order, ``[P]``; D where there is none."""
    pieces: tl.constexpr = word_pieces(D)
    if PART < 4:
        return 2 * tl.arange(0, pieces[0]) + (PART % 2 * (D // 2) + PART // 2)
    else:
        c = tl.arange(0, 4 * tile_width(pieces[1]))
        word = pieces[0] + c // 4
        return tl.where(word < D // 4, 2 * word + c // 2 % 2 * (D // 2) + c % 2, D)


@triton.jit
def no_sums(N: tl.constexpr, D: tl.constexpr):
    """Zeros ``[P, N]`` for all parts."""
    x = ()
    for part in tl.static_range(num_parts(D)):
        x = x + (tl.zeros([part_columns(part, D).shape[0], N], tl.float32),)  # noqa: RUF005
    return x


@triton.jit
def load_parts(ptr, at, inside, D: tl.constexpr):
    """Load the vectors of numbers that begin at ``ptr + at``, in parts ``[n, P]``; zeros where not inside."""
    x = ()
    for part in tl.static_range(num_parts(D)):
        d = part_columns(part, D)
        there = inside[:, None] & (d < D)[None, :]
        x = x + (tl.load(ptr + at[:, None] + d[None, :], mask=there, other=0.0),)  # noqa: RUF005
    return x


@triton.jit
def store_sums(ptr, x, inside, V: tl.constexpr, D: tl.constexpr):
    """Store the first V columns of sums ``[P, n]`` that are inside, at pointers ``ptr`` ``[n]``, in order."""
    for part in tl.static_range(num_parts(D)):
        d = part_columns(part, D)
        tl.store(ptr[None, :] + d[:, None], x[part], mask=inside[None, :] & (d < V)[:, None])
