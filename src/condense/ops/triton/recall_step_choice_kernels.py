"""Kernels of Recall's decode step that choose the groups to open, and find the slots of the store that hold them.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device import lanes
from condense.ops.triton.device.address import form_place, head_rows, part_at, place_row
from condense.ops.triton.recall_choice_kernels import wanted_groups
from condense.ops.triton.recall_close_kernels import after_the_last, row_of_step
from condense.ops.triton.recall_score_kernels import log_of_sum


class Ranking(namedtuple("Ranking", "groups halvings slots_tile open_tile splits_tile heads_tile")):
    """The constants of a choice.

    groups: groups that a KV head has room for, rounded up to a power of two. halvings: how often this may be halved to
    rank rows with fewer closed groups. slots_tile, open_tile: slots and open groups, rounded up, while slots are found;
    slots_tile is 0 without slots. splits_tile: splits of the scores, rounded up. heads_tile: query heads read at once.
    """


class _Lists(namedtuple("_Lists", "groups place held order slot_of used free")):
    """Pointers to the lists of one KV head.

    groups: the open groups. place: where each of these is read, see `_find_slots`. held: the group in each slot. order:
    slots, longest unused first. Scratch memory: slot_of, one number per group; used and free, one per slot.
    """


class _Records(namedtuple("_Records", "tags stamps table closed")):
    """Pointers that tell which of a KV head's slots still hold copies of its request's records.

    tags: of the slots (`condense.ops.step.pages.PagedSlots`). stamps: of the records, in page 0. table: the request's
    row of the page table. closed: number of its closed groups.
    """


class _HeadScores(namedtuple("_HeadScores", "score stride top total heads splits")):
    """The scores of one KV head's groups.

    score: pointer to the scores of its first query head. stride: from one query head to the next. top, total: pointers
    to the largest score and the sum of every split. heads, splits: numbers of query heads and of splits.
    """


@triton.jit
def _log_sums(scores, r, RANKING: tl.constexpr):
    """Log-sum-exps, base 2, of the scores of query heads r, float32 ``[heads_tile]``."""
    s = tl.arange(0, RANKING.splits_tile)
    split, there = r[:, None] * scores.splits + s[None, :], (r < scores.heads)[:, None]
    is_split = there & (s < scores.splits)[None, :]
    top = tl.load(scores.top + split, mask=is_split, other=float("-inf"))  # [heads_tile, splits_tile]
    total = tl.load(scores.total + split, mask=is_split, other=0.0)
    return log_of_sum(top, total)


@triton.jit
def _shares(scores, group, there, RANKING: tl.constexpr):
    """Base-2 logarithm of each group's share, float32 ``[n]``: its largest softmax weight over the query heads. -inf
    where not ``there``.
    """
    BR: tl.constexpr = RANKING.heads_tile
    share, at = tl.full(group.shape, float("-inf"), tl.float32), scores.score + group
    for first in range(0, scores.heads, BR):
        # issued before the log-sum-exps are computed, so that these loads and that work overlap
        kept = ()
        for r in tl.static_range(BR):
            score = tl.load(at + r * scores.stride, mask=there & (first + r < scores.heads), other=float("-inf"))
            kept += (score,)
        lse = lanes.columns(_log_sums(scores, first + tl.arange(0, BR), RANKING)[None, :])  # BR times [1]
        for r in tl.static_range(BR):
            share = tl.maximum(share, kept[r] - lse[r])
        at += BR * scores.stride
    return share


@triton.jit
def _keys_of(scores, group, closed, RANKING: tl.constexpr):
    """Sort keys of groups, uint32 ``[n]``: above 0 and in the order of their shares; 0 where a group is not closed."""
    # the mask is the same for each four groups, so that a thread can load four scores at once
    share = _shares(scores, group, group < tl.cdiv(closed, 4) * 4, RANKING)
    bits = share.to(tl.uint32, bitcast=True)  # [n]
    return tl.where(group < closed, tl.where(bits >> 31 != 0, bits ^ (2**32 - 1), bits | (1 << 31)), 0)


@triton.jit
def _threshold(key, valid, wanted):
    """Return a threshold that at most ``wanted`` keys reach (are >=), and how many reach it. If fewer than ``wanted``
    do, these and the keys equal to the threshold minus 1 are at least ``wanted``. At least ``wanted`` keys are valid.

    Each iteration keeps a third of the interval: one sum counts the keys >= a and, in its high 16 bits, those >= b.
    There are at most 2 ** 15 groups, so a count fits.
    """
    lo, hi, above = tl.min(tl.where(valid, key, 2**32 - 1), 0), tl.max(key, 0) + 1, 0
    while lo + 1 < hi:
        third = tl.maximum((hi - lo) // 3, 1)
        a, b = lo + third, lo + 2 * third
        both = tl.sum((key >= a).to(tl.int32) + ((key >= b).to(tl.int32) << 16), 0)
        reach_a, reach_b = both & 0xFFFF, (both >> 16) & 0xFFFF
        above = tl.where(reach_a < wanted, reach_a, tl.where(reach_b < wanted, reach_b, above))
        hi = tl.where(reach_a < wanted, a, tl.where(reach_b < wanted, b, hi))
        lo = tl.where(reach_b >= wanted, b, tl.where(reach_a >= wanted, a, lo))
        # if exactly ``wanted`` keys reach one of the two, the search ends
        exact, ends = tl.where(reach_a == wanted, a, b), (reach_a == wanted) | (reach_b == wanted)
        lo, hi, above = tl.where(ends, exact, lo), tl.where(ends, exact, hi), tl.where(ends, wanted, above)
    return hi, above


@triton.jit
def _before(counts):
    """Sum of all counts before each of ``counts`` ``[n]``, n a multiple of four. A thread sums its four adjacent ones
    first.
    """
    four = tl.reshape(counts, [counts.shape[0] // 4, 4])
    sums = tl.sum(four, 1)  # [n // 4]
    return tl.reshape((tl.cumsum(sums, 0) - sums)[:, None] + tl.cumsum(four, 1), counts.shape) - counts


@triton.jit
def _rank(lists, scores, num_open, closed, N: tl.constexpr, RANKING: tl.constexpr):
    """Write the open groups of a KV head in rising order: the ``num_open`` with the largest shares of the first
    ``closed`` groups, which are at most N; of groups with equal shares the first.
    """
    group = tl.arange(0, N)
    key = _keys_of(scores, group, closed, RANKING)  # [N]
    threshold, above = _threshold(key, group < closed, num_open)
    is_open, room = key >= threshold, num_open - above
    place = _before(is_open.to(tl.int32))
    if room > 0:
        # of the groups just below the threshold, which are equal, only the first are opened
        equal = (key + 1 == threshold) & (key > 0)
        before = _before(equal.to(tl.int32))
        is_open, place = is_open | (equal & (before < room)), place + tl.minimum(before, room)
    tl.store(lists.groups + place, group, mask=is_open)


@triton.jit
def _stamped(records, group, there, FAR: tl.constexpr):
    """Places (`form_place`) and stamps of groups' records, both ``[n]``. Where not ``there``: page 0, and stamp 0."""
    place = form_place(records.table, group, there, FAR)
    return place, tl.load(records.stamps + part_at(records.stamps, place_row(place, FAR)), mask=there, other=0)


@triton.jit
def _still_held(records, held, slot, FAR: tl.constexpr):
    """Group held in each slot; -1 where its record is no longer the one that was copied to the slot."""
    there = (held >= 0) & (held < records.closed)
    place, stamp = _stamped(records, held, there, FAR)
    tag = records.tags + 2 * slot
    same = (tl.load(tag, mask=there, other=0) == place) & (tl.load(tag + 1, mask=there, other=0) == stamp)
    return tl.where(there & same, held, -1)


@triton.jit
def _find_slots(lists, records, slots, num_open, RANKING: tl.constexpr, FAR: tl.constexpr):
    """Write where each open group is read, int32: -1, in the store; ``2 * slot``, in a slot; ``2 * slot + 1``, in the
    store, and the reader then copies it to that slot. Update ``held`` and ``order`` as `condense.ops.step.StepState`
    describes.

    Threads exchange results through scratch memory. records: None for buffers. slots: number of slots.
    """
    s, i = tl.arange(0, RANKING.slots_tile), tl.arange(0, RANKING.open_tile)
    is_slot, is_open = s < slots, i < num_open
    slot = tl.load(lists.order + s, mask=is_slot, other=0)  # [slots_tile]
    held = tl.load(lists.held + slot, mask=is_slot, other=-1)
    if FAR is not None:
        held = _still_held(records, held, slot, FAR)
    group = tl.load(lists.groups + i, mask=is_open, other=0)  # [open_tile]
    tl.store(lists.slot_of + group, tl.full(i.shape, -1, tl.int32), mask=is_open)
    tl.store(lists.used + s, tl.zeros_like(s), mask=is_slot)
    tl.debug_barrier()
    tl.store(lists.slot_of + held, slot, mask=held >= 0)
    tl.debug_barrier()
    found = tl.load(lists.slot_of + group, mask=is_open, other=-1)  # [open_tile]
    tl.store(lists.used + found, tl.full(i.shape, 1, tl.int32), mask=found >= 0)
    tl.debug_barrier()
    is_used = tl.load(lists.used + slot, mask=is_slot, other=0)  # [slots_tile]
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
    taken = tl.load(lists.free + missing_rank, mask=takes, other=0)  # [open_tile]
    tl.store(lists.held + taken, group, mask=takes)
    if FAR is not None:
        place, stamp = _stamped(records, group, takes, FAR)
        tl.store(records.tags + 2 * taken, place, mask=takes)
        tl.store(records.tags + 2 * taken + 1, stamp, mask=takes)
    tl.store(lists.place + i, tl.where(takes, 2 * taken + 1, tl.where(found >= 0, 2 * found, -1)), mask=is_open)


@triton.jit(do_not_specialize=("least", "part", "of"))
def recall_share_kernel(
    score_ptr, top_ptr, total_ptr, seen_ptr, before_ptr, share_ptr, share_top_ptr, share_total_ptr,
    R, G, S, window, most_opened, least, part, of,
    g: tl.constexpr, BG: tl.constexpr, RANKING: tl.constexpr,
):  # fmt: skip
    """Write each closed group's share (`_shares`) over R query heads, float32 ``[G]``, a row's groups from its
    ``start`` on; and share_top 0 and share_total 1, float32 ``[B]``.

    It runs if several processes have query heads of one KV head. The largest shares over processes are then given to
    `recall_choose_kernel` as the scores of a single head; with 0 and 1 their log-sum-exp is 0, so it compares them as
    they are. Grid (tiles of BG groups, B). Only for pages of latents. No shares where all closed groups are opened.
    """
    b = tl.program_id(1).to(tl.int64)
    this = row_of_step(seen_ptr, seen_ptr, before_ptr, b, window, G, g, False, True)
    if tl.program_id(0) == 0:
        tl.store(share_top_ptr + b, 0.0)
        tl.store(share_total_ptr + b, 1.0)
    group = tl.program_id(0) * BG + tl.arange(0, BG)
    is_closed, is_chosen = group < this.closed, wanted_groups(this.closed, most_opened, least, part, of) < this.closed
    if is_chosen & (tl.program_id(0) * BG < this.closed):
        scores = _HeadScores(score_ptr + this.start, G, top_ptr + b * R * S, total_ptr + b * R * S, R, S)
        share = _shares(scores, group, is_closed, RANKING)
        tl.store(share_ptr + this.start + group, share, mask=is_closed)


@triton.jit(do_not_specialize=("slot_rows", "least", "part", "of"))
def recall_choose_kernel(
    score_ptr, top_ptr, total_ptr, seen_ptr, real_ptr, groups_ptr, place_ptr, held_ptr, order_ptr, slot_of_ptr,
    used_ptr, free_ptr, before_ptr, far_ptr, stamps_ptr, tags_ptr, clock_ptr, slot_rows, slots,
    K, R, G, S, window, most_opened, least, part, of,
    g: tl.constexpr, GROUPS: tl.constexpr, RANKING: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Write the open groups in rising order, `wanted_groups` of them, int32 ``[B, K, most_opened]``; with slots also
    where each is read (`_find_slots`).

    Grid (B * K,). No scores are read where all closed groups are opened. far: page table of records; then lists of
    groups are ``[K, G]``, a row's list from its ``start`` on; None for buffers. slots: number per KV head; in pages
    only the first ``slot_rows`` rows have slots. stamps, tags, clock: as in `condense.ops.step.pages.PagedSlots`, None
    without slots.
    """
    # at the very start: this allows the launch of the attention kernel, which reads the rotated queries and the sums
    # of centres' scores before it waits for this one
    after_the_last(EARLY)
    head = tl.program_id(0).to(tl.int64)
    b, kvh = head // K, head % K
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, g, HAS_REAL, FAR is not None)
    closed = this.closed
    if FAR is None:
        groups_ptr, slot_of_ptr = groups_ptr + head * most_opened, slot_of_ptr + head * G
        score_ptr, stride = score_ptr + head * R * GROUPS, GROUPS
    else:
        groups_ptr, slot_of_ptr = groups_ptr + kvh * G + this.start, slot_of_ptr + kvh * G + this.start
        # pages of all rows share one array of scores: a row begins at ``start``, and G groups are one query head
        score_ptr, stride = score_ptr + kvh * R * G + this.start, G
    first_slot = head * slots
    lists = _Lists(
        groups_ptr, place_ptr + head * most_opened, held_ptr + first_slot, order_ptr + first_slot, slot_of_ptr,
        used_ptr + first_slot, free_ptr + first_slot,
    )  # fmt: skip
    num_open = wanted_groups(closed, most_opened, least, part, of)
    if num_open == closed:
        for start in range(0, closed, 1024):
            group = start + tl.arange(0, 1024)
            tl.store(lists.groups + group, group, mask=group < closed)
    else:
        scores = _HeadScores(score_ptr, stride, top_ptr + head * R * S, total_ptr + head * R * S, R, S)
        # a tile of ``groups`` is halved while it still holds the row's groups, because few groups are ranked faster
        for halved in tl.static_range(RANKING.halvings + 1):
            is_least = (closed > RANKING.groups >> halved + 1) | (halved == RANKING.halvings)
            if (closed <= RANKING.groups >> halved) & is_least:
                _rank(lists, scores, num_open, closed, RANKING.groups >> halved, RANKING)
    if RANKING.slots_tile > 0:
        # `_find_slots` reads groups that other threads have stored
        tl.debug_barrier()
        if FAR is None:
            _find_slots(lists, None, slots, num_open, RANKING, FAR)
        elif b < slot_rows:
            stamps_ptr += head_rows(stamps_ptr, head, kvh, G, 1, FAR)
            records = _Records(tags_ptr + 2 * first_slot, stamps_ptr, far_ptr + b * FAR.s_table, closed)
            _find_slots(lists, records, slots, num_open, RANKING, FAR)
        else:
            i = tl.arange(0, RANKING.open_tile)
            tl.store(lists.place + i, tl.full(i.shape, -1, tl.int32), mask=i < num_open)
        if FAR is not None:  # noqa: SIM102 - known when the kernel is compiled
            if head == 0:
                # records written from now on get a new stamp, so that older copies of them are not used
                tl.store(clock_ptr, tl.load(clock_ptr) + 1)
