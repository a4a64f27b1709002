"""Products of queries with the signs of an index as tensor cores of Hopper make them of bits, 128 at a time.

Such an instruction counts the bits that are set in both of two rows. A query is a whole number of 8 bits per column, so
that its *planes*, bit p of all columns, are eight rows; what these count is added up with weights 1, 2, 4 to 64, and
-128 for the last, as negative numbers are written. So signs are multiplied as they are kept: no bit is moved.

Shapes: E threads, see `condense.ops.triton.device.lanes`. A warp reads 8 groups of 16 tokens for 4 query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.device import lanes

# a count of 1 in a sum: counts are read as bits of float32 numbers, so that a count n is the denormal number
# n * 2**-149, and sums are scaled by 2**127
COUNT = tl.constexpr(2.0**-22)


def fits(g: int, D: int) -> bool:
    """Whether groups of g tokens of width D can be read so."""
    return g == 16 and D == 128


@triton.jit
def _transposed(x):
    """8 times 8 bits in uint64 numbers, transposed: bit p of byte i becomes bit i of byte p."""
    swapped = (x ^ (x >> 7)) & 0x00AA00AA00AA00AA
    x = x ^ swapped ^ (swapped << 7)
    swapped = (x ^ (x >> 14)) & 0x0000CCCC0000CCCC
    x = x ^ swapped ^ (swapped << 14)
    swapped = (x ^ (x >> 28)) & 0x00000000F0F0F0F0
    return x ^ swapped ^ (swapped << 28)


@triton.jit
def query_planes(queries, E: tl.constexpr):
    """Planes of 4 query heads, four int32 tensors ``[E]``: of planes 2 t and 2 t + 1 the 32 columns whose signs are in
    word ``e % 4`` of a token.

    queries: whole numbers as `condense.ops.triton.device.signs.rotated_queries` returns them.
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
    """Numbers of 16 bits ``[4, 16]`` as int32 words ``[4, 4, 2]``: of each four numbers 0 and 2, and 1 and 3."""
    x = tl.reshape(number.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, (number.shape[0], 4, 2, 2))
    return tl.sum(x << (16 * tl.arange(0, 2))[None, None, :, None], 2)


@triton.jit
def query_numbers(queries, E: tl.constexpr):
    """Numbers of 4 query heads for `centre_product`, 16 int32 tensors ``[E]`` of two float16 numbers each: 16
    times those whose codes are in low halves of bytes.

    queries: as for `query_planes`.
    """
    x = ()
    for i in tl.static_range(4):
        low, high = queries[i] * 2.0 ** (i - 3), queries[i + 4] * 2.0 ** (i - 3)
        x = x + (tl.join(_two_words(low.to(tl.float16)), _two_words(high.to(tl.float16))),)  # noqa: RUF005
    # [4, i // 2, i % 2, 4, odd, high]
    x = tl.permute(tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])), (0, 5, 4, 1, 2, 3))
    x = tl.reshape(x, (x.shape[0], 1, 4, 16))
    return lanes.columns(lanes.for_lanes(tl.broadcast_to(x, (x.shape[0], 2, 4, 16)), E))


@triton.constexpr_function
def _centre_asm():
    """Assembly of `centre_product`: bits of float16 numbers are codes, as in `condense.ops.triton.device.signs`."""
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
    """Products of a query with the codes of a centre, times ``2 ** -20``, float32 ``[E]``, of head ``e % 4``.

    words: four tensors ``[E]``, words ``4 (e % 4) + i`` of the centre of group ``e // 4 % 8`` of the warp. numbers: of
    `query_numbers`.
    """
    asm: tl.constexpr = _centre_asm()
    return tl.inline_asm_elementwise(asm, "=f" + ",r" * 20, words + numbers, tl.float32, False, 1)


@triton.constexpr_function
def _product_asm():
    """Assembly of `sign_products`: counts of four pairs of planes, then sums over pairs, and of the two sums."""
    lines = [".reg .b32 z, c<16>; .reg .f32 f<16>, even, odd;", "mov.b32 z, 0;"]
    for t in range(4):
        c = ", ".join(f"c{4 * t + i}" for i in range(4))
        lines.append(
            "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
            f"{{{c}}}, {{$2, $3}}, {{${5 + t}}}, {{z, z, z, z}};"
        )
    lines += [f"mov.b32 f{i}, c{i};" for i in range(16)]
    # by float32 constants: 4, -4 and 2, and 2 ** 127
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
    """Products of a query with signs, times `COUNT`, two float32 tensors ``[E]``.

    first, second: word ``e % 4`` of tokens ``e // 4 % 8``, and of those 8 further on, of a group. less: the opposite of
    the sum of a query's numbers, times `COUNT`. planes: of `query_planes`. The products are of the same tokens, and of
    query head ``e % 4``.
    """
    asm: tl.constexpr = _product_asm()
    given = (first, second, less) + planes  # noqa: RUF005
    return tl.inline_asm_elementwise(asm, "=&f,=&f,r,r,f,r,r,r,r", given, (tl.float32, tl.float32), False, 1)
