"""Products of queries with the sign bits of an index, by Hopper's tensor-core products of bits, 128 at a time.

Such an instruction counts the bits that are set in both of two rows. A query has an 8-bit integer per column; its
*plane* p is the row of bits p of all columns. The counts of the eight planes are added with weights 1, 2, 4 to 64 and,
for the sign bit of two's complement, -128. So sign bits are multiplied as they are stored, without unpacking.

Shapes: E threads, see `condense.ops.triton.device.lanes`. A warp reads 8 groups of 16 tokens for 4 query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.device import lanes

# factor of sums of counts: the bits of an int32 count n, read as a float32, are the denormal number n * 2**-149, and
# sums are multiplied by 2**127
COUNT = tl.constexpr(2.0**-22)


def fits(g: int, D: int) -> bool:
    """Whether this module reads groups of g tokens of width D."""
    return g == 16 and D == 128


@triton.jit
def _transposed(x):
    """Numbers x, uint64, whose 8 times 8 bits are transposed: bit p of byte i becomes bit i of byte p."""
    swapped = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA
    x = x ^ swapped ^ (swapped << 7)
    swapped = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC
    x = x ^ swapped ^ (swapped << 14)
    swapped = (x ^ (x >> 28)) & 0x00000000F0F0F0F0
    return x ^ swapped ^ (swapped << 28)


@triton.jit
def query_planes(queries, E: tl.constexpr):
    """Planes of 4 query heads, four int32 tensors ``[E]``: in tensor t, thread e has plane ``2 t + e // 4 % 2`` of head
    ``e // 8 % 4``, and of it the 32 columns whose signs are in word ``e % 4`` of a token.

    queries: integers in parts, as `condense.ops.triton.device.signs.rotated_queries` returns them.
    """
    x = tl.zeros(queries[0].shape, tl.uint64)
    for i in tl.static_range(8):
        number = (queries[i].to(tl.float32) * 2.0 ** (i - 7)).to(tl.int32)
        x |= (number & 255).to(tl.uint64) << (8 * i)
    x = tl.reshape(_transposed(x), (x.shape[0], 1, 4, 4, 1))
    plane = tl.arange(0, 2)[:, None] + 2 * tl.arange(0, 4)[None, :]
    byte = tl.arange(0, 4)[None, None, None, :, None]
    x = ((x >> (8 * plane).to(tl.uint64)[None, :, None, None, :]) & 255).to(tl.int32) << (8 * byte)
    return lanes.columns(lanes.for_lanes(tl.sum(x, 3), E))


@triton.jit
def _two_words(number):
    """Pairs of 16-bit numbers ``[4, 16]`` as int32 words ``[4, 4, 2]``: of each four, 0 with 2, and 1 with 3."""
    x = tl.reshape(number.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, (number.shape[0], 4, 2, 2))
    return tl.sum(x << (16 * tl.arange(0, 2))[None, None, :, None], 2)


@triton.jit
def query_numbers(queries, E: tl.constexpr):
    """Numbers of 4 query heads for `centre_product`, 16 int32 tensors ``[E]`` of two float16 numbers each. Numbers
    whose codes are in the low halves of bytes are multiplied by 16, because codes in high halves are read 16 times as
    large.

    queries: as for `query_planes`.
    """
    x = ()
    for i in tl.static_range(4):
        low, high = queries[i] * 2.0 ** (i - 3), queries[i + 4] * 2.0 ** (i - 3)
        x += (tl.join(_two_words(low.to(tl.float16)), _two_words(high.to(tl.float16))),)
    # [4, i // 2, i % 2, 4, odd, high]
    x = tl.permute(tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])), (0, 5, 4, 1, 2, 3))
    x = tl.reshape(x, (x.shape[0], 1, 4, 16))
    return lanes.columns(lanes.for_lanes(tl.broadcast_to(x, (x.shape[0], 2, 4, 16)), E))


@triton.constexpr_function
def _centre_asm():
    """Assembly of `centre_product`: bits of codes are read as float16, as in `condense.ops.triton.device.signs`."""
    lines = [".reg .b32 z, a, b, w; .reg .f32 c<4>, zero;", "mov.b32 z, 0; mov.f32 zero, 0f00000000;"]
    lines += [f"mov.f32 c{i}, zero;" for i in range(4)]
    for i in range(4):
        for odd in range(2):
            at = 5 + 4 * i + 2 * odd
            lines += [
                f"shr.u32 w, ${1 + i}, {8 * odd}; and.b32 a, w, 0x000F000F; and.b32 b, w, 0x00F000F0;",
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                f"{{c0, c1, c2, c3}}, {{a, z, b, z}}, {{${at}, ${at + 1}}}, {{c0, c1, c2, c3}};",
            ]
    return "{ " + "\n".join(lines) + " mov.f32 $0, c0; }"


@triton.jit
def centre_product(words, numbers):
    """Products of queries with the codes of centres, times ``2 ** -20``, float32 ``[E]``: group ``e // 4 % 8`` of the
    warp, head ``e % 4``.

    words: four int32 tensors ``[E]``, words ``4 (e % 4) + i`` of this group's centre. numbers: from `query_numbers`.
    """
    asm: tl.constexpr = _centre_asm()
    return tl.inline_asm_elementwise(asm, "=f" + ",r" * 20, words + numbers, tl.float32, False, 1)


@triton.constexpr_function
def _product_asm():
    """Assembly of `sign_products`: counts for four pairs of planes, weighted sums of even and odd planes, their sum."""
    lines = [".reg .b32 z, c<16>; .reg .f32 f<16>, even, odd;", "mov.b32 z, 0;"]
    for t in range(4):
        c = ", ".join(f"c{4 * t + i}" for i in range(4))
        lines.append(
            "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
            f"{{{c}}}, {{$2, $3}}, {{${5 + t}}}, {{z, z, z, z}};"
        )
    lines += [f"mov.b32 f{i}, c{i};" for i in range(16)]
    # float32 constants: 0f40800000 is 4, 0fC0800000 is -4, 0f40000000 is 2, 0f7F000000 is 2 ** 127
    for row in range(2):
        for name, i, first in (("even", 2 * row, "0f40800000"), ("odd", 2 * row + 1, "0fC0800000")):
            lines.append(f"fma.rn.f32 {name}, f{12 + i}, {first}, f{8 + i};")
            lines += [f"fma.rn.f32 {name}, {name}, 0f40800000, f{4 * t + i};" for t in (1, 0)]
        lines.append("fma.rn.f32 even, odd, 0f40000000, even;")
        lines.append("mul.rn.f32 even, even, 0f7F000000;")
        lines.append(f"fma.rn.f32 ${row}, even, 0f40000000, $4;")
    return "{ " + "\n".join(lines) + " }"


@triton.jit
def sign_products(first, second, less, planes):
    """Products of query head ``e % 4`` with the signs of tokens ``e // 4 % 8`` and ``e // 4 % 8 + 8`` of a group, times
    `COUNT`: two float32 tensors ``[E]``.

    first, second: word ``e % 4`` of the signs of either token, int32 ``[E]``. less: the sum of the head's integers,
    negated, times `COUNT`. planes: from `query_planes`.
    """
    asm: tl.constexpr = _product_asm()
    given = (first, second, less) + planes  # noqa: RUF005
    return tl.inline_asm_elementwise(asm, "=&f,=&f,r,r,f,r,r,r,r", given, (tl.float32, tl.float32), False, 1)
