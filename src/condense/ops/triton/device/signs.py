"""Recall's index in kernels: sign bits and a quantization step per key, and a centre per group, see
`condense.ops.recall.index`.

Keys and queries are rotated: multiplied by a matrix ``[D, D]`` in their dtype, whose blocks along
the diagonal hold 1 and -1. Only these blocks are read; all other numbers are 0.

Shapes: n tokens, D key width, W bytes of a token's signs, BR query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.recall import index
from condense.ops.triton.device.parts import tile_width

sign_bytes = triton.constexpr_function(index.sign_bytes)
block_width = triton.constexpr_function(index.block_width)
index_widths = triton.constexpr_function(index.index_widths)
_LEVELS = tl.constexpr(float(index.QUERY_LEVELS))
_CENTRE = tl.constexpr(index.CENTRE_LEVELS)
_BELOW = tl.constexpr((1 << index.CENTRE_DROPPED) - 1)
_UNIT = tl.constexpr(1 / index.QUERY_LEVELS)
TINY = tl.constexpr(2.0**-126)
# added to a float32 below 2 ** 22 and subtracted again, this rounds it to an integer, half to even
ROUNDING = tl.constexpr(1.5 * 2**23)
# a set bit, 2 ** (i - 24), times the integer 1 of a query, 2 ** (7 - i): see `_bits`
_BIT = tl.constexpr(2.0**-17)


@triton.jit
def floats_of(x):
    """int32 x, at most 2 ** 22 in size, as float32: by additions, for which a GPU has more units than to convert."""
    return (x + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDING


@triton.constexpr_function
def rotated_columns(D):
    """Columns that are rotated at a time: a multiple of the width of the rotation's blocks, at least 64."""
    return max(64, block_width(D))


@triton.jit
def _rotation(rotation_ptr, row, column, there, D: tl.constexpr):
    """Numbers of the rotation at ``row`` and ``column``, ``[rows, columns]``; 0 past row D and where not ``there``."""
    mask = (row < D)[:, None] & there[None, :]
    return tl.load(rotation_ptr + row[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _rotated_query(x, matrix):
    """Rotated queries ``x @ matrix``, float32 ``[n, columns]``. x ``[n, rows]``, matrix ``[rows, columns]``.

    A query's rounding error enters all of its scores. Float32 products are added in one chain, whose error grows with
    its length: so they are added in chains of 16, and the chains at the end.
    """
    if x.dtype.is_fp32() and x.shape[1] > 16:
        C: tl.constexpr = x.shape[1] // 16
        x = tl.permute(tl.reshape(x, (x.shape[0], C, 16)), (1, 0, 2))  # [C, n, 16]
        matrix = tl.reshape(matrix, (C, 16, matrix.shape[1]))
        return tl.sum(tl.dot(x, matrix, input_precision="ieee"), 0)
    else:
        return tl.dot(x, matrix, input_precision="ieee")


@triton.jit
def centre_unit(largest, dtype: tl.constexpr, D: tl.constexpr):
    """Quantization step of a centre in ``dtype``, from its largest size; and step times block width, float32."""
    places = (largest * (1 / (_CENTRE * block_width(D)))).to(tl.int32, bitcast=True)
    step = ((places + _BELOW) & ~_BELOW).to(tl.float32, bitcast=True).to(dtype)
    return step, step.to(tl.float32) * block_width(D)


@triton.jit
def centre_codes(mean, unit):
    """Codes 0 to 15, as float32, of a centre's numbers ``mean``. unit: the second result of `centre_unit`."""
    codes = tl.floor(tl.div_rn(mean, tl.zeros_like(mean) + tl.maximum(2 * unit, TINY)) + (_CENTRE + 1) / 2)
    return tl.minimum(tl.maximum(codes, 0.0), _CENTRE)


@triton.jit
def centre_numbers(codes, unit):
    """Numbers of a centre from its codes; unit as in `centre_codes`."""
    return unit * (2 * codes - _CENTRE)


@triton.jit
def key_steps(squares, sizes, D: tl.constexpr):
    """Quantization steps of tokens, float32, from sums of squares and absolute values of rotated key minus centre."""
    return tl.div_rn(squares, tl.maximum(sizes, TINY) * block_width(D))


@triton.constexpr_function
def _first_row(part, D):
    """First row of the rotation that is not 0 in the columns of `_rotated_part`; at most `_num_rows` rows are not 0."""
    P = block_width(D)
    return part * sign_bytes(D) // P * P


@triton.constexpr_function
def _num_rows(D):
    W, P = sign_bytes(D), block_width(D)
    return tile_width(max(-(-(part * W % P + W) // P) * P for part in range(8)))


@triton.jit
def _rotated_part(q_ptr, s_qh, r, R, rotation_ptr, part: tl.constexpr, D: tl.constexpr):
    """Columns ``[part * W, (part + 1) * W)`` of rotated query heads r, float32 ``[BR, W]`` padded to a tile.

    The index holds the signs of these columns in bit plane ``part``: bit ``part`` of all W bytes.
    """
    W: tl.constexpr = sign_bytes(D)
    c = tl.arange(0, tile_width(W))
    row = _first_row(part, D) + tl.arange(0, _num_rows(D))
    there = (r < R)[:, None] & (row < D)[None, :]
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + row[None, :], mask=there, other=0.0)  # [BR, rows]
    return _rotated_query(q, _rotation(rotation_ptr, row, part * W + c, (c < W) & (part * W + c < D), D))


@triton.jit
def _all_parts(q_ptr, s_qh, r, R, rotation_ptr, D: tl.constexpr):
    """All eight results of `_rotated_part`, each ``[BR, D // 8]``, from one product. For D = 128 alone."""
    d = tl.arange(0, D)
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + d[None, :], mask=(r < R)[:, None], other=0.0)
    x = tl.reshape(_rotated_query(q, _rotation(rotation_ptr, d, d, d < D, D)), (r.shape[0], 2, 2, 2, D // 8))
    even, odd = tl.split(tl.permute(x, (0, 4, 1, 2, 3)))  # [BR, D // 8, 2, 2]
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)  # [BR, D // 8]
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def unit_of(largest):
    """Scale of a rotated query's 8-bit integers: its largest absolute value divided by 127."""
    return tl.maximum(largest, TINY * _LEVELS) * _UNIT


@triton.jit
def whole_numbers(x, unit):
    """Integers, as float32, of rotated queries x: ``x / unit`` rounded half to even. unit: from `unit_of`."""
    return (tl.div_rn(x, tl.zeros_like(x) + unit) + ROUNDING) - ROUNDING


@triton.jit
def rotated_queries(q_ptr, s_qh, r, R, rotation_ptr, rotated_ptr, writes, D: tl.constexpr):
    """Rotate query heads r of one KV head and round them to 8 bits, as `condense.ops.recall.rotated_queries` does.

    Returns their integers in the eight float16 parts that `sign_products` takes, and the sum of the integers and the
    scale (`unit_of`) of each head, both float32 ``[BR]``. rotated_ptr: where the program stores the rotated queries
    before rounding, float32 ``[R, D]``, if it ``writes``; None: nowhere.
    """
    W: tl.constexpr = sign_bytes(D)
    parts, largest = (), tl.zeros([r.shape[0], tile_width(W)], tl.float32)
    if D == 128:
        parts = _all_parts(q_ptr, s_qh, r, R, rotation_ptr, D)
    else:
        for part in tl.static_range(8):
            parts += (_rotated_part(q_ptr, s_qh, r, R, rotation_ptr, part, D),)
    for part in tl.static_range(8):
        x = parts[part]  # [BR, bytes]
        if rotated_ptr is not None:
            c = tl.arange(0, tile_width(W))[None, :]
            there = (r < R)[:, None] & (c < W) & (part * W + c < D) & writes
            tl.store(rotated_ptr + r.to(tl.int64)[:, None] * D + part * W + c, x, mask=there)
        largest = tl.maximum(largest, tl.abs(x))
    unit = unit_of(tl.max(largest, 1))
    queries, total = (), tl.zeros_like(largest)
    for part in tl.static_range(8):
        x = whole_numbers(parts[part], unit[:, None])
        total += x
        queries += ((x * 2 ** (7 - part)).to(tl.float16),)
    return queries, tl.sum(total, 1), unit


@triton.jit
def _bits(words, part: tl.constexpr, ASM: tl.constexpr):
    """Bit ``part`` of int16 words as float16: ``2 ** (part - 24)`` where it is set, else 0.

    This is the float16 number whose only set bit is that one, so masking the word is enough and nothing is shifted.
    Queries cancel the power of two: their part i is multiplied by ``2 ** (7 - i)``.
    """
    if ASM:
        # two words at a time, which the compiler would take one by one
        asm: tl.constexpr = f"and.b32 $0, $1, {0x00010001 << part};"
        return tl.inline_asm_elementwise(asm, "=r,r", [words], tl.float16, True, 2)
    else:
        return (words & (1 << part)).to(tl.float16, bitcast=True)


@triton.jit
def _codes(words, part: tl.constexpr, ASM: tl.constexpr):
    """4-bit codes of a byte in int16 words, as float16 ``code * 2 ** (part - 24)``: the low ones for parts 0 to 3, the
    high ones for parts 4 to 7. Part 7 gets half of that, as words of 11 bits are not subnormal float16. See `_bits`.
    """
    HIGH: tl.constexpr = part >= 4
    # high codes stand 4 bits up already
    UP: tl.constexpr = min(part, 6) - 4 * HIGH
    if ASM:
        # two words at a time, as above
        MASK: tl.constexpr = 0x00F000F0 if HIGH else 0x000F000F
        asm: tl.constexpr = f"{{ .reg .b32 c; and.b32 c, $1, {MASK}; shl.b32 $0, c, {UP}; }}"
        return tl.inline_asm_elementwise(asm, "=r,r", [words], tl.float16, True, 2)
    else:
        return ((words & (240 if HIGH else 15)) << UP).to(tl.float16, bitcast=True)


@triton.jit
def centre_products(centre_ptr, at, queries, total, D: tl.constexpr, ASM: tl.constexpr):
    """Integer products ``[n, BR]``, as float32, of queries with n centres in steps, ``2 * code - 15``.

    at ``[n]``: where their codes begin. queries, total: as `rotated_queries` returns them.
    """
    W: tl.constexpr = sign_bytes(D)
    c = tl.arange(0, tile_width(W))
    ptr = (centre_ptr + at)[:, None] + c[None, :]
    s = tl.zeros([at.shape[0], total.shape[0]], tl.float32)
    for plane in tl.static_range(3, -1, -1):
        there = (c < W)[None, :]
        words = tl.load(ptr + plane * W) if tile_width(W) == W else tl.load(ptr + plane * W, mask=there, other=0)
        words = words.to(tl.int16)  # [n, bytes]
        s = tl.dot(_codes(words, plane + 4, ASM), tl.trans(queries[plane + 4]), s)
        if plane == 3:
            # `_codes` halves part 7, so it comes first and is doubled
            s *= 2
        s = tl.dot(_codes(words, plane, ASM), tl.trans(queries[plane]), s)
    return s * (2 / _BIT) - (total * _CENTRE)[None, :]


@triton.jit
def sign_products(signs, queries, total, steps, ASM: tl.constexpr):
    """Products ``[n, BR]`` of queries with signs (1 and -1), exact integers, times the ``steps`` of the n tokens.

    signs uint8 ``[n, bytes]``; queries, total: as `rotated_queries` returns them. A product with 1 and -1 is twice the
    sum of the query's integers whose bit is set, minus the sum of all.
    """
    words = signs.to(tl.int16)
    s = tl.zeros([signs.shape[0], total.shape[0]], tl.float32) - (total * (_BIT / 2))[None, :]
    for part in tl.static_range(8):
        s = tl.dot(_bits(words, part, ASM), tl.trans(queries[part]), s)
    return s * (steps * (2 / _BIT))[:, None]


@triton.jit
def rotated_part(
    x, rotation_ptr, LO: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr
):
    """Columns ``[LO, LO + N)`` of vectors, ``[n, columns]``, rotated, or with BACK rotated back, in float32.

    LO and N are multiples of the width of the rotation's blocks. All blocks are one symmetric matrix whose rows are
    multiplied by signs, which stand in a block's first column. Tensor cores take at least 16 rows, so several smaller
    blocks are multiplied at once. PRECISION: of the product; "chains" adds as `_rotated_query` does.
    """
    W: tl.constexpr = block_width(D)
    SIDE: tl.constexpr = max(16, W)
    n: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    d, row = LO + tl.arange(0, T), tl.arange(0, SIDE)
    signs = tl.load(rotation_ptr + d * D + d // W * W, mask=d < LO + N, other=0.0)[None, :]  # [1, T]
    at = rotation_ptr + row % W * D
    there = (row // W)[:, None] == (row // W)[None, :]
    block = tl.load(at[:, None] + (row % W)[None, :], mask=there, other=0.0)  # [SIDE, SIDE]
    if BACK or LO + T > W:  # else only the first block is needed, whose rows have their signs
        block *= tl.load(at)[:, None]
        if not BACK:
            x = x * signs.to(x.dtype)
    x = tl.reshape(x, (n * T // SIDE, SIDE))
    if PRECISION == "chains":
        x = _rotated_query(x, block.to(x.dtype))
    else:
        x = tl.dot(x, block.to(x.dtype), input_precision=PRECISION)
    x = tl.reshape(x, (n, T))
    return x * signs.to(tl.float32) if BACK else x
