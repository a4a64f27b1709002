"""Quantization of numbers to codes of 8 or 4 bits (`condense.ops.tensors.codes`) and of entries to rows of bytes
(`condense.ops.entries.EntryFormat`) in kernels, bit-equal to PyTorch's.

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
# `middle_codes` subtracts this from codes 0 to 15, so that their sizes are small; bfloat16 holds the results exactly
MIDDLE = tl.constexpr(8.0)


@triton.constexpr_function
def row_width(D, BITS, dtype):
    """Columns of a row that holds a vector of width D: numbers for 16 bits, bytes for fewer."""
    return EntryFormat(BITS).width(D, dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def _code_bytes(D, BITS):
    return EntryFormat(BITS).code_bytes(D)


@triton.constexpr_function
def _grid_start(D, BITS, dtype):
    """Offset in bytes of the first quantization step and zero in a row."""
    return EntryFormat(BITS).grid_start(D, dtype.primitive_bitwidth // 8)


@triton.constexpr_function
def _bits_of(dtype, times):
    """The integer dtype that is ``times`` as wide as ``dtype``."""
    return {16: tl.int16, 32: tl.int32, 64: tl.int64}[dtype.primitive_bitwidth * times]


@triton.constexpr_function
def _step_unit(BITS):
    return EntryFormat(BITS).step_unit()


@triton.jit
def codes_of(x, step, zero, BITS: tl.constexpr):
    """Codes of numbers x, int32: ``(x - zero) / step`` rounded, from 0 to ``2 ** BITS - 1``."""
    position = tl.div_rn(x - zero, tl.zeros_like(x) + step)
    return tl.minimum(tl.maximum(tl.floor(position + 0.5), 0.0), 2.0**BITS - 1).to(tl.int32)


@triton.jit
def to_numbers(x, dtype: tl.constexpr):
    """Float32 x rounded to ``dtype``; clipped to float16's largest number, which rounding may exceed by half a step."""
    return (tl.minimum(tl.maximum(x, -65504.0), 65504.0) if dtype.is_fp16() else x).to(dtype)


@triton.jit
def unpacked(bytes, d, C: tl.constexpr, BITS: tl.constexpr):
    """Codes of columns d, float32. bytes ``[n, P]``: byte ``d % C`` of each vector. C: bytes of a vector's codes."""
    if BITS < 8:
        bytes = (bytes.to(tl.int32) >> (d // C * BITS)[None, :]) & (2**BITS - 1)
    return bytes.to(tl.float32)


@triton.constexpr_function
def run_width(C, P):
    """Length of the runs of columns that `packed` moves as one. P: all columns. C: bytes of their codes."""
    return min(C & -C, P // 16)


@triton.jit
def packed(codes, C: tl.constexpr, BITS: tl.constexpr):
    """Codes ``[n, P]``, 0 past the last column, packed to bytes, uint8 ``[n, m]``, of which the first C are used.

    Byte c has the codes of columns c, ``C + c``, ..., from its lowest bits on. A product with a matrix of powers of two
    shifts runs of columns to their place and adds them up to bytes, which are at most 255 and so exact.
    """
    n: tl.constexpr = codes.shape[0]
    E: tl.constexpr = run_width(C, codes.shape[1])
    N: tl.constexpr = C // E
    R: tl.constexpr = codes.shape[1] // E
    M: tl.constexpr = tile_width(N)
    if M < 64:
        run, place = tl.arange(0, R)[None, :], tl.arange(0, M)[:, None]
        is_place = (run % N == place) & (run < 8 // BITS * N)
        places = tl.where(is_place, 1 << run // N * BITS, 0).to(tl.float16)  # [M, R]
        runs = tl.reshape(tl.permute(tl.reshape(codes.to(tl.float16), (n, R, E)), (1, 0, 2)), (R, n * E))
        bytes = tl.permute(tl.reshape(tl.dot(places, runs), (M, n, E)), (1, 0, 2))
        return tl.reshape(bytes, (n, M * E)).to(tl.int32).to(tl.uint8)
    else:
        # for many short runs that matrix is too large: multiply 64 columns at a time
        T: tl.constexpr = codes.shape[1] // 64
        tiles, bytes = tl.reshape(codes, (n, T, 64)), tl.zeros([n, M * E], tl.float32)
        for j in tl.range(0, T, num_stages=1):
            x = tl.sum(tl.where((tl.arange(0, T) == j)[None, :, None], tiles, 0.0), 1)  # [n, 64]
            d, c = j * 64 + tl.arange(0, 64)[:, None], tl.arange(0, M * E)[None, :]
            places = tl.where((d % C == c) & (d < 8 // BITS * C), 1 << d // C * BITS, 0).to(tl.float16)
            bytes = tl.dot(x.to(tl.float16), places, bytes)
        return bytes.to(tl.int32).to(tl.uint8)


@triton.jit
def _codes_at(words, AT: tl.constexpr, BITS: tl.constexpr):
    """The codes in bits ``[AT, AT + BITS)`` of words, float32."""
    return ((words >> AT) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def _codes_of_words(words, AT: tl.constexpr, BITS: tl.constexpr):
    """Codes that begin at bit AT of each byte of words ``[n, m]``, float32 ``[n, 4 m]``."""
    even = tl.join(_codes_at(words, AT, BITS), _codes_at(words, AT + 16, BITS))  # [n, m, 2]
    odd = tl.join(_codes_at(words, AT + 8, BITS), _codes_at(words, AT + 24, BITS))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))


@triton.constexpr_function
def _codes_asm(AT, LESS, REST, MEANWHILE=""):
    """Assembly for two packed words: c = bfloat16 of the code in bits ``[AT, AT + 4)`` minus a constant; then REST.

    A code in the last bits of bfloat16 128.0 makes 128 + code. LESS, ``-(128 + constant)`` as bits of two bfloat16
    numbers, is added to that, exactly. MEANWHILE: instructions that compute s and do not depend on c.
    """
    return f"""{{ .reg .b32 c, s, least;
        mov.b32 least, {LESS};
        shr.b32 c, $1, {AT};
        {MEANWHILE}
        lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
        add.rn.bf16x2 c, c, least;
        {REST} }}"""


@triton.jit
def numbers_of(words, step, zero, AT: tl.constexpr, dtype: tl.constexpr):
    """bfloat16 ``zero + step * code`` of the codes in bits ``[AT, AT + 4)`` of int16 words, by assembly for a GPU.

    The fused multiply-add rounds once. In float32 product and sum are exact, so `to_numbers` returns the same bits.
    """
    asm: tl.constexpr = _codes_asm(AT, 0xC300C300, "fma.rn.bf16x2 $0, c, $2, $3;")
    words, step = tl.broadcast(words, step.to(dtype))
    zero = tl.broadcast_to(zero.to(dtype), words.shape)
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [words, step, zero], tl.bfloat16, False, 2)


@triton.jit
def middle_codes(words, AT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Codes in bits ``[AT, AT + 4)`` of int16 words minus `MIDDLE`, in ``dtype``. ASM: a GPU may run assembly."""
    if ASM and dtype.is_bf16():
        asm: tl.constexpr = _codes_asm(AT, 0xC308C308, "mov.b32 $0, c;")
        return tl.inline_asm_elementwise(asm, "=r,r", [words], tl.bfloat16, False, 2)
    else:
        return (((words >> AT) & 15).to(tl.float32) - MIDDLE).to(dtype)


@triton.jit
def signed_codes(words, signs, bit, AT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """``code + 1/2``, negative where bit ``AT + bit`` of the int16 word of signs is not set; codes and ASM as in
    `middle_codes`. Both words of a pair of neighbours have the same ``bit``, int32.
    """
    if ASM and dtype.is_bf16():
        # the sign's bit is shifted to bit 15, where bfloat16 has its sign, and inverted: set means positive here
        asm: tl.constexpr = _codes_asm(AT, 0xC2FFC2FF, "lop3.b32 $0, c, s, 0x80008000, 0xD2;", "shl.b32 s, $2, $3;")
        words, bit = tl.broadcast(words, bit)
        given = [words, signs, (15 - AT) - bit]
        return tl.inline_asm_elementwise(asm, "=r,r,r,r,r", given, tl.bfloat16, False, 2)
    else:
        size = ((words >> AT) & 15).to(tl.float32) + 0.5
        is_set = (signs >> (AT + bit).to(tl.int16)) & 1 == 1
        return tl.where(is_set, size, -size).to(dtype)


@triton.jit
def to_words(x, D: tl.constexpr):
    """Vectors ``[n, D]`` in four parts ``[n, D / 4]``: columns whose codes begin at bits 0, 4, 8, 12 of int16 words."""
    even, odd = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, D // 4, 2)), (0, 2, 1, 3)))  # [n, D // 4, 2]
    return tl.split(even) + tl.split(odd)


@triton.jit
def from_words(x, D: tl.constexpr):
    """Vectors ``[n, D]`` from their four parts: the inverse of `to_words`."""
    x = tl.permute(tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3])), (0, 2, 1, 3))  # [n, 2, D // 4, 2]
    return tl.reshape(x, (x.shape[0], D))


@triton.jit
def pair_of(word, dtype: tl.constexpr):
    """Both numbers of ``dtype`` in a word that is twice as wide."""
    first = word.to(_bits_of(dtype, 1)).to(dtype, bitcast=True)
    return first, (word >> dtype.primitive_bitwidth).to(_bits_of(dtype, 1)).to(dtype, bitcast=True)


@triton.jit
def _load_columns(ptr, LO: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Load and decode columns ``[LO, LO + N)`` of vectors of width D in the rows at ``ptr`` ``[n]``; then zeros."""
    P: tl.constexpr = tile_width(N)
    W: tl.constexpr = min(P, _BLOCK)
    C: tl.constexpr = _code_bytes(D, BITS)
    d, block = LO + tl.arange(0, P), tl.arange(0, P // W) + LO // _BLOCK
    # a step and a zero are loaded as one word, which is wide enough to be prefetched
    grid_at = (ptr + _grid_start(D, BITS, dtype))[:, None].to(tl.pointer_type(_bits_of(dtype, 2))) + block[None, :]
    grid = tl.load(grid_at) if P == N else tl.load(grid_at, mask=(block * _BLOCK < LO + N)[None, :], other=0)
    if P == N and (BITS == 8 or P == D):
        # loading codes as whole words takes a third of the instructions
        word = LO // 4 + tl.arange(0, P * BITS // 32)
        words = tl.load(ptr[:, None].to(tl.pointer_type(tl.uint32)) + word[None, :])  # [n, P * BITS // 32]
        codes = _codes_of_words(words, 0, BITS)
        if BITS == 4:
            codes = tl.permute(tl.join(codes, _codes_of_words(words, 4, BITS)), (0, 2, 1))  # [n, 2, P // 2]
    else:
        bytes = tl.load(ptr[:, None] + (d % C)[None, :], mask=(d < LO + N)[None, :], other=0)
        codes = unpacked(bytes, d, C, BITS)
    step, zero = pair_of(grid, dtype)  # [n, P // W]
    codes = tl.reshape(codes, (ptr.shape[0], P // W, W))
    numbers = to_numbers(zero.to(tl.float32)[:, :, None] + step.to(tl.float32)[:, :, None] * codes, dtype)
    return tl.reshape(numbers, (ptr.shape[0], P))


@triton.jit
def _load_words(ptr, D: tl.constexpr, dtype: tl.constexpr):
    """Load and decode 4-bit vectors of width D in the rows that begin at ``ptr`` ``[n]``, in the parts of `to_words`.

    D is a power of two and at least two blocks, so that both codes of a byte are in different blocks.
    """
    BLOCKS: tl.constexpr = D // _BLOCK // 2
    SIZE: tl.constexpr = _BLOCK // 2
    block, x = tl.arange(0, BLOCKS)[None, :, None], ()
    ptr = ptr[:, None, None]
    # [n, BLOCKS, SIZE]
    words = tl.load(ptr.to(tl.pointer_type(tl.int16)) + block * SIZE + tl.arange(0, SIZE)[None, None, :])
    # a step and a zero are loaded as one word, which is wide enough to be prefetched
    grid = (ptr + _grid_start(D, 4, dtype)).to(tl.pointer_type(_bits_of(dtype, 2))) + block
    first, second = tl.load(grid), tl.load(grid + BLOCKS)  # [n, BLOCKS, 1]
    for part in tl.static_range(4):
        step, zero = pair_of(second if part % 2 else first, dtype)
        x += (tl.reshape(numbers_of(words, step, zero, 4 * part, dtype), (ptr.shape[0], D // 4)),)
    return x


@triton.constexpr_function
def entries_in_words(ptr, dtype, D0, D1, BITS, ASM):
    """Whether `load_vectors` returns vectors in the parts of `to_words`."""
    whole = D1 == 0 and tile_width(D0) == D0 and D0 >= 2 * BLOCK_WIDTH
    return ptr.element_ty == tl.uint8 and ASM and BITS == 4 and dtype.is_bf16() and whole


@triton.jit
def load_vectors(
    ptr, at, dtype: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Load vectors that begin at ``ptr + at``, in ``dtype``; decode them if ``ptr`` points to bytes.

    Columns past the last are finite. They are in parts of D0 and D1 columns, or in those of `to_words` if
    `entries_in_words` says so. ASM: the GPU runs the assembly of `numbers_of`, as all that launch kernels early do.
    """
    if ptr.dtype.element_ty != tl.uint8:
        return load_rows(ptr, at, None, D0, D1)
    elif entries_in_words(ptr.dtype, dtype, D0, D1, BITS, ASM):
        return _load_words(ptr + at, D0, dtype)
    else:
        x = _load_columns(ptr + at, 0, D0, D0 + D1, BITS, dtype)
        return parts(x, _load_columns(ptr + at, D0, D1, D0 + D1, BITS, dtype) if D1 > 0 else None)


@triton.jit
def _step(zero, largest, BITS: tl.constexpr, dtype: tl.constexpr):
    """Quantization steps of blocks, normal numbers of ``dtype``, rounded to 8 significant bits, ties to even."""
    step = ((largest - zero) * _step_unit(BITS)).to(tl.int32, bitcast=True)
    step = (step + 0x7FFF + ((step >> 16) & 1)) & -65536
    return tl.maximum(step.to(tl.float32, bitcast=True), 2.0**-14 if dtype.is_fp16() else 2.0**-126)


@triton.jit
def _quantised(x, N: tl.constexpr, BITS: tl.constexpr):
    """Codes ``[1, P]`` of x ``[1, P]``, a part of N columns; steps and zeros ``[1, blocks]``; decoded ``[1, P]``."""
    P: tl.constexpr = x.shape[1]
    W: tl.constexpr = min(P, _BLOCK)
    inside = tl.reshape(tl.arange(0, P) < N, (1, P // W, W))
    wide = tl.reshape(x.to(tl.float32), (1, P // W, W))
    zero = tl.min(tl.where(inside, wide, float("inf")), 2)  # [1, P // W]
    step = _step(zero, tl.max(tl.where(inside, wide, float("-inf")), 2), BITS, x.dtype)
    codes = codes_of(wide, step[:, :, None], zero[:, :, None], BITS)  # [1, P // W, W]
    # the tile of a latent may have whole blocks past the last column, whose step and zero are meaningless
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

    With 16 bits that is x itself, with fewer its decoded codes.
    """
    if BITS == 16:
        if writes:
            store_row(ptr, x, D0, D1)
        return x
    else:
        D: tl.constexpr = D0 + D1
        grid = (ptr + _grid_start(D, BITS, x[0].dtype)).to(tl.pointer_type(x[0].dtype))
        WIDTHS: tl.constexpr = (D0, D1)
        codes, numbers = (), ()
        for part in tl.static_range(len(x)):
            own, step, zero, rounded = _quantised(x[part], WIDTHS[part], BITS)
            codes, numbers = codes + (own,), numbers + (rounded,)  # noqa: RUF005
            if writes:
                _store_grid(grid, step, zero, part * D0, WIDTHS[part])
                _store_codes(ptr, own, part * D0, WIDTHS[part], D, BITS, False)
        if BITS == 4:  # noqa: SIM102 - known when the kernel is compiled
            if writes:
                tl.debug_barrier()
                for part in tl.static_range(len(x)):
                    _store_codes(ptr, codes[part], part * D0, WIDTHS[part], D, BITS, True)
        return numbers
