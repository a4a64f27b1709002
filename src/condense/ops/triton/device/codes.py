"""Numbers as codes of 8 or 4 bits (`condense.ops.tensors.codes`), and entries as rows of bytes
(`condense.ops.entries.EntryFormat`), in kernels: the same numbers to the bit.

Vectors are in parts, see `condense.ops.triton.device.parts`. No block of channels lies in two parts: the width of the
first of two parts is a multiple of a block's width.

Shapes: n rows of a tile, P columns of a part's tile, N of them that exist, W channels of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.entries import BLOCK_WIDTH, EntryFormat
from condense.ops.triton.device.parts import load_rows, parts, store_row, tile_width

_BLOCK = tl.constexpr(BLOCK_WIDTH)


@triton.constexpr_function
def row_width(D, BITS, dtype):
    """Columns of a row that holds a vector of width D: numbers for 16 bits, bytes for fewer."""
    return EntryFormat(BITS).width(D, dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def _code_bytes(D, BITS):
    return EntryFormat(BITS).code_bytes(D)


@triton.constexpr_function
def _grid_start(D, BITS, dtype):
    """Offset in bytes of the first step and zero of a row."""
    return EntryFormat(BITS).grid_start(D, dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def _bits_of(dtype, times):
    """The integer dtype that is ``times`` as wide as ``dtype``."""
    return {16: tl.int16, 32: tl.int32, 64: tl.int64}[dtype.primitive_bitwidth * times]


@triton.constexpr_function
def _step_unit(BITS):
    return EntryFormat(BITS).step_unit()


@triton.constexpr_function
def _smallest_step(dtype):
    """The smallest step: the smallest normal number of ``dtype``."""
    return 2.0**-14 if dtype.is_fp16() else 2.0**-126


@triton.constexpr_function
def _block_width(P):
    """Channels of a block in a tile of P columns."""
    return min(P, BLOCK_WIDTH)


@triton.jit
def codes_of(x, step, zero, BITS: tl.constexpr):
    """The codes of numbers x, int32."""
    position = tl.div_rn(x - zero, tl.zeros_like(x) + step)
    return tl.minimum(tl.maximum(tl.floor(position + 0.5), 0.0), 2.0**BITS - 1).to(tl.int32)


@triton.jit
def to_numbers(x, dtype: tl.constexpr):
    """Float32 x rounded to ``dtype``; clipped to float16's largest number, which rounding may exceed by half a step."""
    return (tl.minimum(tl.maximum(x, -65504.0), 65504.0) if dtype.is_fp16() else x).to(dtype)


@triton.jit
def unpacked(bytes, d, C: tl.constexpr, BITS: tl.constexpr):
    """Codes of columns d, float32. bytes ``[n, P]``: for each column the byte ``d % C`` of its vector, which has C."""
    if BITS < 8:
        bytes = (bytes.to(tl.int32) >> (d // C * BITS)[None, :]) & (2**BITS - 1)
    return bytes.to(tl.float32)


@triton.jit
def _codes_at(words, AT: tl.constexpr, BITS: tl.constexpr):
    """The codes in bits ``[AT, AT + BITS)`` of words, float32."""
    return ((words >> AT) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def _codes_of_words(words, AT: tl.constexpr, BITS: tl.constexpr):
    """Codes that begin at bit AT of each byte of words ``[n, m]``, float32 ``[n, 4 m]``."""
    even = tl.join(_codes_at(words, AT, BITS), _codes_at(words, AT + 16, BITS))
    odd = tl.join(_codes_at(words, AT + 8, BITS), _codes_at(words, AT + 24, BITS))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))


@triton.constexpr_function
def _number_asm(AT):
    """Assembly for two bfloat16 numbers of the codes in bits ``[AT, AT + 4)`` of int16 words: ``zero + step * code``.

    A code in the last bits of 128.0 makes 128 plus the code, from which 128 is taken exactly. The product and the sum
    are rounded once, to bfloat16; in float32 neither needs rounding, so `to_numbers` gives the same bits.
    """
    return f"""{{ .reg .b32 c, one, least;
        mov.b32 one, 0x3F803F80;
        mov.b32 least, 0xC300C300;
        shr.b32 c, $1, {AT};
        lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 c, c, one, least;
        fma.rn.bf16x2 $0, c, $2, $3; }}"""


@triton.constexpr_function
def _signed_asm(AT):
    """Assembly for two bfloat16 numbers ``zero + step * (code + 1/2)``, less the product where a sign is not set.

    codes as in `_number_asm`, 127.5 being taken from 128 plus the code. The opposite of the last bit of the words
    ``$2`` is the number's sign.
    """
    return f"""{{ .reg .b32 c, one, least;
        mov.b32 one, 0x3F803F80;
        mov.b32 least, 0xC2FFC2FF;
        shr.b32 c, $1, {AT};
        lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 c, c, one, least;
        lop3.b32 c, c, $2, 0x80008000, 0xD2;
        fma.rn.bf16x2 $0, c, $3, $4; }}"""


@triton.jit
def half_of(words, step, zero, AT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr, MOVES: tl.constexpr):
    """Numbers ``[n, T, P]`` of the codes in bits ``[AT, AT + 4)`` of int16 words, as `to_numbers` rounds them.

    MOVES: the compiler may give each thread the codes of the numbers that it multiplies. Those of keys lie side by
    side; those of values do not, and would be read byte by byte.
    """
    if ASM and dtype.is_bf16():
        words, step = tl.broadcast(words, step.to(dtype))
        zero = tl.broadcast_to(zero.to(dtype), words.shape)
        return tl.inline_asm_elementwise(_number_asm(AT), "=r,r,r,r", [words, step, zero], tl.bfloat16, MOVES, 2)
    else:
        codes = ((words >> AT) & 15).to(tl.float32)
        return to_numbers(zero.to(tl.float32) + step.to(tl.float32) * codes, dtype)


@triton.jit
def signed_half_of(words, signs, bit, step, zero, AT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Numbers ``[n, T, P]``: zeros plus, or where ``bit`` of an int16 word of signs is not set less, ``2 * code + 1``
    steps, as `to_numbers` rounds them; codes as in `half_of`.
    """
    if ASM and dtype.is_bf16():
        words, step = tl.broadcast(words, (2 * step.to(tl.float32)).to(dtype))
        zero = tl.broadcast_to(zero.to(dtype), words.shape)
        given = [words, signs << (15 - bit).to(tl.int16), step, zero]
        return tl.inline_asm_elementwise(_signed_asm(AT), "=r,r,r,r,r", given, tl.bfloat16, True, 2)
    else:
        size = step.to(tl.float32) * (2 * ((words >> AT) & 15) + 1).to(tl.float32)
        is_set = (signs >> bit.to(tl.int16)) & 1 == 1
        return to_numbers(tl.where(is_set, size, -size) + zero.to(tl.float32), dtype)


@triton.jit
def side_by_side(first, second):
    """Tiles ``[n, T, P]`` as one, ``[n * T, 2 P]``."""
    x = tl.permute(tl.join(first, second), (0, 1, 3, 2))
    return tl.reshape(x, (first.shape[0] * first.shape[1], 2 * first.shape[2]))


@triton.jit
def _load_columns(ptr, LO: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Columns ``[LO, LO + N)`` of the vectors of width D in the rows that begin at ``ptr`` ``[n]``, zeros behind."""
    P: tl.constexpr = tile_width(N)
    W: tl.constexpr = _block_width(P)
    C: tl.constexpr = _code_bytes(D, BITS)
    HALF: tl.constexpr = dtype.primitive_bitwidth
    d, block = LO + tl.arange(0, P), tl.arange(0, P // W) + LO // _BLOCK
    # a step and a zero are loaded as one word, which is wide enough to be prefetched
    grid_at = (ptr + _grid_start(D, BITS, dtype))[:, None].to(tl.pointer_type(_bits_of(dtype, 2))) + block[None, :]
    grid = tl.load(grid_at) if P == N else tl.load(grid_at, mask=(block * _BLOCK < LO + N)[None, :], other=0)
    if P == N and (BITS == 8 or P == D):
        # whole words of codes take a third of the instructions
        word = LO // 4 + tl.arange(0, P * BITS // 32)
        words = tl.load(ptr[:, None].to(tl.pointer_type(tl.uint32)) + word[None, :])
        codes = _codes_of_words(words, 0, BITS)
        if BITS == 4:
            codes = tl.permute(tl.join(codes, _codes_of_words(words, 4, BITS)), (0, 2, 1))
    else:
        bytes = tl.load(ptr[:, None] + (d % C)[None, :], mask=(d < LO + N)[None, :], other=0)
        codes = unpacked(bytes, d, C, BITS)
    step = grid.to(_bits_of(dtype, 1)).to(dtype, bitcast=True).to(tl.float32)
    zero = (grid >> HALF).to(_bits_of(dtype, 1)).to(dtype, bitcast=True).to(tl.float32)
    codes = tl.reshape(codes, (ptr.shape[0], P // W, W))
    return tl.reshape(to_numbers(zero[:, :, None] + step[:, :, None] * codes, dtype), (ptr.shape[0], P))


@triton.jit
def _load_halves(ptr, D: tl.constexpr, dtype: tl.constexpr, KEYS: tl.constexpr):
    """Vectors of width D in 4 bits, in the rows that begin at ``ptr`` ``[n]``, by the assembly of `half_of`.

    D is a power of two and at least two blocks, so that a byte's codes are of two blocks.
    """
    BLOCKS: tl.constexpr = D // _BLOCK // 2
    block, column = tl.arange(0, BLOCKS)[None, :, None], tl.arange(0, _BLOCK)[None, None, :]
    ptr = ptr[:, None, None]
    words, x = tl.load(ptr + block * _BLOCK + column).to(tl.int16), ()
    grid = (ptr + _grid_start(D, 4, dtype)).to(tl.pointer_type(dtype)) + 2 * block
    for half in tl.static_range(2):
        step, zero = tl.load(grid + 2 * BLOCKS * half), tl.load(grid + 2 * BLOCKS * half + 1)
        numbers = half_of(words, step, zero, 4 * half, dtype, True, KEYS)
        x = x + (tl.reshape(numbers, (ptr.shape[0], 1, D // 2)),)  # noqa: RUF005
    return side_by_side(x[0], x[1])


@triton.jit
def load_vectors(
    ptr, at, dtype: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Vectors that begin at ``ptr + at``, in ``dtype``. If ``ptr`` points to bytes they are decoded.

    Columns past the last are finite. ASM: there is a GPU that runs the assembly of `half_of`, as there is where kernels
    are launched early. KEYS: the vectors are multiplied by others, else weighted.
    """
    if ptr.dtype.element_ty != tl.uint8:
        return load_rows(ptr, at, None, D0, D1)
    elif ASM and BITS == 4 and dtype.is_bf16() and D1 == 0 and tile_width(D0) == D0 and D0 >= 2 * _BLOCK:
        return parts(_load_halves(ptr + at, D0, dtype, KEYS), None)
    else:
        x = _load_columns(ptr + at, 0, D0, D0 + D1, BITS, dtype)
        return parts(x, _load_columns(ptr + at, D0, D1, D0 + D1, BITS, dtype) if D1 > 0 else None)


@triton.jit
def _step(zero, largest, BITS: tl.constexpr, dtype: tl.constexpr):
    """Steps of blocks, rounded to 8 significant bits, ties to even."""
    step = ((largest - zero) * _step_unit(BITS)).to(tl.int32, bitcast=True)
    step = (step + 0x7FFF + ((step >> 16) & 1)) & -65536
    return tl.maximum(step.to(tl.float32, bitcast=True), _smallest_step(dtype))


@triton.jit
def _quantised(x, N: tl.constexpr, BITS: tl.constexpr):
    """Codes ``[1, P]`` of x ``[1, P]``, a part of N columns; steps and zeros ``[1, blocks]``; the numbers they give."""
    P: tl.constexpr = x.shape[1]
    W: tl.constexpr = _block_width(P)
    inside = tl.reshape(tl.arange(0, P) < N, (1, P // W, W))
    wide = tl.reshape(x.to(tl.float32), (1, P // W, W))
    zero = tl.min(tl.where(inside, wide, float("inf")), 2)
    step = _step(zero, tl.max(tl.where(inside, wide, float("-inf")), 2), BITS, x.dtype)
    codes = codes_of(wide, step[:, :, None], zero[:, :, None], BITS)
    # a latent may end before its tile, in which then whole blocks are outside
    numbers = tl.where(inside, zero[:, :, None] + step[:, :, None] * codes.to(tl.float32), 0.0)
    return tl.reshape(codes, (1, P)), step, zero, tl.reshape(to_numbers(numbers, x.dtype), (1, P))


@triton.jit
def _store_grid(ptr, step, zero, LO: tl.constexpr, N: tl.constexpr):
    """Store the steps and zeros of a part: columns ``[LO, LO + N)``. ptr: the vector's first step."""
    block = (tl.arange(0, step.shape[1]) + LO // _BLOCK)[None, :]
    is_block = block * _BLOCK < LO + N
    tl.store(ptr + 2 * block, step.to(ptr.dtype.element_ty), mask=is_block)
    tl.store(ptr + 2 * block + 1, zero.to(ptr.dtype.element_ty), mask=is_block)


@triton.jit
def _store_codes(
    ptr, codes, LO: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Store the codes ``[1, P]`` of a part: columns ``[LO, LO + N)``.

    A byte holds the 4-bit codes of columns c and ``c + D / 2`` in its low and high half. HIGH: store the high halves,
    once all threads have stored the low ones; else the low halves.
    """
    C: tl.constexpr = _code_bytes(D, BITS)
    d = LO + tl.arange(0, codes.shape[1])[None, :]
    there = d < LO + N
    if HIGH:
        there = there & (d >= C)
        codes = (codes << 4) + tl.load(ptr + d - C, mask=there, other=0)
        tl.store(ptr + d - C, codes.to(tl.uint8), mask=there)
    else:
        tl.store(ptr + d, codes.to(tl.uint8), mask=there & (d < C))


@triton.jit
def put_vector(ptr, x, writes, D0: tl.constexpr, D1: tl.constexpr, BITS: tl.constexpr):
    """Store the vector x ``[1, P]`` in its row at ``ptr`` if ``writes``; return it as it will be read from there.

    In 16 bits that is x itself, in fewer x rounded to the numbers that its codes stand for.
    """
    if BITS == 16:
        if writes:
            store_row(ptr, x, D0, D1)
        return x
    else:
        D: tl.constexpr = D0 + D1
        grid = (ptr + _grid_start(D, BITS, x[0].dtype)).to(tl.pointer_type(x[0].dtype))
        codes, step, zero, first = _quantised(x[0], D0, BITS)
        numbers = parts(first, None)
        if writes:
            _store_grid(grid, step, zero, 0, D0)
            _store_codes(ptr, codes, 0, D0, D, BITS, False)
        if D1 > 0:
            more, step, zero, rest = _quantised(x[1], D1, BITS)
            numbers = parts(first, rest)
            if writes:
                _store_grid(grid, step, zero, D0, D1)
                _store_codes(ptr, more, D0, D1, D, BITS, False)
        if BITS == 4:  # noqa: SIM102 - known when the kernel is compiled
            if writes:
                tl.debug_barrier()
                _store_codes(ptr, codes, 0, D0, D, BITS, True)
                if D1 > 0:
                    _store_codes(ptr, more, D0, D1, D, BITS, True)
        return numbers
