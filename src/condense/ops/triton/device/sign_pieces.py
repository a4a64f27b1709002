"""Products of int8 queries with sign bits and centres of keys whose W sign bytes are no power of two, such as latents.

The W bytes are cut into two pieces, 72 into 64 + 8. Bit i of byte c is the sign of column ``i * W + c``: a key has
eight parts (bit planes) of W columns. The first piece of a part is one tile of a matrix product. The second piece is
too narrow for tensor cores, so those of several parts share a tile. Codes of centres are laid out like the bytes, with
parts 0 to 3 in their low 4 bits and parts 4 to 7 in their high ones. All products are exact.

Shapes: n tokens or centres, D key width, W bytes of a token's signs, BR query heads, C columns of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.recall.index import CENTRE_LEVELS
from condense.ops.triton.device.parts import load_rows, split_width, store_rows
from condense.ops.triton.device.signs import floats_of, rotated_part, sign_bytes, unit_of, whole_numbers

_CENTRE = tl.constexpr(CENTRE_LEVELS)
# columns of a tile of second pieces: the fewest that tensor cores multiply in 8 bits
_COLUMNS = tl.constexpr(32)
_split_width = triton.constexpr_function(split_width)


@triton.constexpr_function
def _sizes(D):
    """Bytes of the first and of the second piece, and number of parts whose second pieces share a tile."""
    first = 1 << (sign_bytes(D).bit_length() - 1)
    rest = sign_bytes(D) - first
    return first, rest, 32 // max(rest, 1)


@triton.constexpr_function
def in_pieces(D):
    """Whether this module reads keys of width D: the first piece has 32 bytes or more, the second ones fill tiles."""
    first, rest, _ = _sizes(D)
    return D % 8 == 0 and first >= 32 and rest in (4, 8, 16)


@triton.jit
def _places(TILE: tl.constexpr, D: tl.constexpr):
    """Part and byte number of each column of tile number TILE of second pieces, both ``[C]``."""
    sizes: tl.constexpr = _sizes(D)
    c = tl.arange(0, _COLUMNS)
    return TILE * sizes[2] + c // sizes[1], sizes[0] + c % sizes[1]


@triton.constexpr_function
def _shift_asm(MASK, AT=None):
    """Assembly for four packed bytes: shift right by AT bits, or by the second operand if None, and mask each byte."""
    return f"{{ .reg .b32 c; shr.b32 c, $1, {'$2' if AT is None else AT}; and.b32 $0, c, {MASK * 0x01010101}; }}"


@triton.jit
def _bits(bytes, AT: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr):
    """``(bytes >> AT) & MASK`` as int8. ASM: use inline assembly, which needs a GPU."""
    if ASM:
        return tl.inline_asm_elementwise(_shift_asm(MASK, AT), "=r,r", [bytes], tl.int8, True, 4)
    else:
        return ((bytes >> AT) & MASK).to(tl.int8)


@triton.jit
def _bits_from(bytes, at, MASK: tl.constexpr, ASM: tl.constexpr):
    """``(bytes >> at) & MASK`` as int8, for shifts ``at``, int32, that are the same in each run of four bytes."""
    if ASM:
        bytes, at = tl.broadcast(bytes, at)
        return tl.inline_asm_elementwise(_shift_asm(MASK), "=r,r,r,r,r,r", [bytes, at], tl.int8, True, 4)
    else:
        return ((bytes.to(tl.int32) >> at) & MASK).to(tl.int8)


@triton.constexpr_function
def query_bytes(D):
    """Bytes per query head of the buffer that `put_queries` writes and `load_queries` reads."""
    return D + 16


@triton.jit
def _numbers_of(ptr, D: tl.constexpr):
    """Pointers to a query head's two float32 numbers, which follow its D bytes at ``ptr``."""
    return (ptr + D).to(tl.pointer_type(tl.float32))


@triton.jit
def put_queries(q_ptr, s_qh, r, R, rotation_ptr, rotated_ptr, whole_ptr, D: tl.constexpr):
    """Rotate query heads r of one KV head and write them in 8 bits, as `condense.ops.recall.rotated_queries` rounds.

    whole_ptr: int8 ``[R, query_bytes]``: D integers, then their sum and their scale (`unit_of`) in float32.
    rotated_ptr: for the rotated queries before rounding, float32 ``[R, D]``; None: they are not written.
    """
    widths: tl.constexpr = _split_width(D)
    at = r.to(tl.int64)
    q = load_rows(q_ptr, at * s_qh, r < R, widths[0], widths[1])
    first = rotated_part(q[0], rotation_ptr, 0, widths[0], D, False, "chains")
    rest = rotated_part(q[1], rotation_ptr, widths[0], widths[1], D, False, "chains")
    if rotated_ptr is not None:
        store_rows(rotated_ptr, at * D, (first, rest), r < R, widths[0], widths[1])
    unit = unit_of(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(rest), 1)))  # [BR]
    first, rest = whole_numbers(first, unit[:, None]), whole_numbers(rest, unit[:, None])
    store_rows(whole_ptr, at * query_bytes(D), (first, rest), r < R, widths[0], widths[1])
    numbers = _numbers_of(whole_ptr + at * query_bytes(D), D)
    tl.store(numbers, tl.sum(first, 1) + tl.sum(rest, 1), mask=r < R)
    tl.store(numbers + 1, unit, mask=r < R)


@triton.jit
def load_queries(whole_ptr, r, R, D: tl.constexpr):
    """Load query heads r that `put_queries` wrote: int8 integers, in eight tiles of first pieces and then tiles of
    second ones; sums and scales of heads, both float32 ``[BR]``.
    """
    sizes: tl.constexpr = _sizes(D)
    W: tl.constexpr = sign_bytes(D)
    x, ptr, there = (), whole_ptr + r.to(tl.int64) * query_bytes(D), r < R
    for part in tl.static_range(8):
        at = (part * W + tl.arange(0, sizes[0]))[None, :]
        x += (tl.load(ptr[:, None] + at, mask=there[:, None], other=0),)
    for tile in tl.static_range(8 // sizes[2]):
        part, byte = _places(tile, D)
        x += (tl.load(ptr[:, None] + (part * W + byte)[None, :], mask=there[:, None], other=0),)
    numbers = _numbers_of(ptr, D)
    return x, tl.load(numbers, mask=there, other=0.0), tl.load(numbers + 1, mask=there, other=0.0)


@triton.jit
def load_pieces(ptr, D: tl.constexpr):
    """Sign bytes that begin at ``ptr`` ``[n]``: first pieces, and second ones repeated over the C columns of a tile."""
    _, byte = _places(0, D)
    first: tl.constexpr = _sizes(D)[0]
    return tl.load(ptr[:, None] + tl.arange(0, first)[None, :]), tl.load(ptr[:, None] + byte[None, :])


@triton.jit
def piece_sign_products(signs, queries, total, steps, D: tl.constexpr, ASM: tl.constexpr):
    """Products ``[n, BR]`` as of `condense.ops.triton.device.signs.sign_products`.

    signs: from `load_pieces`. queries, total: integers and sums from `load_queries`.
    """
    s = tl.zeros([steps.shape[0], total.shape[0]], tl.int32)
    for part in tl.static_range(8):
        s = tl.dot(_bits(signs[0], part, 1, ASM), tl.trans(queries[part]), s, out_dtype=tl.int32)
    for tile in tl.static_range(len(queries) - 8):
        part, _ = _places(tile, D)
        s = tl.dot(_bits_from(signs[1], part[None, :], 1, ASM), tl.trans(queries[8 + tile]), s, out_dtype=tl.int32)
    return (2 * floats_of(s) - total[None, :]) * steps[:, None]


@triton.jit
def piece_centre_products(ptr, queries, total, D: tl.constexpr, ASM: tl.constexpr):
    """Products ``[n, BR]`` as of `condense.ops.triton.device.signs.centre_products`.

    ptr ``[n]``: where the centres' codes begin. queries, total: integers and sums from `load_queries`.
    """
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
