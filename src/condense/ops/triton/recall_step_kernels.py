"""Kernels of one decode step of Recall: score the index, choose the groups, attend.

`condense.ops.triton.recall_close_kernels` has the one before them; `step_join_kernel` joins the splits at the end. Each
kernel waits for the one before it and reads its results. The only atomic operation counts programs.

Shapes: B rows, K KV heads, R query heads per KV head, G groups of capacity, g tokens per group, m blocks of u tokens, W
slots of the rings, S splits, D and Dv widths, P and PV the same as powers of two for tiles, V columns of the output.
BR rows (query heads).
"head" is a KV head of a row, b * K + kvh. All buffers of the state are contiguous. Scores are base 2.
Index columns: C stored columns per row of the index, PARTS tiles of columns that one stored column holds (2 for 4 bits:
the first half of the columns in the low bits), PC columns as a power of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device.parts import add_weighted, load_rows, parts, tile_width
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.softmax import (
    Softmax,
    add_weights,
    empty_softmax,
    key_products,
    store_part,
    whole,
)
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


class Ranking(NamedTuple):
    """The constants of a choice. Each name with "tile" is a number as a power of two.

    tile: groups that one program ranks, of which it passes on the best ``passed``; ``candidates``: of all programs.
    slots: of the store. open_tile: open groups; splits_tile: splits of the scores. heads_tile: query heads at a time.
    matched: each entry has a bias of its own.
    """

    tile: int
    passed: int
    candidates: int
    slots: int
    passed_tile: int
    candidates_tile: int
    slots_tile: int
    open_tile: int
    splits_tile: int
    heads_tile: int
    matched: bool


class _Lists(NamedTuple):
    """Pointers to what one KV head chooses from and writes: keys and groups of candidates; the open groups, where each
    is read, and offsets of all groups; what slots hold, and their order.
    """

    key: Any
    candidate: Any
    groups: Any
    place: Any
    offset: Any
    held: Any
    order: Any


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
    codes_ptr, group, queries, row, F: tl.constexpr, C: tl.constexpr, PC: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products ``[BG, BR]`` of one row of each group's index with the queries, a tile of columns for each part."""
    c = tl.arange(0, PC)
    at = codes_ptr + (group.to(tl.int64) * F + row)[:, None] * C + c[None, :]
    codes = tl.load(at) if C == PC else tl.load(at, mask=(c < C)[None, :], other=0)
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
def _grid_of(grid_ptr, group, closed, BITS: tl.constexpr):
    """Steps and zeros of groups; 0 without closed groups, and for an index of 16 bits."""
    if BITS < 16:
        return tl.load(grid_ptr + group * 2, mask=closed > 0, other=0.0), tl.load(
            grid_ptr + group * 2 + 1, mask=closed > 0, other=0.0
        )
    else:
        return group, group


@triton.jit
def recall_score_kernel(
    q_ptr, codes_ptr, grid_ptr, seen_ptr, real_ptr, score_ptr, top_ptr, total_ptr,
    s_qb, s_qh, K, R, G, window, scale,
    g: tl.constexpr, D: tl.constexpr, INDEX: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, GROUPS: tl.constexpr,
    HAS_REAL: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Index scores of closed groups, float32 ``[B, H, GROUPS]``; of every split the largest and the sum of
    ``2 ** (score - largest)``.

    Grid (S, B * K, tiles of BR query heads). Quantised, ``q . (zero + step * code)`` is ``zero * sum(q) + step * (q .
    code)``.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    t, _, all_closed, closed = row_of_step(seen_ptr, real_ptr, b, window, G, g, HAS_REAL)
    tiles = tl.cdiv(closed, BG)
    BITS: tl.constexpr = INDEX.bits
    BOUNDS: tl.constexpr = INDEX.bounds
    PC: tl.constexpr = INDEX.words_tile
    m: tl.constexpr = INDEX.blocks
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
    if EARLY:
        gdc_launch_dependents()
        if t + 1 - window == all_closed * g:
            # the kernel before this one closes a group, and writes its index
            gdc_wait()
    lo, hi = tiles * split // S, tiles * (split + 1) // S
    i = tl.arange(0, BG)
    # loaded one tile ahead; beyond the closed groups, the last one is read again
    step, zero = _grid_of(grid_ptr, tl.minimum(lo * BG + i, closed - 1), closed, BITS)
    top = tl.full([BG, BR], float("-inf"), tl.float32)
    total = tl.zeros([BG, BR], tl.float32)
    for tile in range(lo, hi):
        group = tile * BG + i
        inside, row = group < closed, tl.minimum(group, closed - 1)
        next_step, next_zero = _grid_of(grid_ptr, tl.minimum(group + BG, closed - 1), closed, BITS)
        best = tl.full([BG, BR], float("-inf"), tl.float32)
        mass = tl.zeros([BG, BR], tl.float32)
        for block in tl.static_range(m):
            # programmatic launches and this assembly are what a GPU has and the interpreter has not
            if BOUNDS:
                s = _index_products(codes_ptr, row, down, block, F, C, PC, BITS, PRECISION, EARLY)
                s += _index_products(codes_ptr, row, up, m + block, F, C, PC, BITS, PRECISION, EARLY)
            else:
                s = _index_products(codes_ptr, row, queries, block, F, C, PC, BITS, PRECISION, EARLY)
            if BITS < 16:
                s = s * (step[:, None] * (unit * scale)[None, :]) + zero[:, None] * (sum_q * scale)[None, :]
            else:
                s *= scale
            larger = tl.maximum(best, s)
            if not BOUNDS:
                mass = mass * tl.exp2(best - larger) + tl.exp2(s - larger)
            best = larger
        if not BOUNDS:
            best += tl.log2(mass)
        at = (head * R + r)[None, :] * GROUPS + group[:, None]
        tl.store(score_ptr + at, best, mask=inside[:, None] & (r < R)[None, :])
        # largest and sum of every place in a tile, because warps would wait for each other to join them
        best = tl.where(inside[:, None], best, float("-inf"))
        larger = tl.maximum(top, best)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(top - safe) + tl.exp2(best - safe)
        top, step, zero = larger, next_step, next_zero
    larger = tl.max(top, 0)
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    at = (head * R + r) * S + split
    tl.store(top_ptr + at, larger, mask=r < R)
    tl.store(total_ptr + at, tl.sum(total * tl.exp2(top - safe[None, :]), 0), mask=r < R)
    if EARLY:
        # a kernel that waits for this one also needs what the one before this one wrote
        gdc_wait()


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
def _find_slots(lists, num_open, RANKING: tl.constexpr):
    """Where each open group is read, int32: -1 in the store, ``2 * slot`` in a slot, ``2 * slot + 1`` in the store, to
    be put into that slot. ``held`` and ``order`` change as `RecallState` says.
    """
    s, i = tl.arange(0, RANKING.slots_tile), tl.arange(0, RANKING.open_tile)
    is_slot, is_open = s < RANKING.slots, i < num_open
    slot = tl.load(lists.order + s, mask=is_slot, other=0)
    held = tl.load(lists.held + slot, mask=is_slot, other=-1)
    group = tl.load(lists.groups + i, mask=is_open, other=-2)
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
    tl.store(lists.place + i, tl.max(where, 1), mask=is_open)
    tl.store(lists.held + slot, now, mask=is_taken)
    tl.store(lists.order + behind, slot, mask=is_slot)


@triton.jit
def _choose(lists, num_open, RANKING: tl.constexpr):
    """The open groups of a KV head in rising order: the best ``num_open`` of its candidates; their offset becomes -inf.
    With slots also where each is read, see `_find_slots`.
    """
    n = tl.arange(0, RANKING.candidates_tile)
    # other multiprocessors wrote the candidates: they are read past the L1 cache
    key = tl.load(lists.key + n, mask=n < RANKING.candidates, other=_INT_MIN, cache_modifier=".cg")
    valid = key > _INT_MIN
    candidate = tl.load(lists.candidate + n, mask=valid, other=0, cache_modifier=".cg")
    is_open, place = _best(key, valid, num_open)
    tl.store(lists.groups + place, candidate, mask=is_open)
    tl.store(lists.offset + candidate, tl.full(n.shape, float("-inf"), tl.float32), mask=is_open)
    if RANKING.slots > 0:
        # all threads of the program read what the others stored
        tl.debug_barrier()
        _find_slots(lists, num_open, RANKING)


@triton.jit
def recall_choose_kernel(
    score_ptr, top_ptr, total_ptr, biases_ptr, seen_ptr, real_ptr, key_ptr, candidate_ptr, groups_ptr, place_ptr,
    offset_ptr, held_ptr, order_ptr, arrived_ptr, K, R, G, S, window, bias, num_recall, part, of,
    g: tl.constexpr, GROUPS: tl.constexpr, RANKING: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The open groups in rising order, int32 ``[B, K, num_recall]``, as many as `wanted_groups` says; and offset
    float32 ``[B, K, G]``: -inf for open groups, else ``bias``, or matched each group's own. With slots also where each
    open group is read.

    Grid (tiles, B * K). Every program finds the best of its tile of groups, in rising order: key int32 ``[B, K, tiles,
    passed]``, by which groups of all tiles are compared, and group. Beyond the closed groups the key is the lowest
    int32. The last program of a KV head to finish chooses among these. arrived int32 ``[B, K]``: finished programs.
    """
    _after_the_last(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, closed = row_of_step(seen_ptr, real_ptr, head // K, window, G, g, HAS_REAL)
    BG: tl.constexpr = RANKING.tile
    C: tl.constexpr = RANKING.passed
    group, s = tile * BG + tl.arange(0, BG), tl.arange(0, RANKING.splits_tile)
    valid = group < closed
    share = tl.full([BG], float("-inf"), tl.float32)
    for start in range(0, R, RANKING.heads_tile):
        r = start + tl.arange(0, RANKING.heads_tile)
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
    lists = _Lists(
        key_ptr + head * RANKING.candidates, candidate_ptr + head * RANKING.candidates,
        groups_ptr + head * num_recall, place_ptr + head * num_recall, offset_ptr + head * G,
        held_ptr + head * RANKING.slots, order_ptr + head * RANKING.slots,
    )  # fmt: skip
    at = tile * C
    tl.store(lists.key + at + place, key, mask=is_best)
    tl.store(lists.candidate + at + place, group, mask=is_best)
    i = tl.arange(0, RANKING.passed_tile)
    tl.store(lists.key + at + i, tl.full(i.shape, _INT_MIN, tl.int32), mask=(i >= wanted) & (i < C))
    offset = tl.zeros_like(share) + bias
    if RANKING.matched:
        offset = tl.load(biases_ptr + head * G + group, mask=valid, other=0.0) * _LOG2E
    tl.store(lists.offset + group, offset, mask=valid)
    # all threads of the program must have stored their candidates before it is counted
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _choose(lists, wanted_groups(closed, num_recall, part, of), RANKING)


@triton.jit
def _load_part(at, LO: tl.constexpr, N: tl.constexpr):
    """N columns from LO on of the rows that begin at pointers ``at``."""
    d = LO + tl.arange(0, tile_width(N))
    if tile_width(N) == N:
        return tl.load(at[:, None] + d[None, :])
    else:
        return tl.load(at[:, None] + d[None, :], mask=(d < LO + N)[None, :], other=0.0)


@triton.jit
def _add_keys(softmax, q, k, v, offset, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the softmax; offset: added to the scores of each key, -inf for none."""
    s = soft_cap(key_products(q, k, PRECISION) * scale, CAP)[0] + offset[None, :]
    m = tl.maximum(softmax.m, tl.max(s, 1))
    safe = tl.where(m == float("-inf"), 0.0, m)
    p, alpha = tl.exp2(s - safe[:, None]), tl.exp2(softmax.m - safe)
    acc = add_weighted([x * alpha[:, None] for x in softmax.acc], p, v, PRECISION)
    return Softmax(acc, m, add_weights(softmax.total, alpha, p))


@triton.jit
def recall_attend_kernel(
    q_ptr, entries_k_ptr, entries_v_ptr, store_ptr, ring_k_ptr, ring_v_ptr, slots_ptr, groups_ptr, place_ptr,
    offset_ptr, seen_ptr, real_ptr, part_ptr, lse_ptr, s_qb, s_qh, K, R, G, W, N, window, num_recall, part, of,
    scale,
    SLOTS: tl.constexpr, FORM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    POOL: tl.constexpr, OWN: tl.constexpr, HAS_REAL: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    EARLY: tl.constexpr,
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
    # no more than the ring holds, where more steps are replayed than the cache has room for
    tokens = tl.where(live, tl.minimum(t + 1 - first, W), 0)
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
    softmax = empty_softmax(BR, FORM.V0, FORM.V1, BN)
    share = tl.maximum(split - OWN, 0)
    lo, hi = tiles * share // (S - OWN), tiles * (share + 1) // (S - OWN)
    if OWN > 0:
        hi = tl.where(split < OWN, lo, hi)
    lane, oldest = tl.arange(0, BN), first % W
    offset = tl.load(offset_ptr + lo * BN + lane, mask=lo * BN + lane < entries, other=0.0)
    for tile in range(lo, hi):
        is_entry = tile < entry_tiles
        n, count = (tile - tl.where(is_entry, 0, entry_tiles)) * BN + lane, tl.where(is_entry, entries, tokens)
        # beyond the last one, it is read again
        row = tl.minimum(n, count - 1)
        slot = oldest + row
        at = tl.where(is_entry, row, tl.where(slot >= W, slot - W, slot)).to(tl.int64)
        # loaded one tile ahead; 0 for tokens
        next_offset = tl.load(offset_ptr + (tile + 1) * BN + lane, mask=(tile + 1) * BN + lane < entries, other=0.0)
        k_at = tl.where(is_entry, entries_k_ptr, ring_k_ptr) + at * D
        k = parts(_load_part(k_at, 0, FORM.D0), None)
        if FORM.D1 > 0:
            k = parts(k[0], _load_part(k_at, FORM.D0, FORM.D1))
        v = (k[0],)
        if DV > 0:
            v_at = tl.where(is_entry, entries_v_ptr, ring_v_ptr) + at * DV
            v = parts(_load_part(v_at, 0, FORM.V0), None)
            if FORM.V1 > 0:
                v = parts(v[0], _load_part(v_at, FORM.V0, FORM.V1))
        offset = tl.where(n < count, tl.where(is_entry, offset, 0.0), float("-inf"))
        softmax = _add_keys(softmax, q, k, v, offset, scale, CAP, PRECISION)
        offset = next_offset
    softmax = whole(softmax)
    groups_ptr += head * num_recall
    place_ptr += head * num_recall
    store_ptr += head * (N // g) * FORM.piece
    slots_ptr += head * SLOTS * FORM.piece
    PARTS: tl.constexpr = (g + BT - 1) // BT
    tiles = wanted_groups(closed, num_recall, part, of) * PARTS
    if OWN > 0:
        share = tl.minimum(split, OWN)
        lo, hi = tiles * share // OWN, tl.minimum(tiles * (share + 1) // OWN, tiles)
    else:
        lo, hi = tiles * split // S, tiles * (split + 1) // S
    for tile in range(lo, hi):
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
