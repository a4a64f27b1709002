"""Tensors with one element per thread, for assembly that depends on which lane holds which element.

Lane ``e % 32`` of warp ``e // 32`` holds element e; `check_lanes` stops the program if it does not. So registers can
hold matrices in the layout that a tensor-core instruction needs, and lanes can exchange numbers.

Shapes: E threads, n columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

# query heads per warp: four threads hold a row of a product, one head each
HEADS = tl.constexpr(4)


@triton.jit
def check_lanes(e):
    """Stop the program if lane ``e % 32`` does not hold element e."""
    asm: tl.constexpr = """{ .reg .pred p; .reg .b32 lane, x;
        mov.u32 lane, %laneid; and.b32 x, $1, 31; setp.ne.u32 p, x, lane; @p trap; mov.b32 $0, x; }"""
    tl.inline_asm_elementwise(asm, "=r,r", [e], tl.int32, False, 1)


@triton.jit
def from_lane(x, LANE: tl.constexpr, OF: tl.constexpr = 32):
    """Numbers x ``[E]``, int32, of lane LANE of each OF adjacent lanes, broadcast to all of these."""
    asm: tl.constexpr = f"shfl.sync.idx.b32 $0, $1, {LANE}, {32 - OF << 8 | 31}, -1;"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], tl.int32, False, 1)


@triton.jit
def load_pair(ptr):
    """Load two 32-bit words that are 128 bytes apart. ptr ``[E]``: to the first.

    In assembly, because Triton's compiler compares each load with all others, and would take more than twice as long.
    """
    asm: tl.constexpr = "ld.global.b32 $0, [$2]; ld.global.b32 $1, [$2+128];"
    return tl.inline_asm_elementwise(asm, "=&r,=&r,l", [ptr.to(tl.int64)], (tl.int32, tl.int32), False, 1)


@triton.jit
def load_four(ptr):
    """Load four adjacent 32-bit words. ptr ``[E]``: to the first, aligned to 16 bytes."""
    asm: tl.constexpr = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,l", [ptr.to(tl.int64)], (tl.int32,) * 4, False, 1)


@triton.jit
def _bits_of(x):
    """Bits of 16-bit numbers x, in the low half of int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def of_quads(low, high):
    """Numbers ``low`` and ``high``, 16 or 32 bits ``[E]``, of each of four adjacent lanes, for all four: four pairs of
    float32 ``[E]``.
    """
    dtype: tl.constexpr = low.dtype
    result = ()
    for lane in tl.static_range(4):
        if dtype.primitive_bitwidth == 16:  # both in one word
            x = from_lane(_bits_of(low) | (_bits_of(high) << 16), lane, 4)
            first, second = x.to(tl.int16).to(dtype, bitcast=True), (x >> 16).to(tl.int16).to(dtype, bitcast=True)
        else:
            first = from_lane(low.to(tl.int32, bitcast=True), lane, 4).to(dtype, bitcast=True)
            second = from_lane(high.to(tl.int32, bitcast=True), lane, 4).to(dtype, bitcast=True)
        result += ((first.to(tl.float32), second.to(tl.float32)),)
    return result


@triton.jit
def _crossed(x, MASK: tl.constexpr):
    """Numbers x ``[E]``, float32, of the lane whose index differs from the own one in the bits of MASK."""
    asm: tl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {MASK}, 31, -1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, False, 1)


@triton.jit
def largest_of_lanes(x):
    """Largest of x, float32 ``[E]``, over the lanes of a warp whose indices differ by a multiple of 4."""
    for bit in tl.static_range(2, 5):
        x = tl.maximum(x, _crossed(x, 1 << bit))
    return x


@triton.jit
def largest_of_rows(x, e):
    """Largest numbers of 8 groups, ``[E]``: lane ``4 i + h`` gets the largest of group i over all lanes ``4 j + h``.

    x: 8 tensors ``[E]``, one per group. Each exchange halves the number of groups that a lane still reduces.
    """
    for bit in tl.static_range(4, 1, -1):
        upper, kept = (e >> bit) & 1 == 1, ()
        for i in tl.static_range(len(x) // 2):
            low, high = x[i], x[i + len(x) // 2]
            given = _crossed(tl.where(upper, low, high), 1 << bit)
            kept += (tl.maximum(tl.where(upper, high, low), given),)
        x = kept
    return x[0]


@triton.jit
def of_heads(x, E: tl.constexpr):
    """Number of each thread's query head ``e % 4``, ``[E]``, from x ``[4]``."""
    return tl.reshape(tl.broadcast_to(x[None, :], (E // 4, 4)), (E,))


@triton.jit
def for_lanes(x, E: tl.constexpr):
    """Numbers x ``[4, 2, 4, n]`` as the second operand of a tensor-core instruction, ``[E, n]``: thread e gets
    ``x[e // 8 % 4, e // 4 % 2, e % 4]``.
    """
    N: tl.constexpr = x.shape[3]
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (1, 32, N)), (E // 32, 32, N)), (E, N))


@triton.jit
def columns(x):
    """The columns ``[E]`` of x ``[E, n]``, n a power of two."""
    if x.shape[1] == 1:
        return (tl.reshape(x, (x.shape[0],)),)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        return columns(first) + columns(second)
