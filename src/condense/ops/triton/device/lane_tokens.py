"""Attention to groups of 16 tokens in 4 bits by single warps, which load them as matrix units take them: nothing passes
through shared memory (`condense.ops.triton.device.lanes`).

Keys are multiplied as whole numbers of 5 bits with queries of 15 bits: a query is 128 times one number of 8 bits plus
another, which have a column of the product each. Values are weighted in bfloat16, as elsewhere.

Shapes: E = 32 threads of one warp. In scores, thread e has tokens ``e // 4`` and ``e // 4 + 8`` of a group, and query
head ``e % 4``; in sums of values the 16 columns ``8 * (e // 4)`` to ``8 * (e // 4) + 7``, and those 64 further on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device import lanes
from condense.ops.triton.device.codes import MIDDLE
from condense.ops.triton.device.scores import soft_cap

# a query's number in whole numbers: 127 times 128
_LEVELS = tl.constexpr(16256.0)
_TINY = tl.constexpr(2.0**-100)
# a key's number, in steps, is twice a whole number from 0 to 31, less this
_LESS = tl.constexpr(31)


@triton.constexpr_function
def fits(bits, g, D, DV, BN, SLOTS):
    """Whether open groups in bfloat16 are read so. BN: tokens of a tile; SLOTS: of the store."""
    return bits == 4 and g == BN == 16 and D == DV == 128 and SLOTS == 0


class LaneQueries(NamedTuple):
    """Query heads. words: 8 tensors ``[E]`` of four numbers of 8 bits each. Of head ``e % 4``, ``[E]``: unit, what a
    whole number 1 stands for, float32; less, the opposite of `_LESS` times the sum of the whole numbers, int32.
    """

    words: Any
    unit: Any
    less: Any


class LaneSums(NamedTuple):
    """An online softmax. acc: 32 tensors ``[E]``, of each four the first and the third are sums, the others 0. m: the
    largest score, the same in all threads of a head. total, shift: sums of weights, and of what is to be added to all
    columns, of the tokens of a thread.
    """

    acc: Any
    m: Any
    total: Any
    shift: Any


class LaneGroup(NamedTuple):
    """A group as `load_group` reads it. key_codes: words of codes, two for each of two tokens, then words of signs of
    each. value_codes: words of codes of four tokens. key_steps, steps, zeros: of two tokens, the last two of values.
    """

    key_codes: Any
    value_codes: Any
    key_steps: Any
    steps: Any
    zeros: Any


@triton.jit
def lane_queries(x):
    """`LaneQueries` of queries x, float32 ``[4, 128]``."""
    D: tl.constexpr = x.shape[1]
    unit = tl.maximum(tl.max(tl.abs(x), 1), _TINY) * (1 / _LEVELS)
    number = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)
    first = (number + 64) >> 7
    both = tl.permute(tl.join(first, number - 128 * first), (0, 2, 1))
    # four to a word, whose columns are those of the codes in low halves of four bytes, or in high ones
    both = tl.reshape(both & 255, (4, 2, D // 4, 4)) << (8 * tl.arange(0, 4))[None, None, None, :]
    # half, then first or second 32 bytes, then thread, then word of two
    words = tl.permute(tl.reshape(tl.sum(both, 3), (4, 2, 4, 4, 2)), (0, 1, 3, 2, 4))
    words = lanes.columns(lanes.for_lanes(tl.reshape(words, (4, 2, 4, 8)), 32))
    less = tl.sum(number, 1) * -_LESS
    return LaneQueries(words, lanes.of_heads(unit, 32), lanes.of_heads(less, 32))


@triton.jit
def load_group(store_ptr, signs_ptr, e, dtype: tl.constexpr, FORM: tl.constexpr):
    """The `LaneGroup` of the group whose piece, and whose signs, begin at these pointers."""
    codes = (store_ptr + FORM.keys_at + e // 4 * 64 + e % 4 * 8).to(tl.pointer_type(tl.int64))
    signs = (signs_ptr + e // 4 * 16 + e % 2 * 8).to(tl.pointer_type(tl.int64))
    values = (store_ptr + FORM.values_at + e % 4 * 128 + e // 4 * 8).to(tl.pointer_type(tl.int64))
    numbers = store_ptr.to(tl.pointer_type(dtype)) + e // 4
    near, far = (tl.load(codes), tl.load(codes + 4)), (tl.load(codes + 64), tl.load(codes + 68))
    return LaneGroup(
        near + far + (tl.load(signs), tl.load(signs + 16)),
        (tl.load(values), tl.load(values + 8), tl.load(values + 64), tl.load(values + 72)),
        (tl.load(numbers + 2 * FORM.g), tl.load(numbers + 2 * FORM.g + 8)),
        (tl.load(numbers), tl.load(numbers + 8)),
        (tl.load(numbers + FORM.g), tl.load(numbers + FORM.g + 8)),
    )


@triton.constexpr_function
def _keys_asm():
    """Assembly of `_key_products`. A code and its sign make a number from 0 to 31: the code after 16, or 15 less it."""
    lines = [".reg .b32 w<8>, s<4>, t, x, a<4>, c<4>;"]
    lines += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${2 + i};" for i in range(4)]
    lines += [f"mov.b64 {{s{2 * i}, s{2 * i + 1}}}, ${6 + i};" for i in range(2)]
    lines += [f"mov.b32 c{i}, 0;" for i in range(4)]
    for j in range(4):
        for row in range(2):
            w, s = f"w{4 * row + j}", f"s{2 * row + j % 2}"
            for high in range(2):
                lines += [
                    f"shr.u32 t, {s}, {2 * (j // 2) + 4 * high}; and.b32 t, t, 0x01010101; add.u32 t, t, 0x0F0F0F0F;",
                    f"shr.u32 x, {w}, {4 * high}; lop3.b32 a{2 * high + row}, x, 0x0F0F0F0F, t, 0x6A;",
                ]
        lines.append(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            f"{{c0, c1, c2, c3}}, {{a0, a1, a2, a3}}, {{${8 + j}, ${12 + j}}}, {{c0, c1, c2, c3}};"
        )
    for row in range(2):
        c = 2 * row
        lines.append(f"mad.lo.s32 x, c{c}, 256, $16; mad.lo.s32 x, c{c + 1}, 2, x; cvt.rn.f32.s32 ${row}, x;")
    return "{ " + "\n".join(lines) + " }"


@triton.jit
def _key_products(keys, queries, e):
    """Products of a query's whole numbers with the keys of two tokens, in their steps: two float32 tensors ``[E]``."""
    asm: tl.constexpr = _keys_asm()
    # words of threads 2 and 3 have the signs of the next columns
    shift = (e % 4 // 2).to(tl.int64)
    codes = (keys[0], keys[1], keys[2], keys[3], keys[4] >> shift, keys[5] >> shift)
    given = codes + queries.words + (queries.less,)
    constraints: tl.constexpr = "=&f,=&f" + ",l" * 6 + ",r" * 9
    return tl.inline_asm_elementwise(asm, constraints, given, (tl.float32, tl.float32), False, 1)


@triton.jit
def _as_second_matrix(x):
    """Weights ``[E]`` as the instruction asks for its second matrix: of two tokens, in bfloat16, in a word."""
    asm: tl.constexpr = """{ .reg .b32 x; .reg .f32 z; mov.f32 z, 0f00000000;
        cvt.rn.bf16x2.f32 x, z, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, x; }"""
    return tl.inline_asm_elementwise(asm, "=r,f", [x], tl.int32, False, 1)


@triton.constexpr_function
def _float32s(n):
    return (tl.float32,) * n


@triton.constexpr_function
def _values_asm(WORD):
    """Assembly of `_weighted`: codes of two tokens side by side, as bfloat16 numbers less `MIDDLE`: a code in the last
    bits of 128.0 makes 128 plus the code, of which 136 is taken.
    """
    lines = [".reg .b32 t<4>, other, u, n<4>, a<4>, less;", "mov.b32 less, 0xC308C308;"]
    kept = "{other, t%d}" if WORD else "{t%d, other}"
    lines += [f"mov.b64 {kept % i}, ${16 + i};" for i in range(4)]
    for i in (0, 2):
        lines += [f"prmt.b32 n{i}, t{i}, t{i + 1}, 0x5410;", f"prmt.b32 n{i + 1}, t{i}, t{i + 1}, 0x7632;"]
    for b in range(4):
        for later in range(2):
            for high in range(2):
                lines += [
                    f"shr.u32 u, n{2 * later + b // 2}, {8 * (b % 2) + 4 * high};",
                    "lop3.b32 u, u, 0x000F000F, 0x43004300, 0xEA;",
                    f"add.rn.bf16x2 a{2 * later + high}, u, less;",
                ]
        c = ", ".join(f"${4 * b + i}" for i in range(4))
        was = ", ".join(f"${22 + 4 * b + i}" for i in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{$20, $21}}, {{{was}}};"
        )
    return "{ " + "\n".join(lines) + " }"


@triton.jit
def _weighted(acc, values, p0, p1, WORD: tl.constexpr):
    """acc, 16 tensors, plus weighted values of the columns in word WORD of the two that a thread has of each token."""
    asm: tl.constexpr = _values_asm(WORD)
    given = values + (p0, p1) + acc  # noqa: RUF005
    constraints: tl.constexpr = "=&f" + ",=&f" * 15 + ",l" * 4 + ",r" * 2 + ",f" * 16
    kinds: tl.constexpr = _float32s(16)
    return tl.inline_asm_elementwise(asm, constraints, given, kinds, False, 1)


@triton.jit
def no_sums():
    """The `LaneSums` before the first token."""
    zero, acc = tl.zeros([32], tl.float32), ()
    for _ in tl.static_range(32):
        acc = acc + (zero,)  # noqa: RUF005
    return LaneSums(acc, tl.full([32], float("-inf"), tl.float32), zero, zero)


@triton.jit
def add_group(sums, queries, group, base, scale, e, CAP: tl.constexpr):
    """Add a `LaneGroup`. base ``[E]``: product of each thread's query head with the group's centre."""
    x0, x1 = _key_products(group.key_codes, queries, e)
    s0 = soft_cap((x0 * (queries.unit * group.key_steps[0].to(tl.float32)) + base) * scale, CAP)[0]
    s1 = soft_cap((x1 * (queries.unit * group.key_steps[1].to(tl.float32)) + base) * scale, CAP)[0]
    m = tl.maximum(sums.m, lanes.largest_of_lanes(tl.maximum(s0, s1)))
    p0, p1, alpha = tl.exp2(s0 - m), tl.exp2(s1 - m), tl.exp2(sums.m - m)
    step0, step1 = group.steps[0].to(tl.float32), group.steps[1].to(tl.float32)
    zero0, zero1 = group.zeros[0].to(tl.float32), group.zeros[1].to(tl.float32)
    shift = sums.shift * alpha + p0 * (zero0 + MIDDLE * step0) + p1 * (zero1 + MIDDLE * step1)
    w0, w1, first, second = _as_second_matrix(p0 * step0), _as_second_matrix(p1 * step1), (), ()
    for i in tl.static_range(16):
        first = first + (sums.acc[i] * alpha if i % 2 == 0 else sums.acc[i],)  # noqa: RUF005
        second = second + (sums.acc[i + 16] * alpha if i % 2 == 0 else sums.acc[i + 16],)  # noqa: RUF005
    acc = _weighted(first, group.value_codes, w0, w1, 0) + _weighted(second, group.value_codes, w0, w1, 1)
    return LaneSums(acc, m, sums.total * alpha + p0 + p1, shift)


@triton.jit
def whole_sums(sums):
    """Sums of values ``[128, 4]``, largest scores ``[4]`` and sums of weights ``[4]`` of all tokens."""
    x = ()
    for high in tl.static_range(2):
        for i in tl.static_range(8):
            x = x + (sums.acc[4 * i + 2 * high],)  # noqa: RUF005
    for _ in tl.static_range(4):
        halves = ()
        for i in tl.static_range(len(x) // 2):
            halves = halves + (tl.join(x[i], x[i + len(x) // 2]),)  # noqa: RUF005
        x = halves
    acc = tl.reshape(tl.permute(tl.reshape(x[0], (8, 4, 2, 8)), (2, 0, 3, 1)), (128, 4))
    shift, m = tl.sum(tl.reshape(sums.shift, (8, 4)), 0), tl.max(tl.reshape(sums.m, (8, 4)), 0)
    return acc + shift[None, :], m, tl.sum(tl.reshape(sums.total, (8, 4)), 0)
