"""Kernels of one decode step of Recall: score the index, rank the groups, choose, attend.

`condense.ops.triton.recall_close_kernels` has the one before them; `step_join_kernel` joins the splits at the end. Each
kernel waits for the one before it and reads its results. No atomics.

Shapes: B rows, K KV heads, R query heads per KV head, G groups of capacity, g tokens per group, m blocks of u tokens, W
slots of the rings, S splits, D and Dv widths, P and PV the same as powers of two for tiles, V columns of the output.
BR rows (query heads).
"head" is a KV head of a row, b * K + kvh. All buffers of the state are contiguous. Scores are base 2.
Index columns: C stored columns per row of the index, PARTS tiles of columns that one stored column holds (2 for 4 bits:
the first half of the columns in the low bits), PC columns as a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device.parts import add_weighted, load_rows, parts, tile_width
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.softmax import Softmax, empty_softmax, key_products, store_part
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import row_of_step
from condense.ops.triton.recall_store_kernels import load_group

_LOG2E = tl.constexpr(1.4426950408889634)
_INT_MIN, _INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _after_the_last(EARLY: tl.constexpr):
    """Let the next kernel be launched now, then wait until the one before this one has ended."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.constexpr_function
def _first_column(part, D, BITS):
    """The first key column that the codes of a part hold."""
    return part if BITS >= 8 else part // 2 + part % 2 * (D // 2)


@triton.jit
def _queries(
    q_ptr, s_qh, r, R, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, part: tl.constexpr, BITS: tl.constexpr
):
    """Columns ``[BR, P]`` of query heads r of one KV head that go with one part of the index's words."""
    STRIDE: tl.constexpr = 1 if BITS == 16 else 2
    d = _first_column(part, D, BITS) + STRIDE * tl.arange(0, P)
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

    Grid (S, B * K, tiles of BR query heads). Quantised, ``q . (zero + step * code)`` is ``zero * sum(q) + step * (q .
    code)``.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    _, _, _, closed = row_of_step(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    tiles = tl.cdiv(closed, BG)
    F: tl.constexpr = 2 * m if BOUNDS else m
    PARTS: tl.constexpr = 16 // BITS
    C: tl.constexpr = D // PARTS
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    q_ptr += b * s_qb + kvh * R * s_qh
    codes_ptr += head * G * F * C
    grid_ptr += head * G * 2
    queries = ()
    for part in tl.static_range(PARTS):
        queries = queries + (_queries(q_ptr, s_qh, r, R, D, C, PC, part, BITS),)  # noqa: RUF005
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
    score_ptr, top_ptr, total_ptr, biases_ptr, seen_ptr, real_ptr, key_ptr, candidate_ptr, offset_ptr,
    K, R, G, S, window, bias,
    g: tl.constexpr, GROUPS: tl.constexpr, BG: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BS: tl.constexpr,
    RC: tl.constexpr, MATCHED: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best C of every tile of BG groups, in rising order: key int32 ``[B, K, tiles, C]``, by which groups of all
    tiles are compared, and group. Beyond the closed groups the key is the lowest int32. Also offset float32
    ``[B, K, G]``: ``bias`` for every closed group, or MATCHED its own.

    Grid (tiles, B * K). CP: C as a power of two; RC query heads at a time.
    """
    _after_the_last(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, closed = row_of_step(seen_ptr, real_ptr, head // K, window, G, g, HAS_REAL)
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
    offset = tl.zeros_like(share) + bias
    if MATCHED:
        offset = tl.load(biases_ptr + head * G + group, mask=valid, other=0.0) * _LOG2E
    tl.store(offset_ptr + head * G + group, offset, mask=valid)


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
    _, _, _, closed = row_of_step(seen_ptr, real_ptr, head // K, window, G, g, HAS_REAL)
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
def _load_part(at, inside, LO: tl.constexpr, N: tl.constexpr):
    """N columns from LO on of the rows that begin at pointers ``at``."""
    d = LO + tl.arange(0, tile_width(N))
    return tl.load(at[:, None] + d[None, :], mask=inside[:, None] & (d < LO + N)[None, :], other=0.0)


@triton.jit
def _add_keys(softmax, q, k, v, offset, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the softmax; offset: added to the scores of each key, -inf for none."""
    s = soft_cap(key_products(q, k, PRECISION) * scale, CAP)[0] + offset[None, :]
    m = tl.maximum(softmax.m, tl.max(s, 1))
    safe = tl.where(m == float("-inf"), 0.0, m)
    p, alpha = tl.exp2(s - safe[:, None]), tl.exp2(softmax.m - safe)
    acc = add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION)
    return Softmax(acc, m, softmax.total * alpha + tl.sum(p, 1))


@triton.jit
def recall_attend_kernel(
    q_ptr, entries_k_ptr, entries_v_ptr, store_ptr, ring_k_ptr, ring_v_ptr, slots_ptr, groups_ptr, place_ptr,
    offset_ptr, seen_ptr, real_ptr, part_ptr, lse_ptr, s_qb, s_qh, K, R, G, W, N, window, num_recall, part, of,
    scale,
    SLOTS: tl.constexpr, FORM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    POOL: tl.constexpr, HAS_REAL: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part float32 ``[B, H, S, V]`` and base 2 log-sum-exp ``[B, H, S]`` of every split.

    Grid (S, B * K, tiles of BR query heads).

    A split has its share of the tiles of entries, whose scores get an offset each (-inf where the group is open), and
    of the ring's tokens of groups that are not closed, counted through; then its share of the open groups, BT tokens at
    a time.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    DV: tl.constexpr = FORM.DV
    t, live, all_closed, closed = row_of_step(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    first = all_closed * g
    entries = closed if POOL else 0
    tokens = tl.where(live, t + 1 - first, 0)
    entry_tiles = tl.cdiv(entries, BN)
    tiles = entry_tiles + tl.cdiv(tokens, BN)
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    q = load_rows(q_ptr + b * s_qb + kvh * R * s_qh, r.to(tl.int64) * s_qh, r < R, FORM.D0, FORM.D1)
    _after_the_last(EARLY)
    offset_ptr += head * G
    entries_k_ptr += head * G * D
    entries_v_ptr += head * G * DV
    ring_k_ptr += head * W * D
    ring_v_ptr += head * W * DV
    softmax = empty_softmax(BR, FORM.V0, FORM.V1)
    for tile in range(tiles * split // S, tiles * (split + 1) // S):
        is_entry = tile < entry_tiles
        i = (tile - tl.where(is_entry, 0, entry_tiles)) * BN + tl.arange(0, BN)
        inside = i < tl.where(is_entry, entries, tokens)
        offset = tl.load(offset_ptr + i, mask=inside & is_entry, other=0.0)
        at = tl.where(is_entry, i, (first + i) % W).to(tl.int64)
        k_at = tl.where(is_entry, entries_k_ptr, ring_k_ptr) + at * D
        k = parts(_load_part(k_at, inside, 0, FORM.D0), None)
        if FORM.D1 > 0:
            k = parts(k[0], _load_part(k_at, inside, FORM.D0, FORM.D1))
        v = (k[0],)
        if DV > 0:
            v_at = tl.where(is_entry, entries_v_ptr, ring_v_ptr) + at * DV
            v = parts(_load_part(v_at, inside, 0, FORM.V0), None)
            if FORM.V1 > 0:
                v = parts(v[0], _load_part(v_at, inside, FORM.V0, FORM.V1))
        softmax = _add_keys(softmax, q, k, v, tl.where(inside, offset, float("-inf")), scale, CAP, PRECISION)
    groups_ptr += head * num_recall
    place_ptr += head * num_recall
    store_ptr += head * (N // g) * FORM.piece
    slots_ptr += head * SLOTS * FORM.piece
    PARTS: tl.constexpr = (g + BT - 1) // BT
    tiles = wanted_groups(closed, num_recall, part, of) * PARTS
    for tile in range(tiles * split // S, tiles * (split + 1) // S):
        n, i = tile // PARTS, tile % PARTS * BT + tl.arange(0, BT)
        piece = store_ptr + tl.load(groups_ptr + n).to(tl.int64) * FORM.piece
        in_slot, moves = piece, False
        if SLOTS > 0:
            # as of `_find_slots`
            place = tl.load(place_ptr + n)
            in_slot = slots_ptr + (place >> 1).to(tl.int64) * FORM.piece
            moves = (place >= 0) & (place % 2 == 1)
            piece = tl.where((place >= 0) & (place % 2 == 0), in_slot, piece)
        k, v = load_group(piece, in_slot, i, moves, q_ptr.dtype.element_ty, FORM, SLOTS > 0)
        softmax = _add_keys(softmax, q, k, v, tl.where(i < g, 0.0, float("-inf")), scale, CAP, PRECISION)
    at = (head * R + r) * S + split
    # splits without a key write zeros, because the join reads every part
    store_part(part_ptr, lse_ptr, softmax, at, r < R, FORM.V0, FORM.V1)
