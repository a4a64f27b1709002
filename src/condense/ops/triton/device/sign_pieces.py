"""Products of queries with signs and centres of keys whose bytes of signs are no power of two, such as latents.

The W bytes of a token's signs are cut into two pieces, 72 into 64 + 8, whose bits are multiplied by the whole numbers
of queries in 8 bits, exactly. A byte has a bit of each of eight parts of a key, each of W columns. The first piece is a
tile for each part. The rest of a part would be a small tile: those of several parts stand side by side in one. Codes of
centres have the same places, four parts in each half of a byte.

Shapes: n tokens or centres, D key width, W bytes of a token's signs, BR query heads, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.recall.index import CENTRE_LEVELS
from condense.ops.triton.device.parts import load_rows, split_width, store_rows
from condense.ops.triton.device.signs import floats_of, sign_bytes, turned_part, unit_of, whole_numbers

_CENTRE = tl.constexpr(CENTRE_LEVELS)
# columns of a tile of the rest: the fewest that matrix units multiply in 8 bits
_COLUMNS = tl.constexpr(32)
_split_width = triton.constexpr_function(split_width)


@triton.constexpr_function
def _sizes(D):
    """Bytes of both pieces, and parts whose rest stands in one tile."""
    first = 1 << (sign_bytes(D).bit_length() - 1)
    rest = sign_bytes(D) - first
    return first, rest, 32 // max(rest, 1)


@triton.constexpr_function
def in_pieces(D):
    """Whether signs of keys of width D are read in pieces: whole words, of which the rest fills tiles."""
    first, rest, _ = _sizes(D)
    return D % 8 == 0 and first >= 32 and rest in (4, 8, 16)


@triton.jit
def _places(TILE: tl.constexpr, D: tl.constexpr):
    """The parts and the bytes, from the first of the rest on, of the columns of a tile of the rest, both ``[C]``."""
    sizes: tl.constexpr = _sizes(D)
    c = tl.arange(0, _COLUMNS)
    return TILE * sizes[2] + c // sizes[1], sizes[0] + c % sizes[1]


@triton.constexpr_function
def _shift_asm(MASK, AT=None):
    """Assembly that moves four bytes down by AT bits, or by what is given, and keeps the bits of a mask."""
    return f"{{ .reg .b32 c; shr.b32 c, $1, {'$2' if AT is None else AT}; and.b32 $0, c, {MASK * 0x01010101}; }}"


@triton.jit
def _bits(bytes, AT: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr):
    """Bits from AT on of bytes, as int8. ASM: there is a GPU that runs assembly."""
    if ASM:
        return tl.inline_asm_elementwise(_shift_asm(MASK, AT), "=r,r", [bytes], tl.int8, True, 4)
    else:
        return ((bytes >> AT) & MASK).to(tl.int8)


@triton.jit
def _bits_from(bytes, at, MASK: tl.constexpr, ASM: tl.constexpr):
    """`_bits` from ``at`` int32 on, which is the same for four bytes side by side."""
    if ASM:
        bytes, at = tl.broadcast(bytes, at)
        return tl.inline_asm_elementwise(_shift_asm(MASK), "=r,r,r,r,r,r", [bytes, at], tl.int8, True, 4)
    else:
        return ((bytes.to(tl.int32) >> at) & MASK).to(tl.int8)


@triton.constexpr_function
def query_bytes(D):
    """Bytes of a query head between `put_queries` and `load_queries`."""
    return D + 16


@triton.jit
def _numbers_of(ptr, D: tl.constexpr):
    """Pointers to the two numbers, float32, behind the bytes at ``ptr``."""
    return (ptr + D).to(tl.pointer_type(tl.float32))


@triton.jit
def put_queries(q_ptr, s_qh, r, R, rotation_ptr, turned_ptr, whole_ptr, D: tl.constexpr):
    """Turn query heads r of one KV head, and write them to ``turned``, float32 ``[R, D]``, unless it is None; and
    rounded, as by `condense.ops.recall.turned_queries`, to ``whole``, int8 ``[R, query_bytes]``: whole numbers, then
    their sum and what one of them stands for.
    """
    widths: tl.constexpr = _split_width(D)
    at = r.to(tl.int64)
    q = load_rows(q_ptr, at * s_qh, r < R, widths[0], widths[1])
    first = turned_part(q[0], rotation_ptr, 0, widths[0], D, False, "chains")
    rest = turned_part(q[1], rotation_ptr, widths[0], widths[1], D, False, "chains")
    if turned_ptr is not None:
        store_rows(turned_ptr, at * D, (first, rest), r < R, widths[0], widths[1])
    unit = unit_of(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(rest), 1)))  # [BR]
    first, rest = whole_numbers(first, unit[:, None]), whole_numbers(rest, unit[:, None])
    store_rows(whole_ptr, at * query_bytes(D), (first, rest), r < R, widths[0], widths[1])
    numbers = _numbers_of(whole_ptr + at * query_bytes(D), D)
    tl.store(numbers, tl.sum(first, 1) + tl.sum(rest, 1), mask=r < R)
    tl.store(numbers + 1, unit, mask=r < R)


@triton.jit
def load_queries(whole_ptr, r, R, D: tl.constexpr):
    """Query heads r as `put_queries` wrote them: whole numbers int8, in tiles; their sums, and what one stands for,
    both float32 ``[BR]``.
    """
    sizes: tl.constexpr = _sizes(D)
    W: tl.constexpr = sign_bytes(D)
    x, ptr, there = (), whole_ptr + r.to(tl.int64) * query_bytes(D), r < R
    for part in tl.static_range(8):
        at = (part * W + tl.arange(0, sizes[0]))[None, :]
        x = x + (tl.load(ptr[:, None] + at, mask=there[:, None], other=0),)  # noqa: RUF005
    for tile in tl.static_range(8 // sizes[2]):
        part, byte = _places(tile, D)
        x = x + (tl.load(ptr[:, None] + (part * W + byte)[None, :], mask=there[:, None], other=0),)  # noqa: RUF005
    numbers = _numbers_of(ptr, D)
    return x, tl.load(numbers, mask=there, other=0.0), tl.load(numbers + 1, mask=there, other=0.0)


@triton.jit
def load_pieces(ptr, D: tl.constexpr):
    """Bytes of signs that begin at ``ptr`` ``[n]``: of the first piece, and of the rest as its tiles have them."""
    _, byte = _places(0, D)
    first: tl.constexpr = _sizes(D)[0]
    return tl.load(ptr[:, None] + tl.arange(0, first)[None, :]), tl.load(ptr[:, None] + byte[None, :])


@triton.jit
def piece_sign_products(signs, queries, total, steps, D: tl.constexpr, ASM: tl.constexpr):
    """As `condense.ops.triton.device.signs.sign_products`. signs: of `load_pieces`."""
    s = tl.zeros([steps.shape[0], total.shape[0]], tl.int32)
    for part in tl.static_range(8):
        s = tl.dot(_bits(signs[0], part, 1, ASM), tl.trans(queries[part]), s, out_dtype=tl.int32)
    for tile in tl.static_range(len(queries) - 8):
        part, _ = _places(tile, D)
        s = tl.dot(_bits_from(signs[1], part[None, :], 1, ASM), tl.trans(queries[8 + tile]), s, out_dtype=tl.int32)
    return (2 * floats_of(s) - total[None, :]) * steps[:, None]


@triton.jit
def piece_centre_products(ptr, queries, total, D: tl.constexpr, ASM: tl.constexpr):
    """As `condense.ops.triton.device.signs.centre_products`, of centres whose codes begin at ``ptr`` ``[n]``."""
    W: tl.constexpr = sign_bytes(D)
    first: tl.constexpr = _sizes(D)[0]
    s = tl.zeros([ptr.shape[0], total.shape[0]], tl.int32)
    for part in tl.static_range(4):
        bytes = tl.load(ptr[:, None] + part * W + tl.arange(0, first)[None, :])  # [n, C]
        s = tl.dot(_bits(bytes, 0, 15, ASM), tl.trans(queries[part]), s, out_dtype=tl.int32)
        s = tl.dot(_bits(bytes, 4, 15, ASM), tl.trans(queries[part + 4]), s, out_dtype=tl.int32)
    for tile in tl.static_range(len(queries) - 8):
        part, byte = _places(tile, D)
        bytes = tl.load(ptr[:, None] + (part % 4 * W + byte)[None, :])
        codes = _bits_from(bytes, (part // 4 * 4)[None, :], 15, ASM)
        s = tl.dot(codes, tl.trans(queries[8 + tile]), s, out_dtype=tl.int32)
    return 2 * floats_of(s) - (total * _CENTRE)[None, :]
