"""Attention to groups of 16 tokens in 4 bits, one warp per program. Threads load bytes straight into the registers that
tensor cores read them from, without shared memory (`condense.ops.triton.device.lanes`).

Keys are multiplied as 5-bit integers with queries of 15 bits: a query's number is 128 times one 8-bit integer plus
another. A tensor-core product has eight columns: with four query heads, both integers of each head have a column; with
eight heads, each integer has a product of its own. Values are weighted in bfloat16, as in other kernels.

Shapes: E = 32 threads of one warp; PER query heads per thread, 1 or 2: thread e has heads ``e % 4 * PER`` and the next.
In scores it has tokens ``e // 4`` and ``e // 4 + 8`` of a group; in sums of values the 16 columns ``8 * (e // 4)`` to
``8 * (e // 4) + 7``, and the same plus 64.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device import lanes
from condense.ops.triton.device.codes import MIDDLE
from condense.ops.triton.device.softmax import soft_cap

# the largest integer of a query: 127 * 128
_LEVELS = tl.constexpr(16256.0)
_TINY = tl.constexpr(2.0**-100)
# the largest score before the first key: below all finite scores
_LEAST = tl.constexpr(-3.0e38)
# a key's number is ``step * (2 * n - _LESS)`` for its integer n, 0 to 31
_LESS = tl.constexpr(31)


@triton.constexpr_function
def fits(bits, g, D, DV, BN, HAS_SLOTS):
    """Whether this module reads open groups of bfloat16 tokens. BN: tokens per tile. HAS_SLOTS: the store has slots."""
    return bits == 4 and g == BN == 16 and D == DV == 128 and not HAS_SLOTS


class LaneQueries(namedtuple("LaneQueries", "words unit less")):
    """Query heads as integers. words: 8 * PER int32 tensors ``[E]``, four 8-bit integers in each. unit, less: a tensor
    ``[E]`` for each head of a thread; unit, the value of the integer 1, float32; less, ``-_LESS`` times the sum of the
    head's integers, int32.
    """


class LaneSums(namedtuple("LaneSums", "acc m total shift")):
    """The state of an online softmax. acc: 32 float32 tensors ``[E]``, number ``4 * i + 2 * h + s`` for column i of the
    thread's half h (0 or 1) of columns and its head s; 0 for a second head that it does not have. For each head: m, the
    largest score, the same in all threads of the head; total, the sum of weights, and shift, the weighted sum of
    ``zero + MIDDLE * step``, which all columns get: both of the thread's tokens.
    """


class LaneGroup(namedtuple("LaneGroup", "keys value_codes numbers")):
    """A group as `load_group` reads it, in tensors ``[E]``. keys: eight words of codes, four for each of the thread's
    two tokens, then eight words of their signs. value_codes: four 64-bit words, for tokens ``2 * (e % 4)`` and the
    next, and for both plus 8. numbers: two tensors for `lanes.of_quads`. In the first, lanes 0 and 1 of each four have
    the steps of the values of their two tokens, lanes 2 and 3 the zeros; in the second all have the step of a key.
    """


@triton.jit
def of_threads(x):
    """Numbers of each thread's query heads, one tensor ``[E]`` per head, from x ``[4 * PER]``."""
    if x.shape[0] == 4:
        return (lanes.of_heads(x, 32),)
    else:
        first, second = tl.split(tl.reshape(x, (4, 2)))  # [4], [4]
        return lanes.of_heads(first, 32), lanes.of_heads(second, 32)


@triton.jit
def _query_words(number):
    """Words of four 8-bit integers, from int32 ``[8, 128]``: 8 tensors ``[E]``. The columns of a word are those whose
    codes are in the low halves of four bytes, or in the high halves.
    """
    words = tl.sum(tl.reshape(number & 255, (8, 32, 4)) << (8 * tl.arange(0, 4))[None, None, :], 2)  # [8, 32]
    # from [8, half, thread, word]
    words = tl.permute(tl.reshape(words, (8, 2, 4, 4)), (0, 2, 1, 3))  # [8, 4, 2, 4]
    return lanes.columns(lanes.for_lanes(tl.reshape(words, (4, 2, 4, 8)), 32))


@triton.jit
def lane_queries(x):
    """The `LaneQueries` of rotated queries x, float32 ``[4 * PER, 128]``."""
    unit = tl.maximum(tl.max(tl.abs(x), 1), _TINY) * (1 / _LEVELS)  # [4 * PER]
    number = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)  # [4 * PER, 128]
    first = (number + 64) >> 7
    second = number - 128 * first
    if x.shape[0] == 4:
        words = _query_words(tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (8, 128)))
    else:
        words = _query_words(first) + _query_words(second)
    return LaneQueries(words, of_threads(unit), of_threads(tl.sum(number, 1) * -_LESS))


@triton.jit
def load_group(store_ptr, signs_ptr, e, dtype: tl.constexpr, FORM: tl.constexpr):
    """Load the `LaneGroup` whose piece begins at ``store_ptr`` and whose signs begin at ``signs_ptr``."""
    codes, signs = store_ptr + FORM.keys_at + e // 4 * 64 + e % 4 * 16, signs_ptr + e // 4 * 16  # [E]
    values = (store_ptr + FORM.values_at + e % 4 * 128 + e // 4 * 8).to(tl.pointer_type(tl.int64))
    # loads are wide, and a thread loads only one step or zero of values, because a multiprocessor can have only a
    # certain number of loads under way, whatever their size
    numbers = store_ptr.to(tl.pointer_type(dtype)) + e // 4 + e % 2 * 8
    keys = lanes.load_four(codes) + lanes.load_four(codes + 512)
    keys += lanes.load_four(signs) + lanes.load_four(signs + 128)
    return LaneGroup(
        keys,
        (tl.load(values), tl.load(values + 8), tl.load(values + 64), tl.load(values + 72)),
        (tl.load(numbers + e % 4 // 2 * FORM.g), tl.load(numbers + 2 * FORM.g)),
    )


@triton.constexpr_function
def _keys_asm(PER):
    """Assembly of `_key_products`, its constraints and result types.

    A code and its sign bit make an integer from 0 to 31: 16 plus the code if the bit is set, else 15 minus the code.
    """
    outs, n = 2 * PER, 4 * PER
    lines = [f".reg .b32 s, t, x, a<4>, c<{n}>;"]
    lines += [f"mov.b32 c{i}, 0;" for i in range(n)]
    for j in range(4):
        for row in range(2):
            # in each byte of signs, one bit belongs to the code in the low half of the thread's byte, one to the high
            lines.append(f"shr.u32 s, ${outs + 8 + 4 * row + j}, ${outs + 16};")
            for high in range(2):
                a, code = f"a{2 * high + row}", f"${outs + 4 * row + j}"
                lines += [
                    f"shr.u32 t, s, {4 * high}; and.b32 t, t, 0x01010101; add.u32 t, t, 0x0F0F0F0F;",
                    f"shr.u32 x, {code}, {4 * high}; lop3.b32 {a}, x, 0x0F0F0F0F, t, 0x6A;",
                ]
        for number in range(PER):
            c, q = ", ".join(f"c{4 * number + i}" for i in range(4)), outs + 17 + 8 * number + j
            lines.append(
                "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                f"{{{c}}}, {{a0, a1, a2, a3}}, {{${q}, ${q + 4}}}, {{{c}}};"
            )
    for i in range(outs):
        # one head's two integers are adjacent columns of a product; with two heads each integer has a product
        first, second = (2 * i, 2 * i + 1) if PER == 1 else (i, 4 + i)
        less = outs + 17 + 8 * PER + i % PER
        lines.append(f"mad.lo.s32 x, c{first}, 256, ${less}; mad.lo.s32 x, c{second}, 2, x; cvt.rn.f32.s32 ${i}, x;")
    constraints = "=&f" + ",=&f" * (outs - 1) + ",r" * (17 + 9 * PER)
    return "{ " + "\n".join(lines) + " }", constraints, (tl.float32,) * outs


@triton.jit
def _key_products(keys, queries, e):
    """Products of the integers of a thread's query heads with its two tokens' keys, less their centres and in units of
    their steps: float32 ``[E]`` for each head with the first token, then with the second.
    """
    PER: tl.constexpr = len(queries.unit)
    asm: tl.constexpr = _keys_asm(PER)
    given = keys + (e % 4,) + queries.words + queries.less  # noqa: RUF005
    return tl.inline_asm_elementwise(asm[0], asm[1], given, asm[2], False, 1)


@triton.jit
def _as_second_matrix(x):
    """Weights of a token per thread, ``[E]`` for each head, as the second operand of the instruction of `_values_asm`:
    in bfloat16, those of two tokens in a word.
    """
    zero: tl.constexpr = """{ .reg .b32 x; .reg .f32 z; mov.f32 z, 0f00000000;
        cvt.rn.bf16x2.f32 x, z, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, x; }"""
    both: tl.constexpr = """{ .reg .b32 x;
        cvt.rn.bf16x2.f32 x, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, x; }"""
    if len(x) == 1:
        return tl.inline_asm_elementwise(zero, "=r,f", [x[0]], tl.int32, False, 1)
    else:
        return tl.inline_asm_elementwise(both, "=r,f,f", [x[0], x[1]], tl.int32, False, 1)


@triton.constexpr_function
def _values_asm(WORD):
    """Assembly of `_weighted`, its constraints and result types: codes of two tokens become two bfloat16 numbers of one
    word. A code in the last bits of 128.0 makes 128 plus the code; minus 136 this is the code minus `MIDDLE`.
    """
    lines = [".reg .b32 t<4>, other, u, n<4>, a<4>, less; mov.b32 less, 0xC308C308;"]
    kept = "{other, t%d}" if WORD else "{t%d, other}"
    lines += [f"mov.b64 {kept % i}, ${16 + i};" for i in range(4)]
    for i in (0, 2):
        lines += [f"prmt.b32 n{i}, t{i}, t{i + 1}, 0x5410;", f"prmt.b32 n{i + 1}, t{i}, t{i + 1}, 0x7632;"]
    for b in range(4):
        for later in range(2):
            for high in range(2):
                i = 2 * later + high
                lines += [
                    f"shr.u32 u, n{2 * later + b // 2}, {8 * (b % 2) + 4 * high};",
                    "lop3.b32 u, u, 0x000F000F, 0x43004300, 0xEA;",
                    f"add.rn.bf16x2 a{i}, u, less;",
                ]
        c = ", ".join(f"${4 * b + i}" for i in range(4))
        was = ", ".join(f"${22 + 4 * b + i}" for i in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{$20, $21}}, {{{was}}};"
        )
    constraints = "=&f" + ",=&f" * 15 + ",l" * 4 + ",r" * 2 + ",f" * 16
    return "{ " + "\n".join(lines) + " }", constraints, (tl.float32,) * 16


@triton.jit
def _weighted(acc, values, weights, WORD: tl.constexpr):
    """Sums acc, 16 tensors ``[E]``, plus the weighted values of the columns in 32-bit word WORD, 0 or 1, of the
    thread's 64-bit words ``values``. weights: two results of `_as_second_matrix`.
    """
    asm: tl.constexpr = _values_asm(WORD)
    return tl.inline_asm_elementwise(asm[0], asm[1], values + weights + acc, asm[2], False, 1)


@triton.jit
def no_sums(PER: tl.constexpr):
    """The `LaneSums` before the first token. m is below all finite scores, but finite, so that scores may be -inf."""
    zero = (tl.zeros([32], tl.float32),)
    return LaneSums(zero * 32, (tl.full([32], _LEAST, tl.float32),) * PER, zero * PER, zero * PER)


@triton.jit
def _weigh(sums, s0, s1):
    """Weights of a thread's two tokens from their scores s0 and s1; the new largest scores; the factors for earlier
    sums. Each is a tuple of one tensor ``[E]`` per head.
    """
    p0, p1, m, alpha = (), (), (), ()
    for s in tl.static_range(len(s0)):
        larger = tl.maximum(sums.m[s], lanes.largest_of_lanes(tl.maximum(s0[s], s1[s])))  # [E]
        p0, p1 = p0 + (tl.exp2(s0[s] - larger),), p1 + (tl.exp2(s1[s] - larger),)  # noqa: RUF005
        m, alpha = m + (larger,), alpha + (tl.exp2(sums.m[s] - larger),)  # noqa: RUF005
    return p0, p1, m, alpha


@triton.jit
def _add_values(acc, alpha, codes, w0, w1):
    """Sums of values acc times ``alpha``, plus codes minus `MIDDLE`, weighted by w0 and w1, each ``[E]`` per head."""
    first, second = (), ()
    for i in tl.static_range(16):
        if i % 2 < len(alpha):
            first += (acc[i] * alpha[i % 2],)
            second += (acc[i + 16] * alpha[i % 2],)
        else:
            first, second = first + (acc[i],), second + (acc[i + 16],)  # noqa: RUF005
    weights = _as_second_matrix(w0), _as_second_matrix(w1)
    return _weighted(first, codes, weights, 0) + _weighted(second, codes, weights, 1)


@triton.jit
def add_group(sums, queries, group, base, scale, e, CAP: tl.constexpr):
    """Add a `LaneGroup` to ``sums``. base: products of a thread's query heads with the group's centre, ``[E]`` each."""
    PER: tl.constexpr = len(base)
    x, s0, s1 = _key_products(group.keys, queries, e), (), ()
    numbers = lanes.of_quads(group.numbers[0], group.numbers[1])
    step0, step1, key_step0, key_step1 = numbers[0][0], numbers[1][0], numbers[0][1], numbers[1][1]
    middle0, middle1 = numbers[2][0] + MIDDLE * step0, numbers[3][0] + MIDDLE * step1
    for s in tl.static_range(PER):
        first = (x[s] * (queries.unit[s] * key_step0) + base[s]) * scale  # [E]
        second = (x[PER + s] * (queries.unit[s] * key_step1) + base[s]) * scale
        s0, s1 = s0 + (soft_cap(first, CAP)[0],), s1 + (soft_cap(second, CAP)[0],)  # noqa: RUF005
    p0, p1, m, alpha = _weigh(sums, s0, s1)
    total, shift, w0, w1 = (), (), (), ()
    for s in tl.static_range(PER):
        w0, w1 = w0 + (p0[s] * step0,), w1 + (p1[s] * step1,)  # noqa: RUF005
        total += (sums.total[s] * alpha[s] + p0[s] + p1[s],)
        shift += (sums.shift[s] * alpha[s] + p0[s] * middle0 + p1[s] * middle1,)
    return LaneSums(_add_values(sums.acc, alpha, group.value_codes, w0, w1), m, total, shift)


@triton.jit
def _of_heads(x):
    """Numbers of all query heads ``[8, 4 * PER]``, rows ``e // 4``, from x: ``[E]`` for each of a thread's heads."""
    x = [tl.reshape(of_head, (8, 4)) for of_head in x]
    return x[0] if len(x) == 1 else tl.reshape(tl.join(x[0], x[1]), (x[0].shape[0], 8))


@triton.jit
def whole_sums(sums):
    """Sums of values ``[128, 4 * PER]``, largest scores and sums of weights ``[4 * PER]``, over all threads."""
    PER: tl.constexpr = len(sums.m)
    x = ()
    for high in tl.static_range(2):
        for i in tl.static_range(8):
            for s in tl.static_range(PER):
                x += (sums.acc[4 * i + 2 * high + s],)
    for _ in tl.static_range(3 + PER):
        halves = ()
        for i in tl.static_range(len(x) // 2):
            halves += (tl.join(x[i], x[i + len(x) // 2]),)
        x = halves  # [E, 2, ..., 2]
    acc = tl.reshape(tl.permute(tl.reshape(x[0], (8, 4, 2, 8, PER)), (2, 0, 3, 1, 4)), (128, 4 * PER))
    acc += tl.sum(_of_heads(sums.shift), 0)[None, :]
    return acc, tl.max(_of_heads(sums.m), 0), tl.sum(_of_heads(sums.total), 0)
