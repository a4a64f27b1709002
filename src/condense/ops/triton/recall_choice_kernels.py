"""Kernels that choose the groups that each query of a prompt opens, and sort the choice by query and by tile.

They read the scores that `condense.ops.triton.recall_score_kernels` writes. `recall_cells_kernel` picks the r cells
with the highest best scores; the best r groups lie in them, because each of these cells holds a group at least as good
as any group outside. `recall_groups_kernel` chooses the best r groups of these cells, and so reads ``r * C`` scores
instead of all G. `recall_mark_kernel` and `recall_list_kernel` invert the choice: they say which queries of a tile open
a group, and which groups any query of a tile opens.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries of which a block has n, G groups of g
tokens, cells of C groups, r groups that a query opens. T tiles of Q queries.
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton import recall_score_kernels as scoring
from condense.ops.triton.device.rule import VARYING, row_of_program
from condense.ops.triton.recall_score_kernels import CELLS_PER_LINE, STRETCH

_INT_MIN, _INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _best_share(score_ptr, at, step, lse_ptr, query, size, there, valid, R: tl.constexpr):
    """Largest log softmax weight ``[BQ, ...]`` of each group or cell over R query heads; -inf if not valid. With one
    head the score itself, which ranks the same.

    at: offset of the score of head 0; the score of head r is at ``at + r * step``. there: scores that may be read.
    query: indices of the queries in the log-sum-exps. size: rows of the block of queries, and stretches of groups.
    """
    lines, stretches = size
    share = tl.full(valid.shape, float("-inf"), tl.float32)
    for r in tl.static_range(R):
        score = tl.load(score_ptr + at + r * step, mask=there, other=float("-inf"))
        if R > 1:
            lse = scoring.joined_lse(lse_ptr, query * R + r, lines, stretches)  # [BQ]
            score -= tl.reshape(lse, [valid.shape[0]] + [1] * (len(valid.shape) - 1))
        share = tl.maximum(share, score)
    return tl.where(valid, share, float("-inf"))


@triton.jit
def wanted_groups(closed, most, least, part, of):
    """Number of ``closed`` groups that a query opens, by the fields of a `condense.ops.recall.choice.Quota`."""
    share = (closed.to(tl.int64) * part + (of - 1)) // of
    return tl.minimum(tl.maximum(share, tl.minimum(closed, least)), most).to(tl.int32)


@triton.jit
def _reached(key, lo, hi, wanted):
    """The ``wanted``-th largest key of each row, int32 ``[BQ]``, or a number just as good: at least ``wanted`` keys are
    >= it, and at most ``wanted`` are greater. Found by a search in ``[lo, hi)``.

    At least ``wanted`` keys are >= lo, fewer are >= hi; where hi is lo, the result is lo. Each iteration keeps a third
    of the interval: one sum counts the keys >= a and, in its high bits, those >= b.
    """
    BITS: tl.constexpr = 16 if key.shape[1] <= 2**15 else 32
    COUNTS: tl.constexpr = tl.int32 if key.shape[1] <= 2**15 else tl.int64
    while tl.max(hi - lo, 0) > 1:
        third = (hi - lo + 2) // 3
        a, b = lo + third, lo + 2 * third
        both = (key >= a.to(tl.int32)[:, None]).to(COUNTS) + ((key >= b.to(tl.int32)[:, None]).to(COUNTS) << BITS)
        both = tl.sum(both, 1)  # [BQ]
        reach_a, reach_b = both & ((1 << BITS) - 1), both >> BITS
        hi = tl.where(reach_a < wanted, a, tl.where(reach_b < wanted, b, hi))
        lo = tl.where(reach_b >= wanted, b, tl.where(reach_a >= wanted, a, lo))
        # if exactly ``wanted`` keys reach one of the two, the search ends
        hi = tl.where((reach_a == wanted) | (reach_b == wanted), lo + 1, hi)
    return lo.to(tl.int32)


@triton.jit
def _best(share, valid, wanted, floor):
    """Select the best ``wanted`` ``[BQ]`` valid shares (of `_best_share`) of each row of ``[BQ, N]``, or all valid ones
    if there are fewer.

    Returns whether each is selected, ties to the first; its rank by position among the selected; and the sort key of
    the worst selected one. floor: a key such that at least ``wanted`` keys of the row are >= it; else `_INT_MIN`.
    """
    # sort keys: the bits of a float as int32, where flipping all but the sign bit of negative ones keeps the order
    bits = share.to(tl.int32, bitcast=True)
    key = tl.where(valid, bits ^ ((bits >> 31) & _INT_MAX), _INT_MIN)  # [BQ, N]
    lo = tl.maximum(tl.min(tl.where(valid, key, _INT_MAX), 1), floor).to(tl.int64)  # [BQ]
    # rows with at most ``wanted`` valid shares keep all of them and need no search
    hi = tl.where(tl.sum(valid.to(tl.int32), 1) > wanted, tl.max(key, 1).to(tl.int64) + 1, lo)
    worst = _reached(key, lo, hi, wanted)
    best = (key >= worst[:, None]).to(tl.int32)
    excess = tl.maximum(tl.sum(best, 1) - wanted, 0)
    if tl.max(excess, 0) > 0:  # only the first of those that tie with the worst are kept
        tied = (key == worst[:, None]).to(tl.int32)
        kept = tl.sum(tied, 1) - excess
        best = tl.where(tl.cumsum(tied, 1) * tied > kept[:, None], 0, best)
    return best != 0, tl.cumsum(best, 1) - best, worst


@triton.jit(do_not_specialize=(*VARYING, *scoring.BLOCK, "r", "least"))
def recall_cells_kernel(
    cell_ptr, lse_ptr, starts_ptr, picked_ptr, floor_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, r, least, part, of,
    R: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, CELLS: tl.constexpr, PICKED: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Write picked and floor of `condense.ops.triton.recall_score.Scratch`: the cells with the best shares, as many as
    groups are wanted, in rising order, padded with CELLS; and the floor that `_best` takes among their groups.

    CELLS: cells of the index, and PICKED: r, both rounded up to powers of two. A program has BQ queries of one KV head.
    """
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = row_of_program(numbers, starts_ptr, K, KIND)
    i = first + tl.program_id(0) * BQ + tl.arange(0, BQ)
    closed = tl.where(i < stop, scoring.closed_groups(i, row, spans, G, KIND), 0)
    lines, head = (stop - first) * R, tl.program_id(1).to(tl.int64)
    query = tl.minimum(i, stop - 1) - first
    n, slot = tl.arange(0, CELLS)[None, :], tl.arange(0, PICKED)[None, :]
    valid = n * C < closed[:, None]
    # the mask is per line of cells, so that a line is loaded at once
    there = n // CELLS_PER_LINE * (CELLS_PER_LINE * C) < closed[:, None]
    at = query[:, None] * (R * CELLS_PER_LINE) + scoring.place_of_cell(n, lines)
    stretches = tl.cdiv(cells * C, STRETCH)
    share = _best_share(
        cell_ptr + head * cells * lines, at, CELLS_PER_LINE, lse_ptr + head * stretches * lines, query,
        (lines, stretches), there, valid, R,
    )  # [BQ, CELLS]  # fmt: skip
    query += head * (stop - first)
    wanted = wanted_groups(closed, r, least, part, of)
    picked, place, worst = _best(share, valid, wanted, _INT_MIN)
    # each picked cell holds a group at least as good as the worst picked cell's best one, so lower groups can be
    # skipped
    floor = tl.where(tl.cdiv(closed, C) > wanted, worst, _INT_MIN)
    tl.store(floor_ptr + query, floor, mask=i < stop)
    tl.store(picked_ptr + query[:, None] * PICKED + place, n + tl.zeros_like(place), mask=picked)
    unused = (slot >= tl.minimum(wanted, tl.cdiv(closed, C))[:, None]) & (i < stop)[:, None]
    tl.store(picked_ptr + query[:, None] * PICKED + slot, tl.full([BQ, PICKED], CELLS, tl.int32), mask=unused)


class _RowScores(namedtuple("_RowScores", "score lse query size closed")):
    """Scores of a KV head's queries. score, lse: pointers to scores of groups and to log-sum-exps. query: indices of
    the queries in the block. size: rows of the block, and stretches. closed: closed groups of each query.
    """


@triton.jit
def _all_cells(BQ: tl.constexpr, CELLS: tl.constexpr):
    """The first CELLS cells for each of BQ queries, int32 ``[BQ, CELLS]``."""
    return tl.zeros([BQ, 1], tl.int32) + tl.arange(0, CELLS)[None, :]


@triton.jit
def _open(scores, cell, wanted, floor, groups_at, R: tl.constexpr, C: tl.constexpr):
    """Write the best ``wanted`` groups of the cells ``cell`` ``[BQ, n]`` to ``groups_at``. floor: as in `_best`."""
    c, closed = tl.arange(0, C)[None, None, :], scores.closed
    N: tl.constexpr = cell.shape[1] * C
    group = cell[:, :, None] * C + c  # [BQ, n, C]
    valid = group < closed[:, None, None]
    # the mask is per cell, so that several scores are loaded at once
    there = (cell * C < closed[:, None])[:, :, None]  # [BQ, n, 1]
    at = (cell * scores.size[0] + scores.query[:, None] * R)[:, :, None] * C + c
    share = _best_share(scores.score, at, C, scores.lse, scores.query, scores.size, there, valid, R)  # [BQ, n, C]
    group, valid = tl.reshape(group, [cell.shape[0], N]), tl.reshape(valid, [cell.shape[0], N])
    is_open, place, _ = _best(tl.reshape(share, [cell.shape[0], N]), valid, wanted, floor)
    tl.store(groups_at + place, group, mask=is_open)


@triton.jit(do_not_specialize=(*VARYING, *scoring.BLOCK, "r", "least"))
def recall_groups_kernel(
    score_ptr, lse_ptr, picked_ptr, floor_ptr, starts_ptr, groups_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, r, least, part, of,
    R: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, PICKED: tl.constexpr, PLACES: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Write the groups that queries ``[first, stop)`` open in rising order, int32 ``[B * K, L, r]``, padded with G.

    picked, floor: results of `recall_cells_kernel`; None to rank all PICKED cells. PLACES: r rounded up to a power of
    two. A program has BQ queries of one KV head.
    """
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = row_of_program(numbers, starts_ptr, K, KIND)
    i = first + tl.program_id(0) * BQ + tl.arange(0, BQ)
    closed = tl.where(i < stop, scoring.closed_groups(i, row, spans, G, KIND), 0)
    lines, head = (stop - first) * R, tl.program_id(1).to(tl.int64)
    query = tl.minimum(i, stop - 1) - first
    line = head * (stop - first) + query
    place = tl.arange(0, PLACES)[None, :]
    wanted = wanted_groups(closed, r, least, part, of)
    groups_at = groups_ptr + ((tl.program_id(1).to(tl.int64) * L + i) * r)[:, None]
    unused = (place >= wanted[:, None]) & (place < r) & (i < stop)[:, None]
    tl.store(groups_at + place, tl.zeros([BQ, PLACES], tl.int32) + G, mask=unused)
    size = lines, tl.cdiv(cells * C, STRETCH)
    scores = _RowScores(score_ptr + head * cells * lines * C, lse_ptr + head * size[1] * lines, query, size, closed)
    if picked_ptr is not None:
        cell = tl.load(picked_ptr + line[:, None] * PICKED + tl.arange(0, PICKED)[None, :])  # [BQ, PICKED]
        _open(scores, cell, wanted, tl.load(floor_ptr + line), groups_at, R, C)
    else:
        # early queries have few closed groups: rank as few cells as hold them
        most = tl.cdiv(tl.max(closed, 0), C)
        if most <= PICKED // 4:
            _open(scores, _all_cells(BQ, PICKED // 4), wanted, _INT_MIN, groups_at, R, C)
        elif most <= PICKED // 2:
            _open(scores, _all_cells(BQ, PICKED // 2), wanted, _INT_MIN, groups_at, R, C)
        else:
            _open(scores, _all_cells(BQ, PICKED), wanted, _INT_MIN, groups_at, R, C)


@triton.jit(do_not_specialize=("L", "G", "first", "stop", "words", "r", "s_asked", "s_row"))
def recall_mark_kernel(
    groups_ptr, mark_ptr, asked_ptr, K, L, G, first, stop, words, r, s_asked, s_row,
    Q: tl.constexpr, PLACES: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Set bit ``i % Q`` in the word of every group that query i opens: words ``[B * K, T, words]``, 0 before.

    The atomic "or" of integers gives the same result in any order. A program has BQ queries of one KV head.
    asked: as in `condense.ops.triton.recall_choice.marked`. Queries of a tile that share a list of groups are adjacent:
    the first sets the bits of all of them, and each sets its own for its additional group. L: queries that have a list.
    """
    WORD: tl.constexpr = mark_ptr.dtype.element_ty
    BITS: tl.constexpr = WORD.primitive_bitwidth
    of_word: tl.constexpr = tl.uint32 if BITS == 32 else tl.uint64
    head, place = tl.program_id(1).to(tl.int64), tl.arange(0, PLACES)[None, :]
    i = tl.program_id(0) * BQ + tl.arange(0, BQ)
    there, count = i < stop - first, tl.full([BQ], 1, tl.int32)
    row = first + i
    mark_ptr += (head * tl.cdiv(stop - first, Q) + i // Q) * words
    if asked_ptr is not None:
        at = asked_ptr + head // K * s_row + row
        row = tl.load(at, mask=there, other=0)
        until, newer = tl.load(at + s_asked, mask=there, other=0), tl.load(at + 2 * s_asked, mask=there, other=-1)
        own = (tl.full([BQ], 1, of_word) << (i % Q).to(of_word)).to(WORD, bitcast=True)
        tl.atomic_or(mark_ptr + newer, own, mask=newer >= 0, sem="relaxed")
        count = tl.minimum(until - first, tl.minimum((i // Q + 1) * Q, stop - first)) - i
        there &= (i % Q == 0) | (row != tl.load(at - 1, mask=there & (i % Q > 0), other=-1))
    # [BQ, PLACES]
    group = tl.load(groups_ptr + ((head * L + row) * r)[:, None] + place, mask=there[:, None] & (place < r), other=G)
    # one set bit for each of ``count`` queries
    ones = tl.full([BQ], 2**BITS - 1, of_word) >> (BITS - count).to(of_word)
    bit = (ones << (i % Q).to(of_word)).to(WORD, bitcast=True)[:, None] + tl.zeros([BQ, PLACES], WORD)
    tl.atomic_or(mark_ptr[:, None] + group, bit, mask=group < G, sem="relaxed")


@triton.jit(do_not_specialize=("words", "room"))
def recall_list_kernel(mark_ptr, group_ptr, opens_ptr, count_ptr, words, room, BW: tl.constexpr):
    """Write the groups that any query of a tile opens, in rising order, int32 ``[B * K, T, room]``; the words of these
    groups, of the same shape; and their number, int32 ``[B * K, T]``.
    """
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    count = tl.full([], 0, tl.int32)
    for start in range(0, words, BW):
        n = start + tl.arange(0, BW)
        word = tl.load(mark_ptr + tile * words + n, mask=n < words, other=0)
        some = (word != 0).to(tl.int32)
        place = count + tl.cumsum(some, 0) - some
        tl.store(group_ptr + tile * room + place, n, mask=some != 0)
        tl.store(opens_ptr + tile * room + place, word, mask=some != 0)
        count += tl.sum(some, 0)
    tl.store(count_ptr + tile, count)
