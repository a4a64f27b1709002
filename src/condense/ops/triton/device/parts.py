"""Rows of any width in tiles whose width is a power of two: 192 columns are 128 + 64, 80 are 64 + 16.

A tile of rows is a tuple of one or two tensors ``[n, P]``, its parts. One tile of 256 or 128 columns would load and
multiply columns that do not exist. D0 and D1 are the widths of the parts, D1 = 0 if there is only one; P is the width
of a part rounded up to a power of two, at least 16, as tensor cores need.
"""

import triton
import triton.language as tl


def split_width(width: int) -> tuple[int, int]:
    """Widths of both parts: the largest power of two <= width, and the rest. Widths below 32 are not split."""
    first = min(width, max(32, 1 << (width.bit_length() - 1)))
    return first, width - first


def key_value_parts(D: int, Dv: int, latent: int) -> tuple[int, int, int, int]:
    """Widths of the parts of keys and of values; the values of latents are the first ``latent`` columns of the keys."""
    return (latent, D - latent, latent, 0) if latent else (*split_width(D), *split_width(Dv))


@triton.constexpr_function
def tile_width(width):
    """Columns of a tile that holds ``width`` columns."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def parts(first, rest):
    """``(first, rest)``, or ``(first,)`` if ``rest`` is None."""
    if rest is None:
        return (first,)
    else:
        return (first, rest)


@triton.jit
def zeros(N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Zeros for N rows in parts, float32 ``[N, P]``: new accumulators."""
    first = tl.zeros([N, tile_width(D0)], tl.float32)
    return parts(first, tl.zeros([N, tile_width(D1)], tl.float32) if D1 > 0 else None)


@triton.jit
def _load_columns(ptr, at, inside, LO: tl.constexpr, D: tl.constexpr):
    d = tl.arange(0, tile_width(D))
    ptr += LO + at[:, None] + d[None, :]
    if inside is not None:
        return tl.load(ptr, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    elif tile_width(D) == D:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=d[None, :] < D, other=0.0)


@triton.jit
def load_rows(ptr, at, inside, D0: tl.constexpr, D1: tl.constexpr):
    """Load the rows that begin at ``ptr + at``; zeros where not inside. inside: bool ``[n]``, None if all are."""
    first = _load_columns(ptr, at, inside, 0, D0)
    return parts(first, _load_columns(ptr, at, inside, D0, D1) if D1 > 0 else None)


@triton.jit
def _store_columns(ptr, at, x, inside, LO: tl.constexpr, D: tl.constexpr):
    d = tl.arange(0, tile_width(D))
    x = x.to(ptr.dtype.element_ty)
    tl.store(ptr + LO + at[:, None] + d[None, :], x, mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def store_rows(ptr, at, x, inside, D0: tl.constexpr, D1: tl.constexpr):
    """Store the rows x that are inside at ``ptr + at``, in the dtype of ``ptr``."""
    _store_columns(ptr, at, x[0], inside, 0, D0)
    if D1 > 0:
        _store_columns(ptr, at, x[1], inside, D0, D1)


@triton.jit
def load_row(ptr, D0: tl.constexpr, D1: tl.constexpr):
    """The row that begins at ``ptr``, ``[1, P]``."""
    return load_rows(ptr, tl.zeros([1], tl.int32), tl.full([1], True, tl.int1), D0, D1)


@triton.jit
def store_row(ptr, x, D0: tl.constexpr, D1: tl.constexpr):
    """Store the row x ``[1, P]`` at ``ptr``, as `load_row` reads it."""
    store_rows(ptr, tl.zeros([1], tl.int32), x, tl.full([1], True, tl.int1), D0, D1)


@triton.jit
def load_block(sources, at, N: tl.constexpr):
    """Load N rows from index ``at`` on. sources: one tensor descriptor per part, with any leading dimensions."""
    tiles = [source.load(at) for source in sources]
    return [tile.reshape(N, tile.shape[-1]) for tile in tiles]


@triton.jit
def products(a, b, PRECISION: tl.constexpr):
    """``a @ b.T`` of rows in parts: the product of every row of a with every row of b."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for part in tl.static_range(1, len(a)):
        s = tl.dot(a[part], tl.trans(b[part]), s, input_precision=PRECISION)
    return s


@triton.jit
def add_weighted(acc, weights, x, PRECISION: tl.constexpr):
    """``acc + weights @ x`` for rows x in parts; weights are rounded to the dtype of x."""
    weights, sums = weights.to(x[0].dtype), ()
    for part in tl.static_range(len(acc)):
        sums += (tl.dot(weights, x[part], acc[part], input_precision=PRECISION),)
    return sums
