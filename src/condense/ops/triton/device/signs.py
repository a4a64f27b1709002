"""The index of Recall in kernels: signs of turned keys, a step per token and a centre per group, see
`condense.ops.recall.index`.

The rotation is a matrix ``[D, D]`` in the dtype of keys and queries, which hold 1 and -1 exactly. Only its blocks along
the diagonal are read.

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
_TINY = tl.constexpr(2.0**-126)
# the sum of this and a number below 2 ** 22 has no digits behind the point, and is rounded half to even
ROUNDING = tl.constexpr(1.5 * 2**23)
# what a set bit times a whole number 1 of a query is, see `_bits`
_BIT = tl.constexpr(2.0**-17)


@triton.jit
def floats_of(x):
    """The same numbers in float32, of int32 x from -(2 ** 22) to 2 ** 22: few units of a GPU convert, but many add."""
    return (x + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDING


@triton.constexpr_function
def turned_columns(D):
    """Columns that are turned at a time: whole blocks of the rotation."""
    return max(64, block_width(D))


@triton.jit
def _rotation(rotation_ptr, row, column, there, D: tl.constexpr):
    """Rows of the rotation, ``[rows, columns]``, 0 where a column is not there."""
    mask = (row < D)[:, None] & there[None, :]
    return tl.load(rotation_ptr + row[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _turned_query(x, matrix):
    """Columns of turned queries, float32 ``[n, columns]``. x ``[n, rows]``; matrix: as of `_rotation`.

    The error of a query is in all of its scores. Products of float32 are added in one chain, whose error grows with
    its length: here in chains of 16, which are added up at the end.
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
    """The step of a centre, rounded to ``dtype``, from its largest number; and one step of its numbers, float32."""
    places = (largest * (1 / (_CENTRE * block_width(D)))).to(tl.int32, bitcast=True)
    step = ((places + _BELOW) & ~_BELOW).to(tl.float32, bitcast=True).to(dtype)
    return step, step.to(tl.float32) * block_width(D)


@triton.jit
def centre_codes(mean, unit):
    """Codes of the numbers of a centre, float32."""
    codes = tl.floor(tl.div_rn(mean, tl.zeros_like(mean) + tl.maximum(2 * unit, _TINY)) + (_CENTRE + 1) / 2)
    return tl.minimum(tl.maximum(codes, 0.0), _CENTRE)


@triton.jit
def centre_numbers(codes, unit):
    """The numbers of a centre from its codes."""
    return unit * (2 * codes - _CENTRE)


@triton.jit
def key_steps(squares, sizes, D: tl.constexpr):
    """Steps of tokens, float32, from the sums of their turned keys' squares and of their absolute values."""
    return tl.div_rn(squares, tl.maximum(sizes, _TINY) * block_width(D))


@triton.constexpr_function
def _first_row(part, D):
    """First row of the rotation that has numbers in the columns of this part of a key, `_num_rows` of them at most."""
    P = block_width(D)
    return part * sign_bytes(D) // P * P


@triton.constexpr_function
def _num_rows(D):
    W, P = sign_bytes(D), block_width(D)
    return tile_width(max(-(-(part * W % P + W) // P) * P for part in range(8)))


@triton.jit
def _turned_part(q_ptr, s_qh, r, R, rotation_ptr, part: tl.constexpr, D: tl.constexpr):
    """The columns of turned query heads r whose signs are in bit ``part`` of the bytes, float32 ``[BR, bytes]``."""
    W: tl.constexpr = sign_bytes(D)
    c = tl.arange(0, tile_width(W))
    row = _first_row(part, D) + tl.arange(0, _num_rows(D))
    there = (r < R)[:, None] & (row < D)[None, :]
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + row[None, :], mask=there, other=0.0)  # [BR, rows]
    return _turned_query(q, _rotation(rotation_ptr, row, part * W + c, (c < W) & (part * W + c < D), D))


@triton.jit
def _all_parts(q_ptr, s_qh, r, R, rotation_ptr, D: tl.constexpr):
    """All eight parts of turned queries, see `_turned_part`, by one product: of 128 columns, 16 to a part."""
    d = tl.arange(0, D)
    q = tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + d[None, :], mask=(r < R)[:, None], other=0.0)
    x = tl.reshape(_turned_query(q, _rotation(rotation_ptr, d, d, d < D, D)), (r.shape[0], 2, 2, 2, D // 8))
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
    """The number that a whole number 1 of a query stands for, from the largest of its turned numbers."""
    return tl.maximum(largest, _TINY * _LEVELS) * _UNIT


@triton.jit
def whole_numbers(x, unit):
    """Turned queries in units, rounded half to even."""
    return (tl.div_rn(x, tl.zeros_like(x) + unit) + ROUNDING) - ROUNDING


@triton.jit
def turned_queries(q_ptr, s_qh, r, R, rotation_ptr, turned_ptr, writes, D: tl.constexpr):
    """Query heads r of one KV head, rounded as by `condense.ops.recall.turned_queries`.

    They are stored at ``turned``, float32 ``[R, D]``, as they are before they are rounded, if the program ``writes``;
    None: nobody asks for them. Returns their whole numbers as `sign_products` takes them, the sums of these, and what
    one of them stands for, both float32 ``[BR]``.
    """
    W: tl.constexpr = sign_bytes(D)
    parts, largest = (), tl.zeros([r.shape[0], tile_width(W)], tl.float32)
    if D == 128:
        parts = _all_parts(q_ptr, s_qh, r, R, rotation_ptr, D)
    else:
        for part in tl.static_range(8):
            parts = parts + (_turned_part(q_ptr, s_qh, r, R, rotation_ptr, part, D),)  # noqa: RUF005
    for part in tl.static_range(8):
        x = parts[part]  # [BR, bytes]
        if turned_ptr is not None:
            c = tl.arange(0, tile_width(W))[None, :]
            there = (r < R)[:, None] & (c < W) & (part * W + c < D) & writes
            tl.store(turned_ptr + r.to(tl.int64)[:, None] * D + part * W + c, x, mask=there)
        largest = tl.maximum(largest, tl.abs(x))
    unit = unit_of(tl.max(largest, 1))
    queries, total = (), tl.zeros_like(largest)
    for part in tl.static_range(8):
        x = whole_numbers(parts[part], unit[:, None])
        total += x
        queries = queries + ((x * 2 ** (7 - part)).to(tl.float16),)  # noqa: RUF005
    return queries, tl.sum(total, 1), unit


@triton.jit
def _bits(words, part: tl.constexpr, ASM: tl.constexpr):
    """Bit ``part`` of int16 words as float16, ``2 ** (part - 24)`` where it is set.

    That is the number that float16 reads in a word whose only bit is this one, so that a bit is not moved before it is
    multiplied. Queries make up for it: those of bit i are multiplied by ``2 ** (7 - i)``.
    """
    if ASM:
        # two words at a time, which the compiler would take one by one
        asm: tl.constexpr = f"and.b32 $0, $1, {0x00010001 << part};"
        return tl.inline_asm_elementwise(asm, "=r,r", [words], tl.float16, True, 2)
    else:
        return (words & (1 << part)).to(tl.float16, bitcast=True)


@triton.constexpr_function
def _code_asm(HIGH, UP):
    """Assembly that keeps one half of each byte of two words, and moves it up by UP bits."""
    mask = 0x00F000F0 if HIGH else 0x000F000F
    return f"{{ .reg .b32 c; and.b32 c, $1, {mask}; shl.b32 $0, c, {UP}; }}"


@triton.jit
def _codes(words, part: tl.constexpr, ASM: tl.constexpr):
    """Codes in the low halves of int16 words, for parts from 4 on in the high ones, as float16 times ``2 ** (part -
    24)``; half of that for part 7, as words of more than 10 bits are no such numbers. See `_bits`.
    """
    HIGH: tl.constexpr = part >= 4
    # codes in high halves have been moved up by 4 bits already
    UP: tl.constexpr = min(part, 6) - 4 * HIGH
    if ASM:
        return tl.inline_asm_elementwise(_code_asm(HIGH, UP), "=r,r", [words], tl.float16, True, 2)
    else:
        return ((words & (240 if HIGH else 15)) << UP).to(tl.float16, bitcast=True)


@triton.jit
def centre_products(centre_ptr, at, queries, total, D: tl.constexpr, ASM: tl.constexpr):
    """Products ``[n, BR]`` of queries with the numbers of n centres, whole numbers, whose codes begin at ``at``."""
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
            # the last part first, as it counts twice
            s *= 2
        s = tl.dot(_codes(words, plane, ASM), tl.trans(queries[plane]), s)
    return s * (2 / _BIT) - (total * _CENTRE)[None, :]


@triton.jit
def sign_products(signs, queries, total, steps, ASM: tl.constexpr):
    """Products ``[n, BR]`` of queries with what signs and steps stand for: exact whole numbers, times the steps.

    signs uint8 ``[n, bytes]``; queries, total: whole numbers and their sums, as `turned_queries` returns them. A
    product with 1 and -1 is twice the sum of the numbers whose bit is set, less the sum of all.
    """
    words = signs.to(tl.int16)
    s = tl.zeros([signs.shape[0], total.shape[0]], tl.float32) - (total * (_BIT / 2))[None, :]
    for part in tl.static_range(8):
        s = tl.dot(_bits(words, part, ASM), tl.trans(queries[part]), s)
    return s * (steps * (2 / _BIT))[:, None]


@triton.jit
def turned_part(
    x, rotation_ptr, LO: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr
):
    """Columns ``[LO, LO + N)`` of vectors, ``[n, columns]``, turned, or with BACK turned back, in float32.

    LO and N are multiples of the rotation's blocks, each of which is the same symmetric matrix, but that its rows have
    signs, those of its first column. Matrix units take 16 rows at least: of smaller blocks several. PRECISION: of the
    products, "chains" for those of `_turned_query`.
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
    if BACK or LO + T > W:  # else all by the first block as it stands
        block *= tl.load(at)[:, None]
        if not BACK:
            x = x * signs.to(x.dtype)
    x = tl.reshape(x, (n * T // SIDE, SIDE))
    if PRECISION == "chains":
        x = _turned_query(x, block.to(x.dtype))
    else:
        x = tl.dot(x, block.to(x.dtype), input_precision=PRECISION)
    x = tl.reshape(x, (n, T))
    return x * signs.to(tl.float32) if BACK else x
