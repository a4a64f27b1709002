"""Kernel of Recall's decode step that chooses the groups to open, and finds the slots of the store that hold them.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import after_the_last, row_of_step

_INT_MIN, _INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


class Ranking(NamedTuple):
    """The constants of a choice.

    tile: groups that one program ranks. passed: groups that it passes on. candidates: groups that all programs pass on.
    slots: of the store. passed_tile, candidates_tile, slots_tile: these numbers as powers of two. halvings: times that
    candidates_tile is halved for rows with fewer. open_tile: open groups, for slots, splits_tile: splits of the scores,
    both as powers of two. heads_tile: query heads that are read at a time. pool: whether entries are read, too.
    """

    tile: int
    passed: int
    candidates: int
    slots: int
    passed_tile: int
    candidates_tile: int
    slots_tile: int
    halvings: int
    open_tile: int
    splits_tile: int
    heads_tile: int
    pool: bool


class _Lists(namedtuple("_Lists", "key candidate groups place offset held order slot_of used free")):
    """Pointers of one KV head.

    key, candidate: keys and groups of the candidates. groups: the open groups. place: where each of these is read, see
    `_find_slots`. offset: offsets of all groups' scores. held: group in each slot. order: slots, longest unused first.
    slot_of: scratch memory, a number per group; used, free: one per slot.
    """


class _HeadScores(namedtuple("_HeadScores", "score stride top total heads splits")):
    """Pointers to the scores of one KV head's groups, of its first query head, and stride to the next one; to the
    largest scores and sums of every split; numbers of query heads and of splits.
    """


@triton.jit
def _threshold(key, valid, wanted):
    """A number that at least ``wanted`` valid keys reach (>=) and at most ``wanted`` exceed (>).

    Each turn keeps a third of the interval: one sum counts the keys that reach each of two numbers, in 16 bits each.
    There are at most 2 ** 15 groups, so a count fits.
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
        # if exactly ``wanted`` keys reach one of the two, the search ends
        hi = tl.where((reach_a == wanted) | (reach_b == wanted), lo + 1, hi)
    return lo.to(tl.int32)


@triton.jit
def _best(key, valid, wanted):
    """Select the ``wanted`` best keys, ties to the first.

    Returns whether each is selected, and its rank by position.
    """
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
    """Write where each open group is read, int32: -1 in the store; ``2 * slot`` in a slot; ``2 * slot + 1`` in the
    store, and then copied into that slot. Update ``held`` and ``order`` as `condense.ops.step.StepState` says.

    Threads of the program tell each other what they found through scratch memory.
    """
    s, i = tl.arange(0, RANKING.slots_tile), tl.arange(0, RANKING.open_tile)
    is_slot, is_open = s < RANKING.slots, i < num_open
    slot = tl.load(lists.order + s, mask=is_slot, other=0)
    held = tl.load(lists.held + slot, mask=is_slot, other=-1)
    group = tl.load(lists.groups + i, mask=is_open, other=0)
    tl.store(lists.slot_of + group, tl.full(i.shape, -1, tl.int32), mask=is_open)
    tl.store(lists.used + s, tl.zeros_like(s), mask=is_slot)
    tl.debug_barrier()
    tl.store(lists.slot_of + held, slot, mask=held >= 0)
    tl.debug_barrier()
    found = tl.load(lists.slot_of + group, mask=is_open, other=-1)
    tl.store(lists.used + found, tl.full(i.shape, 1, tl.int32), mask=found >= 0)
    tl.debug_barrier()
    is_used = tl.load(lists.used + slot, mask=is_slot, other=0)
    is_free, is_missing = tl.where(is_slot, 1 - is_used, 0), (is_open & (found < 0)).to(tl.int32)
    num_free = tl.sum(is_free, 0)
    num_taken = tl.minimum(num_free, tl.sum(is_missing, 0))
    # the n-th missing group takes the n-th free slot
    free_rank, missing_rank = tl.cumsum(is_free, 0) - is_free, tl.cumsum(is_missing, 0) - is_missing
    is_taken = (is_free > 0) & (free_rank < num_taken)
    tl.store(lists.free + free_rank, slot, mask=is_taken)
    used_rank = tl.cumsum(is_used, 0) - is_used
    behind = tl.where(is_used > 0, num_free - num_taken + used_rank, free_rank - num_taken)
    behind = tl.where(is_taken, num_free - num_taken + tl.sum(is_used, 0) + free_rank, behind)
    tl.store(lists.order + behind, slot, mask=is_slot)
    tl.debug_barrier()
    takes = (is_missing > 0) & (missing_rank < num_taken)
    taken = tl.load(lists.free + missing_rank, mask=takes, other=0)
    tl.store(lists.held + taken, group, mask=takes)
    tl.store(lists.place + i, tl.where(takes, 2 * taken + 1, tl.where(found >= 0, 2 * found, -1)), mask=is_open)


@triton.jit
def _place_of(tile, RANKING: tl.constexpr, IN_STRETCH: tl.constexpr):
    """Place of a tile's first candidate. IN_STRETCH: a row has a place for each of its closed groups, and no more, so
    that a tile's candidates, which may be fewer than it passes on, stand where its groups do.
    """
    return tile * (RANKING.tile if IN_STRETCH else RANKING.passed)


@triton.jit
def _rank(
    lists, num_open, closed, num, N: tl.constexpr, RANKING: tl.constexpr, IN_STRETCH: tl.constexpr
):  # fmt: skip
    """Write the best ``num_open`` of ``num`` candidates, at most N, as `_choose` says."""
    n = tl.arange(0, N)
    at, there = n, n < num
    if IN_STRETCH:
        at = _place_of(n // RANKING.passed, RANKING, IN_STRETCH) + n % RANKING.passed
        there = there & (at < closed)
    # other multiprocessors wrote the candidates: they are read past the L1 cache
    key = tl.load(lists.key + at, mask=there, other=_INT_MIN, cache_modifier=".cg")
    valid = key > _INT_MIN
    candidate = at
    if RANKING.passed < RANKING.tile:
        candidate = tl.load(lists.candidate + at, mask=valid, other=0, cache_modifier=".cg")
    is_open, place = _best(key, valid, num_open)
    tl.store(lists.groups + place, candidate, mask=is_open)
    if RANKING.pool:
        tl.store(lists.offset + candidate, tl.full(n.shape, float("-inf"), tl.float32), mask=is_open)


@triton.jit
def _choose(lists, num_open, closed, RANKING: tl.constexpr, IN_STRETCH: tl.constexpr):
    """Write the open groups of a KV head in rising order: the best ``num_open`` of its candidates. Their offsets become
    -inf if entries are read. With slots, also write where each is read, see `_find_slots`. IN_STRETCH: as of
    `_place_of`.
    """
    # room is for the longest text, but few candidates are soon ranked
    num = tl.cdiv(closed, RANKING.tile) * RANKING.passed
    for halved in tl.static_range(RANKING.halvings + 1):
        is_least = (num > RANKING.candidates_tile >> halved + 1) | (halved == RANKING.halvings)
        if (num <= RANKING.candidates_tile >> halved) & is_least:
            _rank(lists, num_open, closed, num, RANKING.candidates_tile >> halved, RANKING, IN_STRETCH)
    if RANKING.slots > 0:
        # all threads of the program read what the others stored
        tl.debug_barrier()
        _find_slots(lists, num_open, RANKING)


@triton.jit
def _open_all(lists, closed, RANKING: tl.constexpr, N: tl.constexpr):
    """Write all closed groups, N at a time, as `_choose` says."""
    for start in range(0, closed, N):
        group = start + tl.arange(0, N)
        tl.store(lists.groups + group, group, mask=group < closed)
        if RANKING.pool:
            tl.store(lists.offset + group, tl.full([N], float("-inf"), tl.float32), mask=group < closed)
    if RANKING.slots > 0:
        # all threads of the program read what the others stored
        tl.debug_barrier()
        _find_slots(lists, closed, RANKING)


@triton.jit
def _rank_tile(lists, scores, bias, tile, closed, RANKING: tl.constexpr, IN_STRETCH: tl.constexpr):
    """Write the best groups of a tile to the candidates, and the offsets of all of them, if entries are read."""
    BG: tl.constexpr = RANKING.tile
    C: tl.constexpr = RANKING.passed
    group, s = tile * BG + tl.arange(0, BG), tl.arange(0, RANKING.splits_tile)
    valid = group < closed
    share = tl.full([BG], float("-inf"), tl.float32)
    for start in range(0, scores.heads, RANKING.heads_tile):
        r = start + tl.arange(0, RANKING.heads_tile)
        there = (r < scores.heads)[:, None]
        at = r.to(tl.int64)[:, None] * scores.stride + group[None, :]
        score = tl.load(scores.score + at, mask=there & valid[None, :], other=float("-inf"))
        split, is_split = r[:, None] * scores.splits + s[None, :], there & (s < scores.splits)[None, :]
        top = tl.load(scores.top + split, mask=is_split, other=float("-inf"))
        total = tl.load(scores.total + split, mask=is_split, other=0.0)
        largest = tl.max(top, 1)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(total * tl.exp2(top - largest[:, None]), 1)
        lse = largest + tl.log2(tl.where(total > 0, total, 1.0))
        share = tl.maximum(share, tl.max(score - lse[:, None], 0))
    # keys are the floats as integers in the same order: for negative ones all bits but the sign are flipped
    bits = share.to(tl.int32, bitcast=True)
    key = tl.where(valid, bits ^ ((bits >> 31) & _INT_MAX), _INT_MIN)
    wanted = tl.maximum(tl.minimum(C, closed - tile * BG), 0)
    if C == BG:
        # every group is passed on
        is_best, place = valid, tl.arange(0, BG)
    else:
        is_best, place = _best(key, valid, wanted)
    at = _place_of(tile, RANKING, IN_STRETCH)
    tl.store(lists.key + at + place, key, mask=is_best)
    if C < BG:
        tl.store(lists.candidate + at + place, group, mask=is_best)
    if not IN_STRETCH:
        i = tl.arange(0, RANKING.passed_tile)
        tl.store(lists.key + at + i, tl.full(i.shape, _INT_MIN, tl.int32), mask=(i >= wanted) & (i < C))
    if RANKING.pool:
        tl.store(lists.offset + group, tl.zeros_like(share) + bias, mask=valid)


@triton.jit(do_not_specialize=("least", "part", "of"))
def recall_choose_kernel(
    score_ptr, top_ptr, total_ptr, seen_ptr, real_ptr, key_ptr, candidate_ptr, groups_ptr, place_ptr,
    offset_ptr, held_ptr, order_ptr, slot_of_ptr, used_ptr, free_ptr, arrived_ptr, before_ptr,
    K, R, G, S, window, bias, most_opened, least, part, of,
    g: tl.constexpr, GROUPS: tl.constexpr, RANKING: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Write the open groups in rising order, int32 ``[B, K, most_opened]``, as many as `wanted_groups` says; and offset
    float32 ``[B, K, G]``, if entries are read: -inf for open groups, else ``bias``. With slots, also write where each
    open group is read.

    Grid (programs, B * K). The tiles of closed groups are dealt out to the programs, each of which finds the best
    groups of its tiles and writes them in rising order: the group and its key, int32 ``[B, K, tiles, passed]``, by
    which groups of all tiles are compared. Behind the closed groups the key is the lowest int32. The last program with
    a tile to finish for a KV head chooses among these. arrived int32 ``[B, K]``: finished programs. Where all closed
    groups are opened, one program writes them and reads no scores. PAGED: lists, keys and offsets are ``[K, G]``, with
    the groups of a row from its ``start`` on.
    """
    after_the_last(EARLY)
    head = tl.program_id(1).to(tl.int64)
    this = row_of_step(seen_ptr, real_ptr, before_ptr, head // K, window, G, g, HAS_REAL, PAGED)
    closed = this.closed
    tiles = tl.maximum(tl.cdiv(closed, RANKING.tile), 1)
    if tl.program_id(0) >= tiles:
        return
    if PAGED:
        stretch = head % K * G + this.start
        lists = _Lists(
            key_ptr + stretch, candidate_ptr + stretch, groups_ptr + stretch, place_ptr, offset_ptr + stretch,
            held_ptr, order_ptr, slot_of_ptr, used_ptr, free_ptr,
        )  # fmt: skip
        # scores of the row's groups, and from one query head to the next
        score_ptr, stride = score_ptr + head % K * R * G + this.start, G
    else:
        lists = _Lists(
            key_ptr + head * RANKING.candidates, candidate_ptr + head * RANKING.candidates,
            groups_ptr + head * most_opened, place_ptr + head * most_opened, offset_ptr + head * G,
            held_ptr + head * RANKING.slots, order_ptr + head * RANKING.slots, slot_of_ptr + head * G,
            used_ptr + head * RANKING.slots, free_ptr + head * RANKING.slots,
        )  # fmt: skip
        score_ptr, stride = score_ptr + head * R * GROUPS, GROUPS
    num_open = wanted_groups(closed, most_opened, least, part, of)
    if num_open == closed:
        if tl.program_id(0) == 0:
            _open_all(lists, closed, RANKING, 1024)
        return
    scores = _HeadScores(score_ptr, stride, top_ptr + head * R * S, total_ptr + head * R * S, R, S)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _rank_tile(lists, scores, bias, tile, closed, RANKING, PAGED)
    # all threads of the program must have stored their candidates before it is counted
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == tl.minimum(tiles, tl.num_programs(0)) - 1:
        _choose(lists, num_open, closed, RANKING, PAGED)
