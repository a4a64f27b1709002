"""Kernels of one decode step of Recall: close a group, score the index, rank the groups, choose, attend.

`step_join_kernel` joins the splits at the end. Each kernel waits for the one before it and reads its results. No
atomics.

Shapes: B rows, K KV heads, R query heads per KV head, G groups of capacity, g tokens per group, m blocks of u tokens, W
slots of the rings, S splits, D and Dv widths; P and PV the same as powers of two for tiles. BR rows (query heads).
"head" is a KV head of a row, b * K + kvh. All buffers of the state are contiguous. Scores are base 2.
Index columns: C stored columns per row of the index, PARTS tiles of columns that one stored column holds (2 for 4 bits:
the first half of the columns in the low bits), PC columns as a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.recall import index
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.recall_choice_kernels import wanted_groups

_MARGIN = tl.constexpr(index.MARGIN)
_REACH = tl.constexpr(index.REACH)
_TINY = tl.constexpr(2.0**-126)
_INT_MIN, _INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _after_the_last(EARLY: tl.constexpr):
    """Let the next kernel be launched now, then wait until the one before this one has ended."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _row(seen_ptr, real_ptr, b, window, G, g: tl.constexpr, HAS_REAL: tl.constexpr):
    """Position of row b's new token, whether there is one, closed groups, and those of them that fit the buffers."""
    t = tl.load(seen_ptr + b).to(tl.int32)
    live = t >= 0
    if HAS_REAL:
        live = live & (tl.load(real_ptr + b) != 0)
    closed = tl.where(live, tl.maximum(t + 1 - window, 0) // g, 0)
    return t, live, closed, tl.minimum(closed, G)


@triton.jit
def _tokens(ring_ptr, new_ptr, position, t, W, inside, LO: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Columns ``[LO, LO + ...)`` of the tokens at ``position``, ``[n, P]`` float32; the newest from its own vector."""
    d = LO + tl.arange(0, P)
    there = inside[:, None] & (d < D)[None, :]
    at = (position % W).to(tl.int64)[:, None] * D + d[None, :]
    older = tl.load(ring_ptr + at, mask=there & (position < t)[:, None], other=0.0)
    new = tl.load(new_ptr + d, mask=d < D, other=0.0)
    return tl.where((position == t)[:, None], new[None, :], older).to(tl.float32)


@triton.jit
def _block(
    ring_ptr, new_ptr, start, t, W, LO: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    u: tl.constexpr, UP: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Lowest and highest key of the block of u tokens from position ``start`` on, or twice its mean, ``[P]``."""
    i = tl.arange(0, UP)
    inside = i < u
    x = _tokens(ring_ptr, new_ptr, start + i, t, W, inside, LO, D, P)
    if BOUNDS:
        low = tl.min(tl.where(inside[:, None], x, float("inf")), 0)
        high = tl.max(tl.where(inside[:, None], x, float("-inf")), 0)
    else:
        total = tl.sum(tl.where(inside[:, None], x, 0.0), 0)
        low = tl.div_rn(total, tl.zeros_like(total) + u)
        high = low
    return low, high


@triton.jit
def _codes(x, step, zero, LEVELS: tl.constexpr, UPWARDS: tl.constexpr, BOUNDS: tl.constexpr):
    """Numbers on the grid: rounded up or down for bounds, else to the nearest; as `build_index` does."""
    position = tl.div_rn(x - zero, tl.zeros_like(x) + step)
    if not BOUNDS:
        position = tl.floor(position + 0.5)
    elif UPWARDS:
        position = tl.ceil(position + _MARGIN)
    else:
        position = tl.floor(position - _MARGIN)
    return tl.minimum(tl.maximum(position, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _put_index(
    ring_ptr, new_ptr, codes_ptr, grid_ptr, first, t, W,
    D: tl.constexpr, m: tl.constexpr, u: tl.constexpr, UP: tl.constexpr, PC: tl.constexpr,
    BOUNDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The index of the group that begins at position ``first``."""
    PARTS: tl.constexpr = 2 if BITS == 4 else 1
    C: tl.constexpr = D // PARTS
    c = tl.arange(0, PC)
    lowest = tl.full([], float("inf"), tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    step, zero = 1.0, 0.0
    if BITS < 16:
        for part in tl.static_range(PARTS):
            for block in range(m):
                low, high = _block(ring_ptr, new_ptr, first + block * u, t, W, part * C, D, PC, u, UP, BOUNDS)
                lowest = tl.minimum(lowest, tl.min(tl.where(c < C, low, float("inf")), 0))
                largest = tl.maximum(largest, tl.max(tl.where(c < C, high, float("-inf")), 0))
        LEVELS: tl.constexpr = 2**BITS - 1
        zero = lowest
        step = tl.maximum(tl.div_rn(largest - zero, LEVELS * 1.0) * _REACH, _TINY)
        tl.store(grid_ptr, step)
        tl.store(grid_ptr + 1, zero)
    for block in range(m):
        low, high = _block(ring_ptr, new_ptr, first + block * u, t, W, 0, D, PC, u, UP, BOUNDS)
        if BITS == 16:
            codes_low, codes_high = low, high
        else:
            codes_low = _codes(low, step, zero, LEVELS, False, BOUNDS)
            codes_high = _codes(high, step, zero, LEVELS, True, BOUNDS)
        if BITS == 4:
            low, high = _block(ring_ptr, new_ptr, first + block * u, t, W, C, D, PC, u, UP, BOUNDS)
            codes_low += _codes(low, step, zero, LEVELS, False, BOUNDS) * 16
            codes_high += _codes(high, step, zero, LEVELS, True, BOUNDS) * 16
        element = codes_ptr.dtype.element_ty
        tl.store(codes_ptr + block * C + c, codes_low.to(element), mask=c < C)
        if BOUNDS:
            tl.store(codes_ptr + (m + block) * C + c, codes_high.to(element), mask=c < C)


@triton.jit
def _take_token(
    new_ptr, entries_ptr, store_ptr, ring_ptr, t, W, closes, group,
    g: tl.constexpr, u: tl.constexpr, UP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the new token to the ring and, if it closes a group, the group's mean to the entries and its tokens to the
    store.
    """
    d, i = tl.arange(0, P), tl.arange(0, UP)
    if closes:
        total = tl.zeros([P], tl.float32)
        for start in range(0, g, u):
            x = _tokens(ring_ptr, new_ptr, group * g + start + i, t, W, i < u, 0, D, P)
            there = (i < u)[:, None] & (d < D)[None, :]
            at = (group * g + start + i).to(tl.int64)[:, None] * WIDTH + d[None, :]
            tl.store(store_ptr + at, x.to(store_ptr.dtype.element_ty), mask=there)
            total += tl.sum(tl.where(there, x, 0.0), 0)
        mean = tl.div_rn(total, tl.zeros_like(total) + g)
        tl.store(entries_ptr + group.to(tl.int64) * D + d, mean.to(entries_ptr.dtype.element_ty), mask=d < D)
    new = tl.load(new_ptr + d, mask=d < D, other=0.0)
    tl.store(ring_ptr + (t % W).to(tl.int64) * D + d, new, mask=d < D)


@triton.jit
def recall_close_kernel(
    k_ptr, v_ptr, entries_k_ptr, entries_v_ptr, codes_ptr, grid_ptr, store_ptr, ring_k_ptr, ring_v_ptr, seen_ptr,
    real_ptr, s_kb, s_kh, s_vb, s_vh, K, G, W, N, window,
    g: tl.constexpr, m: tl.constexpr, UP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DV: tl.constexpr,
    PV: tl.constexpr, PC: tl.constexpr, BOUNDS: tl.constexpr, BITS: tl.constexpr, HAS_REAL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the new token to rings, entries, index and store; grid (B * K, 3): keys, values, index."""
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    b, kvh = head // K, head % K
    u: tl.constexpr = g // m
    WIDTH: tl.constexpr = D + DV
    t, live, closed, _ = _row(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    group = closed - 1
    closes = live & (t + 1 - window == closed * g) & (closed > 0) & (closed <= G)
    k_ptr += b * s_kb + kvh * s_kh
    if live & (tl.program_id(1) == 0):
        _take_token(
            k_ptr, entries_k_ptr + head * G * D, store_ptr + head * N * WIDTH, ring_k_ptr + head * W * D,
            t, W, closes, group, g, u, UP, D, P, WIDTH,
        )  # fmt: skip
    if live & (tl.program_id(1) == 1):
        _take_token(
            v_ptr + b * s_vb + kvh * s_vh, entries_v_ptr + head * G * DV, store_ptr + head * N * WIDTH + D,
            ring_v_ptr + head * W * DV, t, W, closes, group, g, u, UP, DV, PV, WIDTH,
        )  # fmt: skip
    if closes & (tl.program_id(1) == 2):
        F: tl.constexpr = 2 * m if BOUNDS else m
        C: tl.constexpr = D // 2 if BITS == 4 else D
        at = head * G + group
        _put_index(
            ring_k_ptr + head * W * D, k_ptr, codes_ptr + at * F * C, grid_ptr + at * 2, group * g, t, W,
            D, m, u, UP, PC, BOUNDS, BITS,
        )  # fmt: skip


@triton.constexpr_function
def _first_column(part, D, BITS):
    """The first key column that the codes of a part hold."""
    return part if BITS >= 8 else part // 2 + part % 2 * (D // 2)


@triton.jit
def _queries(
    q_ptr, s_qh, R, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BR: tl.constexpr,
    part: tl.constexpr = 0, BITS: tl.constexpr = 16,
):  # fmt: skip
    """Query columns ``[BR, P]`` of one KV head that go with one part of the index's words."""
    STRIDE: tl.constexpr = 1 if BITS == 16 else 2
    r, d = tl.arange(0, BR), _first_column(part, D, BITS) + STRIDE * tl.arange(0, P)
    there = (r < R)[:, None] & (tl.arange(0, P) < C)[None, :]
    return tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + d[None, :], mask=there, other=0.0)


@triton.constexpr_function
def _half_asm(part, BITS):
    """Assembly that turns a part's codes of two words into float16: put into the lowest bits of 1024.0, then - 1024."""
    digits = 0x00FF00FF if BITS == 8 else 0x000F000F
    return f"""{{
        .reg .b32 kilo;
        mov.b32 kilo, 0x64006400;
        shr.b32 $0, $1, {part * BITS};
        lop3.b32 $0, $0, {digits}, kilo, 0xEA;
        sub.rn.f16x2 $0, $0, kilo;
    }}"""


@triton.jit
def _codes_of(words, part: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """The codes that the words ``int16`` hold at bits ``[part * BITS, (part + 1) * BITS)``."""
    if ASM and dtype == tl.float16:
        return tl.inline_asm_elementwise(_half_asm(part, BITS), "=r,r", [words], tl.float16, True, 2)
    else:
        return ((words >> (part * BITS)) & (2**BITS - 1)).to(dtype)


@triton.jit
def _index_products(
    codes_ptr, group, inside, queries, row, F: tl.constexpr, C: tl.constexpr, PC: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products ``[BG, BR]`` of one row of each group's index with the queries, a tile of columns for each part."""
    c = tl.arange(0, PC)
    there = inside[:, None]
    if C != PC:
        there = there & (c < C)[None, :]
    codes = tl.load(codes_ptr + (group.to(tl.int64) * F + row)[:, None] * C + c[None, :], mask=there, other=0)
    if BITS == 16:
        s = tl.dot(codes, tl.trans(queries[0]), input_precision=PRECISION)
    else:
        s = tl.zeros([group.shape[0], queries[0].shape[0]], tl.float32)
        for part in tl.static_range(16 // BITS):
            tile = _codes_of(codes, part, BITS, queries[0].dtype, ASM)
            s = tl.dot(tile, tl.trans(queries[part]), s, input_precision=PRECISION)
    return s


@triton.jit
def _positive(queries):
    return [tl.where(x > 0, x, tl.zeros_like(x)) for x in queries]


@triton.jit
def _negative(queries):
    return [tl.where(x < 0, x, tl.zeros_like(x)) for x in queries]


@triton.jit
def recall_score_kernel(
    q_ptr, codes_ptr, grid_ptr, seen_ptr, real_ptr, score_ptr, top_ptr, total_ptr,
    s_qb, s_qh, K, R, G, window, scale,
    g: tl.constexpr, m: tl.constexpr, D: tl.constexpr, PC: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr,
    GROUPS: tl.constexpr, BOUNDS: tl.constexpr, BITS: tl.constexpr, HAS_REAL: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Index scores of closed groups, float32 ``[B, H, GROUPS]``; of every split the largest and the sum of
    ``2 ** (score - largest)``.

    Grid (S, B * K). Quantised, ``q . (zero + step * code)`` is ``zero * sum(q) + step * (q . code)``.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    _, _, _, closed = _row(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    tiles = tl.cdiv(closed, BG)
    F: tl.constexpr = 2 * m if BOUNDS else m
    PARTS: tl.constexpr = 16 // BITS
    C: tl.constexpr = D // PARTS
    q_ptr += b * s_qb + kvh * R * s_qh
    codes_ptr += head * G * F * C
    grid_ptr += head * G * 2
    queries = ()
    for part in tl.static_range(PARTS):
        queries = queries + (_queries(q_ptr, s_qh, R, D, C, PC, BR, part, BITS),)  # noqa: RUF005
    sum_q = tl.zeros([BR], tl.float32)
    unit = tl.full([BR], 1.0, tl.float32)
    if BITS < 16:
        largest = tl.zeros([BR], tl.float32)
        for part in tl.static_range(PARTS):
            x = queries[part].to(tl.float32)
            sum_q += tl.sum(x, 1)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        if q_ptr.dtype.element_ty == tl.bfloat16:
            # codes become float16 with half the work of bfloat16; queries are scaled into the range of float16 by a
            # power of two, which keeps their digits
            unit = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 2.0**-100))))
            queries = [(x.to(tl.float32) / unit[:, None]).to(tl.float16) for x in queries]
    up, down = _positive(queries), _negative(queries)
    _after_the_last(EARLY)
    r = tl.arange(0, BR)
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    for tile in range(tiles * split // S, tiles * (split + 1) // S):
        group = tile * BG + tl.arange(0, BG)
        inside = group < closed
        best = tl.full([BG, BR], float("-inf"), tl.float32)
        mass = tl.zeros([BG, BR], tl.float32)
        if BITS < 16:
            step = tl.load(grid_ptr + group * 2, mask=inside, other=0.0)[:, None] * (unit * scale)[None, :]
            zero = tl.load(grid_ptr + group * 2 + 1, mask=inside, other=0.0)[:, None] * (sum_q * scale)[None, :]
        for block in tl.static_range(m):
            if BOUNDS:
                s = _index_products(codes_ptr, group, inside, down, block, F, C, PC, BITS, PRECISION, EARLY)
                s += _index_products(codes_ptr, group, inside, up, m + block, F, C, PC, BITS, PRECISION, EARLY)
            else:
                s = _index_products(codes_ptr, group, inside, queries, block, F, C, PC, BITS, PRECISION, EARLY)
            s = s * step + zero if BITS < 16 else s * scale
            larger = tl.maximum(best, s)
            if not BOUNDS:
                mass = mass * tl.exp2(best - larger) + tl.exp2(s - larger)
            best = larger
        if not BOUNDS:
            best += tl.log2(mass)
        at = (head * R + r)[None, :] * GROUPS + group[:, None]
        tl.store(score_ptr + at, best, mask=inside[:, None] & (r < R)[None, :])
        best = tl.where(inside[:, None], best, float("-inf"))
        larger = tl.maximum(top, tl.max(best, 0))
        total = total * tl.exp2(top - larger) + tl.sum(tl.exp2(best - larger[None, :]), 0)
        top = larger
    at = (head * R + r) * S + split
    tl.store(top_ptr + at, top, mask=r < R)
    tl.store(total_ptr + at, total, mask=r < R)


@triton.jit
def _threshold(key, valid, wanted):
    """A number that at least ``wanted`` valid keys reach (>=) and at most ``wanted`` exceed (>).

    A search among three parts at a time: one sum counts the keys that reach each of two numbers, in 16 bits each, which
    hold the 2 ** 15 groups that there are at most.
    """
    lo = tl.min(tl.where(valid, key, _INT_MAX), 0).to(tl.int64)
    hi = tl.max(tl.where(valid, key, _INT_MIN), 0).to(tl.int64) + 1
    while lo + 1 < hi:
        third = tl.maximum((hi - lo) // 3, 1)
        a, b = lo + third, lo + 2 * third
        reach = tl.sum((key >= a.to(tl.int32)).to(tl.int32) + ((key >= b.to(tl.int32)).to(tl.int32) << 16), 0)
        reach_a, reach_b = reach & 0xFFFF, (reach >> 16) & 0xFFFF
        hi = tl.where(reach_a < wanted, a, tl.where(reach_b < wanted, b, hi))
        lo = tl.where(reach_b >= wanted, b, tl.where(reach_a >= wanted, a, lo))
        # exactly ``wanted`` keys reach it: the search ends
        hi = tl.where((reach_a == wanted) | (reach_b == wanted), lo + 1, hi)
    return lo.to(tl.int32)


@triton.jit
def _best(key, valid, wanted):
    """Which keys are the ``wanted`` best, ties to the first, and the place of each among these, in rising order."""
    threshold = _threshold(key, valid, wanted)
    better, equal = valid & (key > threshold), valid & (key == threshold)
    # one scan counts both: there are at most 2 ** 15 groups, so two counts fit into 32 bits
    flags = (better.to(tl.int32) << 16) | equal.to(tl.int32)
    before = tl.cumsum(flags, 0) - flags
    room = wanted - tl.sum(better.to(tl.int32), 0)
    is_best = better | (equal & ((before & 0xFFFF) < room))
    return is_best, (before >> 16) + tl.minimum(before & 0xFFFF, room)


@triton.jit
def recall_rank_kernel(
    score_ptr, top_ptr, total_ptr, seen_ptr, real_ptr, key_ptr, candidate_ptr, offset_ptr,
    K, R, G, S, window, bias,
    g: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BS: tl.constexpr,
    RC: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best C of every tile of BG groups, in rising order: key int32 ``[B, K, tiles, C]``, by which groups of all
    tiles are compared, and group. Beyond the closed groups the key is the lowest int32. Also offset float32
    ``[B, K, G]``: ``bias`` for every closed group.

    Grid (tiles, B * K). CP: C as a power of two; RC query heads at a time.
    """
    _after_the_last(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, closed = _row(seen_ptr, real_ptr, head // K, window, G, g, HAS_REAL)
    group, s = tile * BG + tl.arange(0, BG), tl.arange(0, BS)
    valid = group < closed
    share = tl.full([BG], float("-inf"), tl.float32)
    for start in range(0, R, RC):
        r = start + tl.arange(0, RC)
        row, there = head * R + r, (r < R)[:, None]
        score = tl.load(score_ptr + row[:, None] * GROUPS + group[None, :], mask=there, other=float("-inf"))
        split = row[:, None] * S + s[None, :]
        top = tl.load(top_ptr + split, mask=there & (s < S)[None, :], other=float("-inf"))
        total = tl.load(total_ptr + split, mask=there & (s < S)[None, :], other=0.0)
        largest = tl.max(top, 1)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(total * tl.exp2(top - largest[:, None]), 1)
        lse = largest + tl.log2(tl.where(total > 0, total, 1.0))
        share = tl.maximum(share, tl.max(tl.where(valid[None, :], score, float("-inf")) - lse[:, None], 0))
    # floats as integers in the same order: of negative ones, all bits but the sign are flipped
    bits = share.to(tl.int32, bitcast=True)
    key = tl.where(valid, bits ^ ((bits >> 31) & _INT_MAX), _INT_MIN)
    wanted = tl.maximum(tl.minimum(C, closed - tile * BG), 0)
    is_best, place = _best(key, valid, wanted)
    at = (head * tl.num_programs(0) + tile) * C
    tl.store(key_ptr + at + place, key, mask=is_best)
    tl.store(candidate_ptr + at + place, group, mask=is_best)
    i = tl.arange(0, CP)
    tl.store(key_ptr + at + i, tl.full([CP], _INT_MIN, tl.int32), mask=(i >= wanted) & (i < C))
    tl.store(offset_ptr + head * G + group, tl.zeros_like(share) + bias, mask=valid)


@triton.jit
def recall_choose_kernel(
    key_ptr, candidate_ptr, held_ptr, order_ptr, seen_ptr, real_ptr, groups_ptr, place_ptr, offset_ptr,
    K, G, window, num_recall, part, of,
    g: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, RP: tl.constexpr,
    HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The open groups in rising order, int32 ``[B, K, num_recall]``: the best of N candidates, as many as
    `wanted_groups` says; their offset becomes -inf. With S slots also where each is read, see `_find_slots`.

    Grid (B * K,). NP, SP, RP: candidates, slots and open groups as powers of two.
    """
    _after_the_last(EARLY)
    head = tl.program_id(0).to(tl.int64)
    _, _, _, closed = _row(seen_ptr, real_ptr, head // K, window, G, g, HAS_REAL)
    n = tl.arange(0, NP)
    key = tl.load(key_ptr + head * N + n, mask=n < N, other=_INT_MIN)
    valid = key > _INT_MIN
    candidate = tl.load(candidate_ptr + head * N + n, mask=valid, other=0)
    wanted = wanted_groups(closed, num_recall, part, of)
    is_open, place = _best(key, valid, wanted)
    groups_ptr += head * num_recall
    tl.store(groups_ptr + place, candidate, mask=is_open)
    tl.store(offset_ptr + head * G + candidate, tl.full([NP], float("-inf"), tl.float32), mask=is_open)
    if S > 0:
        # all threads of the program read what the others stored
        tl.debug_barrier()
        place_ptr += head * num_recall
        _find_slots(groups_ptr, held_ptr + head * S, order_ptr + head * S, place_ptr, wanted, S, SP, RP)


@triton.jit
def _find_slots(
    groups_ptr, held_ptr, order_ptr, place_ptr, num_open, S: tl.constexpr, SP: tl.constexpr, RP: tl.constexpr
):
    """Where each open group is read, int32: -1 in the store, ``2 * slot`` in a slot, ``2 * slot + 1`` in the store, to
    be put into that slot. ``held`` and ``order`` change as `RecallState` says.
    """
    s, i = tl.arange(0, SP), tl.arange(0, RP)
    is_slot, is_open = s < S, i < num_open
    slot = tl.load(order_ptr + s, mask=is_slot, other=0)
    held = tl.load(held_ptr + slot, mask=is_slot, other=-1)
    group = tl.load(groups_ptr + i, mask=is_open, other=-2)
    found = group[:, None] == held[None, :]
    is_used, has_slot = tl.max(found.to(tl.int32), 0), tl.max(found.to(tl.int32), 1)
    is_free = tl.where(is_slot, 1 - is_used, 0)
    is_missing = tl.where(is_open, 1 - has_slot, 0)
    num_free, num_missing = tl.sum(is_free, 0), tl.sum(is_missing, 0)
    num_taken = tl.minimum(num_free, num_missing)
    # the n-th missing group takes the n-th free slot
    free_rank = tl.cumsum(is_free, 0) - is_free
    missing_rank = tl.where(is_missing > 0, tl.cumsum(is_missing, 0) - is_missing, num_taken)
    is_taken = (is_free > 0) & (free_rank < num_taken)
    takes = (missing_rank[:, None] == free_rank[None, :]) & is_taken[None, :]
    where = tl.where(found, 2 * slot[None, :], tl.where(takes, 2 * slot[None, :] + 1, -1))
    now = tl.max(tl.where(takes, group[:, None], -1), 0)
    used_rank, num_left = tl.cumsum(is_used, 0) - is_used, num_free - num_taken
    behind = tl.where(is_used > 0, num_left + used_rank, free_rank - num_taken)
    behind = tl.where(is_taken, num_left + tl.sum(is_used, 0) + free_rank, behind)
    # all threads have read `order` and `held` before any writes them
    tl.debug_barrier()
    tl.store(place_ptr + i, tl.max(where, 1), mask=is_open)
    tl.store(held_ptr + slot, now, mask=is_taken)
    tl.store(order_ptr + behind, slot, mask=is_slot)


@triton.jit
def recall_attend_kernel(
    q_ptr, entries_k_ptr, entries_v_ptr, store_ptr, ring_k_ptr, ring_v_ptr, slots_ptr, groups_ptr, place_ptr,
    offset_ptr, seen_ptr, real_ptr, part_ptr, lse_ptr, s_qb, s_qh, K, R, G, W, N, window, num_recall, part, of,
    scale,
    SLOTS: tl.constexpr, g: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DV: tl.constexpr, PV: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, POOL: tl.constexpr, HAS_REAL: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part float32 ``[B, H, S, Dv]`` and base 2 log-sum-exp ``[B, H, S]`` of every split; grid (S, B * K).

    The tiles of all sources are counted through: first entries, whose scores get an offset each (-inf where the group
    is open), then tokens of open groups, then the ring's tokens of groups that are not closed.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    t, live, all_closed, closed = _row(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    first = all_closed * g
    entries = closed if POOL else 0
    opened = wanted_groups(closed, num_recall, part, of) * g
    tokens = tl.where(live, t + 1 - first, 0)
    entry_tiles, store_tiles = tl.cdiv(entries, BN), tl.cdiv(opened, BN)
    before_ring = entry_tiles + store_tiles
    tiles = before_ring + tl.cdiv(tokens, BN)

    d, e = tl.arange(0, P), tl.arange(0, PV)
    WIDTH: tl.constexpr = D + DV
    q = _queries(q_ptr + b * s_qb + kvh * R * s_qh, s_qh, R, D, D, P, BR)
    _after_the_last(EARLY)
    groups_ptr += head * num_recall
    place_ptr += head * num_recall
    offset_ptr += head * G
    entries_k_ptr += head * G * D
    entries_v_ptr += head * G * DV
    store_ptr += head * N * WIDTH
    slots_ptr += head * SLOTS * g * WIDTH
    ring_k_ptr += head * W * D
    ring_v_ptr += head * W * DV
    acc = tl.zeros([BR, PV], tl.float32)
    m = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    for tile in range(tiles * split // S, tiles * (split + 1) // S):
        is_entry, is_ring = tile < entry_tiles, tile >= before_ring
        skipped = tl.where(is_ring, before_ring, tl.where(is_entry, 0, entry_tiles))
        i = (tile - skipped) * BN + tl.arange(0, BN)
        inside = i < tl.where(is_ring, tokens, tl.where(is_entry, entries, opened))
        is_open = inside & (tile >= entry_tiles) & (tile < before_ring)
        offset = tl.load(offset_ptr + i, mask=inside & is_entry, other=0.0)
        group = tl.load(groups_ptr + i // g, mask=is_open, other=0)
        stored = store_ptr + (group * g + i % g).to(tl.int64) * WIDTH
        if SLOTS > 0:
            place = tl.load(place_ptr + i // g, mask=is_open, other=-1)
            in_slot = slots_ptr + ((place >> 1) * g + i % g).to(tl.int64) * WIDTH
            stored = tl.where((place >= 0) & (place % 2 == 0), in_slot, stored)
            moves = ((place >= 0) & (place % 2 == 1))[:, None]
        at = tl.where(is_ring, (first + i) % W, i).to(tl.int64)
        k_at = tl.where(is_ring, ring_k_ptr + at * D, tl.where(is_entry, entries_k_ptr + at * D, stored))
        v_at = tl.where(is_ring, ring_v_ptr + at * DV, tl.where(is_entry, entries_v_ptr + at * DV, stored + D))
        k = tl.load(k_at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_at[:, None] + e[None, :], mask=inside[:, None] & (e < DV)[None, :], other=0.0)
        if SLOTS > 0:
            tl.store(in_slot[:, None] + d[None, :], k, mask=moves & (d < D)[None, :])
            tl.store(in_slot[:, None] + D + e[None, :], v, mask=moves & (e < DV)[None, :])
        s = soft_cap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, CAP)[0]
        s = tl.where(inside[None, :], s + offset[None, :], float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp2(s - safe[:, None]), tl.exp2(m - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    r = tl.arange(0, BR)
    some = total > 0
    total = tl.where(some, total, 1.0)
    at = (head * R + r) * S + split
    tl.store(lse_ptr + at, tl.where(some, m + tl.log2(total), float("-inf")), mask=r < R)
    # splits without a key write zeros, because the join reads every part
    there = (r < R)[:, None] & (e < DV)[None, :]
    tl.store(part_ptr + at[:, None] * DV + e[None, :], acc / total[:, None], mask=there)
