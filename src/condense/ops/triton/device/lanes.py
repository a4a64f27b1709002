"""Tensors that have an element for each thread, for assembly that relies on what a lane holds.

Element e is what lane ``e % 32`` of warp ``e // 32`` holds, which `check_lanes` makes sure of. So a warp's registers
can hold the rows of matrices where a matrix instruction asks for them, and lanes can exchange numbers.

Shapes: E threads, n columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

# query heads of a warp: one for each of the four threads that hold a row
HEADS = tl.constexpr(4)


@triton.jit
def check_lanes(e):
    """Stop the program if element e is not what lane ``e % 32`` holds."""
    asm: tl.constexpr = """{ .reg .pred p; .reg .b32 lane, x;
        mov.u32 lane, %laneid; and.b32 x, $1, 31; setp.ne.u32 p, x, lane; @p trap; mov.b32 $0, x; }"""
    tl.inline_asm_elementwise(asm, "=r,r", [e], tl.int32, False, 1)


@triton.jit
def from_lane(x, LANE: tl.constexpr, OF: tl.constexpr = 32):
    """The numbers x ``[E]``, int32, of one lane of each OF lanes of a warp, for all of these."""
    asm: tl.constexpr = f"shfl.sync.idx.b32 $0, $1, {LANE}, {32 - OF << 8 | 31}, -1;"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], tl.int32, False, 1)


@triton.jit
def load_pair(ptr, APART: tl.constexpr):
    """Two words of 32 bits, so many bytes apart, from pointers ``[E]`` to the first.

    By assembly: Triton's compiler compares each load with all others, and would take more than twice as long.
    """
    asm: tl.constexpr = f"ld.global.b32 $0, [$2]; ld.global.b32 $1, [$2+{APART}];"
    return tl.inline_asm_elementwise(asm, "=&r,=&r,l", [ptr.to(tl.int64)], (tl.int32, tl.int32), False, 1)


@triton.jit
def load_four(ptr):
    """Four words of 32 bits that lie side by side, from pointers ``[E]`` to the first, a multiple of 16 bytes."""
    asm: tl.constexpr = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,l", [ptr.to(tl.int64)], (tl.int32,) * 4, False, 1)


@triton.jit
def _bits_of(x):
    """Numbers of 16 bits in int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def of_quads(low, high):
    """Two numbers ``[E]``, of 16 or 32 bits, of each lane of four, for all of these: four pairs of float32 ``[E]``."""
    dtype: tl.constexpr = low.dtype
    result = ()
    for lane in tl.static_range(4):
        if dtype.primitive_bitwidth == 16:  # both in one word
            x = from_lane(_bits_of(low) | (_bits_of(high) << 16), lane, 4)
            first, second = x.to(tl.int16).to(dtype, bitcast=True), (x >> 16).to(tl.int16).to(dtype, bitcast=True)
        else:
            first = from_lane(low.to(tl.int32, bitcast=True), lane, 4).to(dtype, bitcast=True)
            second = from_lane(high.to(tl.int32, bitcast=True), lane, 4).to(dtype, bitcast=True)
        result = result + ((first.to(tl.float32), second.to(tl.float32)),)  # noqa: RUF005
    return result


@triton.jit
def _crossed(x, MASK: tl.constexpr):
    """float32 x ``[E]`` of the lane whose number differs in the bits of MASK."""
    asm: tl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {MASK}, 31, -1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, False, 1)


@triton.jit
def largest_of_lanes(x):
    """The largest of float32 x ``[E]`` in all lanes of a warp that differ by a multiple of 4."""
    for bit in tl.static_range(2, 5):
        x = tl.maximum(x, _crossed(x, 1 << bit))
    return x


@triton.jit
def largest_of_rows(x, e):
    """The largest numbers of 8 groups, ``[E]``: lane ``4 i + h`` gets those of group i of all lanes ``4 j + h``.

    x: 8 tensors ``[E]``, one for each group. Each exchange halves the groups that a lane has still to look after.
    """
    for bit in tl.static_range(4, 1, -1):
        upper, kept = (e >> bit) & 1 == 1, ()
        for i in tl.static_range(len(x) // 2):
            low, high = x[i], x[i + len(x) // 2]
            given = _crossed(tl.where(upper, low, high), 1 << bit)
            kept = kept + (tl.maximum(tl.where(upper, high, low), given),)  # noqa: RUF005
        x = kept
    return x[0]


@triton.jit
def of_heads(x, E: tl.constexpr):
    """For each thread the number of its query head, ``[E]``, from x ``[4]``."""
    return tl.reshape(tl.broadcast_to(x[None, :], (E // 4, 4)), (E,))


@triton.jit
def for_lanes(x, E: tl.constexpr):
    """Numbers x ``[4, 2, 4, n]`` as the instruction asks for its second matrix, ``[E, n]``: those of ``e // 8 % 4``, of
    ``e // 4 % 2``, and of ``e % 4``.
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
