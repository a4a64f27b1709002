"""Attention to entries in 4 bits by single warps, into the sums of `condense.ops.triton.device.lane_tokens`.

Keys and values become bfloat16 numbers as the codes are loaded, the same to the bit as elsewhere
(`condense.ops.entries.EntryFormat`). What a thread holds of a vector lies in two blocks: codes in low halves of bytes
in one, in high halves in another.

Shapes: E = 32 threads of one warp. A tile has 16 entries; of keys thread e has those of entries ``e // 4`` and ``e // 4
+ 8``, of values those of ``e % 4 * 2`` and the next, and of both 8 further on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device import lanes
from condense.ops.triton.device.lane_tokens import LaneSums, add_values, weigh
from condense.ops.triton.device.scores import soft_cap

# bytes of the codes of a vector, behind which steps and zeros of its blocks follow
_CODES = tl.constexpr(64)


@triton.constexpr_function
def fits(BITS, D, DV, BN, FAR):
    """Whether entries in bfloat16 are read so. BN: entries of a tile; FAR: a tile lies in one page."""
    return BITS == 4 and D == DV == 128 and BN == 16 and (FAR is None or FAR.slots % 16 == 0)


class LaneEntries(NamedTuple):
    """A tile of entries as `load_entries` reads it, in words: codes and grids, a step and a zero each, of keys by row
    and half, of values by token and half.
    """

    key_codes: Any
    key_grids: Any
    value_codes: Any
    value_grids: Any


@triton.jit
def entry_queries(q):
    """Query heads for `add_entries`, from bfloat16 q ``[4 * PER, 128]``: 16 tensors ``[E]`` of two numbers each."""
    x = tl.reshape(q.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, (q.shape[0], 2, 4, 4, 2, 2))
    # columns 0 and 2 of every four make a word, columns 1 and 3 the next, as masks cut codes out of words
    x = tl.sum(x << (16 * tl.arange(0, 2))[None, None, None, None, :, None], 4)
    x = tl.reshape(tl.permute(x, (0, 2, 1, 3, 4)), (q.shape[0], 4, 16))
    if q.shape[0] == 4:
        # every second column of the product is empty
        x = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 3, 1, 2))
    return lanes.columns(lanes.for_lanes(tl.reshape(x, (4, 2, 4, 16)), 32))


@triton.jit
def load_entries(k_ptr, v_ptr, last, e, STRIDE: tl.constexpr, STRIDE_V: tl.constexpr):
    """The `LaneEntries` of a tile. k_ptr, v_ptr: to the bytes of its first key and value. last: number in the tile of
    the last entry, which stands for all behind it. STRIDE, STRIDE_V: bytes from one row to the next.
    """
    k, kg, v, vg = (), (), (), ()
    for far in tl.static_range(2):
        row = tl.minimum(e // 4 + 8 * far, last) * STRIDE
        codes = (k_ptr + row + e % 4 * 16).to(tl.pointer_type(tl.int64))
        grids = (k_ptr + row + _CODES + e % 4 // 2 * 4).to(tl.pointer_type(tl.int32))
        k, kg = k + (tl.load(codes), tl.load(codes + 1)), kg + (tl.load(grids), tl.load(grids + 2))  # noqa: RUF005
        for second in tl.static_range(2):
            row = tl.minimum(e % 4 * 2 + 8 * far + second, last) * STRIDE_V
            grids = (v_ptr + row + _CODES + e // 16 * 4).to(tl.pointer_type(tl.int32))
            v = v + (tl.load((v_ptr + row + e // 4 * 8).to(tl.pointer_type(tl.int64))),)  # noqa: RUF005
            vg = vg + (tl.load(grids), tl.load(grids + 2))  # noqa: RUF005
    return LaneEntries(k, kg, v, vg)


@triton.constexpr_function
def _keys_asm():
    """Assembly of `_key_products`, its constraints and types: codes of two columns at a time as bfloat16 numbers."""
    lines = [".reg .b32 w<8>, s<4>, z<4>, u, a<4>, less; .reg .f32 c<4>; mov.b32 less, 0xC300C300;"]
    lines += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i}; mov.f32 c{i}, 0f00000000;" for i in range(4)]
    lines += [
        f"prmt.b32 s{i}, ${8 + i}, ${8 + i}, 0x1010; prmt.b32 z{i}, ${8 + i}, ${8 + i}, 0x3232;" for i in range(4)
    ]
    for half in range(2):
        for i in range(4):
            for odd in range(2):
                for row in range(2):
                    a, grid = 2 * odd + row, 2 * row + half
                    lines += [
                        f"shr.u32 u, w{4 * row + i}, {8 * odd + 4 * half};",
                        "lop3.b32 u, u, 0x000F000F, 0x43004300, 0xEA;",
                        f"add.rn.bf16x2 u, u, less; fma.rn.bf16x2 a{a}, u, s{grid}, z{grid};",
                    ]
            q = 12 + 8 * half + 2 * i
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{c0, c1, c2, c3}}, {{a0, a1, a2, a3}}, {{${q}, ${q + 1}}}, {{c0, c1, c2, c3}};"
            )
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)]
    constraints = "=&f" + ",=&f" * 3 + ",l" * 4 + ",r" * 20
    return "{ " + "\n".join(lines) + " }", constraints, (tl.float32,) * 4


@triton.jit
def _pairs(first, second):
    """Steps of two tokens in a word, and zeros, of their grids."""
    asm: tl.constexpr = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r,r", [first, second], (tl.int32, tl.int32), False, 1)


@triton.jit
def add_entries(sums, queries, entries, offset, scale, CAP: tl.constexpr):
    """Add `LaneEntries` to `LaneSums`. queries: of `entry_queries`. offset: what is added to the scores of a thread's
    two entries, ``[E]`` each, -inf for those that are not seen.
    """
    PER: tl.constexpr = len(sums.m)
    asm: tl.constexpr = _keys_asm()
    given = entries.key_codes + entries.key_grids + queries
    x, s0, s1 = tl.inline_asm_elementwise(asm[0], asm[1], given, asm[2], False, 1), (), ()
    for s in tl.static_range(PER):
        s0 = s0 + (soft_cap(x[s] * scale, CAP)[0] + offset[0],)  # noqa: RUF005
        s1 = s1 + (soft_cap(x[2 + s] * scale, CAP)[0] + offset[1],)  # noqa: RUF005
    p0, p1, m, alpha = weigh(sums, s0, s1)
    total, shift, steps, zeros = (), (), (), ()
    for s in tl.static_range(PER):
        total = total + (sums.total[s] * alpha[s] + p0[s] + p1[s],)  # noqa: RUF005
        shift = shift + (sums.shift[s] * alpha[s],)  # noqa: RUF005
    for far in tl.static_range(2):
        for half in tl.static_range(2):
            step, zero = _pairs(entries.value_grids[4 * far + half], entries.value_grids[4 * far + 2 + half])
            steps, zeros = steps + (step,), zeros + (zero,)  # noqa: RUF005
    return LaneSums(add_values(sums.acc, alpha, entries.value_codes, steps + zeros, p0, p1), m, total, shift)
