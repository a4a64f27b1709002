"""Kernels that choose the groups that each query of a prompt opens, and sort the choice by query and by tile.

`recall_score_kernel`: index scores of a block of queries, by matrix products; the best of every C groups (a *cell*) and
the log-sum-exp of all. `recall_score_wide_kernel`: the same for keys as wide as latents. `recall_cells_kernel`: the
cells that hold every group which may be among the best r: those with the r best groups, as every cell has at least the
group that is its best. `recall_groups_kernel`: the best r groups of these cells. So 1 of M / (r * C) scores is read
again. `recall_mark_kernel` and `recall_list_kernel` turn choices round: which queries of a tile open a group, and which
groups any query of a tile opens.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries of which a block has n, G groups of g
tokens, m blocks per group, F index rows per group, D width, P columns of the tile that holds it, r groups that a query
opens. T tiles of Q queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.parts import parts
from condense.ops.triton.device.records import Row, Rule, Spans, Start
from condense.ops.triton.device.rule import start_of_row, tile_rows, visible

_INT_MIN, _INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
# numbers that differ from block to block of queries, and would compile a new kernel each
BLOCK = ("G", "first", "stop", "cells")

# rows of words have room for a multiple of so many: a block of keys whose words are read at once
WORDS = tl.constexpr(64)

# cells whose best scores a row has side by side: 16 bytes
CHUNK = tl.constexpr(4)


@triton.jit
def _place(cell, lines):
    """Where row 0 of ``lines`` rows has the best scores of cells."""
    return cell // CHUNK * lines * CHUNK + cell % CHUNK


@triton.jit
def row_of_words(words):
    """Room of a row of ``words`` words: those at its end are 0."""
    return (words + WORDS - 1) // WORDS * WORDS


@triton.jit
def _closed(i, row, spans, G, KIND: tl.constexpr):
    """Groups that are closed for queries i, of those that the index has."""
    return tl.minimum(visible(0, i, row, spans, KIND)[1], G).to(tl.int32)


@triton.jit
def _load_queries(q_ptr, at, real, D: tl.constexpr, P: tl.constexpr):
    d = tl.arange(0, P)
    return tl.load(q_ptr + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)


class _Index(NamedTuple):
    """The index of one KV head: its rows, as `recall_score_kernel` has them, batch row and first head of these; its
    groups' steps and zeros.
    """

    rows: Any
    b: Any
    head: Any
    grid: Any


class _Wide(NamedTuple):
    """Queries of a tile by descriptor, with the batch row times KV heads and the first row to read."""

    rows: Any
    head: Any
    line: Any


class _Scored(NamedTuple):
    """Queries of a tile: those that meet the rows of the index (of bounds: the negative and the positive part), or
    `_Wide`; the sum of each, their scale, where they write their scores and cells' best scores, and rows of a cell in
    memory.
    """

    q: Any
    sum_q: Any
    scale: Any
    score: Any
    cell: Any
    real: Any
    lines: Any


@triton.jit
def _index_products(q, index, at, PRECISION: tl.constexpr):
    """Products of a tile of queries with the rows of the index from ``at`` on; of bounds, the sum of both."""
    x = index.rows.load([index.b, index.head, at, 0])
    s = tl.dot(q[0], tl.trans(x.reshape(x.shape[2], x.shape[3])), input_precision=PRECISION)
    if len(q) == 2:
        x = index.rows.load([index.b, index.head + 1, at, 0])
        s = tl.dot(q[1], tl.trans(x.reshape(x.shape[2], x.shape[3])), s, input_precision=PRECISION)
    return s


@triton.jit
def _wide_products(q, index, at, STEPS: tl.constexpr, BOUNDS: tl.constexpr, PRECISION: tl.constexpr):
    """The same for keys of any width in so many steps, each of as many columns as the descriptors read."""
    BM: tl.constexpr = q.rows.block_shape[2]
    BN: tl.constexpr = index.rows.block_shape[2]
    BK: tl.constexpr = q.rows.block_shape[3]
    s = tl.zeros([BM, BN], tl.float32)
    for step in range(STEPS * (2 if BOUNDS else 1)):
        part, d = step // STEPS, step % STEPS * BK
        x = q.rows.load([q.head, part, q.line, d]).reshape(BM, BK)
        y = index.rows.load([index.b, index.head + part, at, d]).reshape(BN, BK)
        s = tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    return s


@triton.jit
def _score_groups(
    queries, index, lse, stretch, closed, m: tl.constexpr, MP: tl.constexpr, BG: tl.constexpr, C: tl.constexpr,
    BOUNDS: tl.constexpr, GRID: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and writes the groups of a stretch ``[lo, hi)``, and adds them to lse: the largest score of each row and
    the sum of ``2 ** (score - largest)``. STEPS: of `_wide_products`, 0 for queries in registers. MASKED: a row's
    closed groups may end among them.
    """
    top, total = lse
    lo, hi = stretch
    BM: tl.constexpr = closed.shape[0]
    BC: tl.constexpr = BG // C
    for group in range(lo, hi, BG):
        cell, c = group // C + tl.arange(0, BC), tl.arange(0, C)
        if STEPS > 0:
            s = _wide_products(queries.q, index, group * MP, STEPS, BOUNDS, PRECISION)
        else:
            s = _index_products(queries.q, index, group * MP, PRECISION)
        s = tl.permute(tl.reshape(s, [BM, BC, 2, MP, C // 4, 2]), [0, 1, 4, 2, 5, 3])
        s = tl.reshape(s, [BM, BC, C, MP])
        if BOUNDS:
            # step > 0 and zero are the group's, so that the best block is known before them
            s = tl.max(s, 3)
            if GRID:
                at = index.grid + cell[:, None] * (2 * C) + c[None, :]
                s = s * tl.load(at)[None] + queries.sum_q[:, None, None] * tl.load(at + C)[None]
            else:
                s = s * queries.scale
        else:
            if GRID:
                at = index.grid + cell[:, None] * (2 * C) + c[None, :]
                s = s * tl.load(at)[None, :, :, None]
                s += (queries.sum_q[:, None, None] * tl.load(at + C)[None])[:, :, :, None]
            else:
                s = s * queries.scale
            s = tl.where(tl.arange(0, MP)[None, None, None, :] < m, s, float("-inf"))
            largest = tl.max(s, 3)
            s = largest + tl.log2(tl.sum(tl.exp2(s - largest[:, :, :, None]), 3))
        if MASKED:
            n = cell[:, None] * C + c[None, :]
            s = tl.where(n[None] < closed[:, None, None], s, float("-inf"))
        of_cells = tl.max(s, 2)
        tl.store(queries.cell[:, None] + _place(cell, queries.lines)[None, :], of_cells, mask=queries.real[:, None])
        at = (cell * queries.lines)[:, None] * C + c[None, :]
        tl.store(queries.score[:, None, None] + at[None], s, mask=queries.real[:, None, None])
        larger = tl.maximum(top, tl.max(of_cells, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
        total = total * tl.exp2(top - safe) + tl.sum(tl.sum(tl.exp2(s - safe[:, None, None]), 2), 1)
        top = larger
    return top, total


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_score_kernel(
    q_ptr, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    s_q, K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, prompt_entries, scale,
    R: tl.constexpr, m: tl.constexpr, MP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BOUNDS: tl.constexpr,
    GRID: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Of queries ``[first, stop)``: scores float32 ``[B * K, cells, n * R, C]`` of closed groups, base 2; the best of
    every cell ``[B * K, cells / 4, n * R, 4]``; the log-sum-exp ``[B * K, n * R]``.

    rows: the index in the dtype of q, a descriptor: of bounds ``[B, K * 2, cells * C * MP, D]``, first the lowest and
    then the highest keys, else ``[B, K, cells * C * MP, D]``; MP: m as a power of two; the rows of a cell as
    ``[2, MP, C / 4, 2]``, block p of group 4 i + 2 j + k at ``[j, p, i, k]``, so that a thread, which has every other
    pair of columns of a product, has groups side by side. A quantised index holds its codes, and grid float32
    ``[B, K, cells, 2, C]`` (not read unless GRID) their step and zero, both times the scale: ``q . (zero + step *
    code)`` is ``zero * sum(q) + step * (q . code)``.
    Scores of tiles of groups beyond the last closed one of a tile of queries are not written.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, prompt_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    spans = Spans(rule, start_of_row(b, start, starts_ptr, KIND), 0, 0)
    # the last queries see the most groups and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(first + tile * (BM // R), stop, R, BM)
    closed = _closed(i, row, spans, G, KIND)
    q = _load_queries(q_ptr, b * s_q[0] + (kvh * R + r) * s_q[1] + i.to(tl.int64) * s_q[2], real, D, P)
    sum_q = tl.sum(q.to(tl.float32), 1)
    lines, line = (stop - first) * R, (i - first) * R + r
    of_head = tl.program_id(1).to(tl.int64) * cells * lines
    index = _Index(rows, row.b, row.head * (2 if BOUNDS else 1), grid_ptr + (b * K + kvh) * cells * 2 * C)
    negative, positive = tl.where(q < 0, q, tl.zeros_like(q)), tl.where(q > 0, q, tl.zeros_like(q))
    queries = _Scored(
        parts(negative if BOUNDS else q, positive if BOUNDS else None), sum_q, scale, score_ptr + (of_head + line) * C,
        cell_ptr + of_head + line * CHUNK, real, lines,
    )  # fmt: skip
    lse = (tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32))
    whole = tl.min(closed) // BG * BG
    lse = _score_groups(queries, index, lse, (0, whole), closed, m, MP, BG, C, BOUNDS, GRID, 0, False, PRECISION)
    lse = _score_groups(
        queries, index, lse, (whole, tl.max(closed)), closed, m, MP, BG, C, BOUNDS, GRID, 0, True, PRECISION
    )
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * lines + line, _log_of_sum(lse), mask=real)


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_score_wide_kernel(
    sum_q_ptr, q, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, prompt_entries, scale,
    R: tl.constexpr, m: tl.constexpr, MP: tl.constexpr, STEPS: tl.constexpr, BOUNDS: tl.constexpr,
    GRID: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """As `recall_score_kernel`, for keys of any width, whose queries do not stay in registers.

    q: a descriptor: of bounds ``[B * K, 2, n * R, D]``, the negative and the positive part, else ``[B * K, 1, n * R,
    D]``; sum_q float32 ``[B * K, n * R]``. Both descriptors read as many columns at a time.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, prompt_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    spans = Spans(rule, start_of_row(row.b.to(tl.int64), start, starts_ptr, KIND), 0, 0)
    # the last queries see the most groups and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    lines, line = (stop - first) * R, tile * BM + tl.arange(0, BM)
    real = line < lines
    line = tl.minimum(line, lines - 1)
    closed = _closed(first + line // R, row, spans, G, KIND)
    of_head = tl.program_id(1).to(tl.int64) * lines
    sum_q = tl.load(sum_q_ptr + of_head + line)
    index = _Index(
        rows, row.b, row.head * (2 if BOUNDS else 1), grid_ptr + tl.program_id(1).to(tl.int64) * cells * 2 * C
    )
    queries = _Scored(
        _Wide(q, tl.program_id(1), tile * BM), sum_q, scale, score_ptr + (of_head * cells + line) * C,
        cell_ptr + of_head * cells + line * CHUNK, real, lines,
    )  # fmt: skip
    lse = (tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32))
    whole = tl.min(closed) // BG * BG
    lse = _score_groups(queries, index, lse, (0, whole), closed, m, MP, BG, C, BOUNDS, GRID, STEPS, False, PRECISION)
    lse = _score_groups(
        queries, index, lse, (whole, tl.max(closed)), closed, m, MP, BG, C, BOUNDS, GRID, STEPS, True, PRECISION
    )
    tl.store(lse_ptr + of_head + line, _log_of_sum(lse), mask=real)


@triton.jit
def _log_of_sum(lse):
    """The log-sum-exp, base 2, of the largest score and the sum relative to it; 0 where no group is closed."""
    some = lse[1] > 0
    return tl.where(some, lse[0], 0.0) + tl.log2(tl.where(some, lse[1], 1.0))


@triton.jit
def _best_share(score_ptr, at, step, lse_ptr, query, there, valid, R: tl.constexpr):
    """The largest of the query heads' shares of groups or cells ``[BQ, ...]``, in log space; -inf where not valid.

    Head r's score stands at ``at + r * step``, and is read if it is there; query: of the tile's queries, their place
    in the log-sum-exps.
    """
    share = tl.full(valid.shape, float("-inf"), tl.float32)
    for r in tl.static_range(R):
        score = tl.load(score_ptr + at + r * step, mask=there, other=float("-inf"))
        if R > 1:
            lse = tl.load(lse_ptr + query * R + r)
            score -= tl.reshape(lse, [valid.shape[0]] + [1] * (len(valid.shape) - 1))
        share = tl.maximum(share, score)
    return tl.where(valid, share, float("-inf"))


@triton.jit
def wanted_groups(closed, most, part, of):
    """How many of the ``closed`` groups a query opens: the numbers of `condense.ops.recall.choice.Quota`."""
    return tl.minimum((closed.to(tl.int64) * part + (of - 1)) // of, most).to(tl.int32)


@triton.jit
def _best(share, valid, wanted, floor):
    """Which of each row of ``[BQ, N]`` are among the best ``wanted`` ``[BQ]`` of the valid, ties to the first; their
    places in order; and the key of the worst of them. A row without that many has all of its valid ones. floor: a key
    that at least ``wanted`` of a row reach, where it has that many.
    """
    # floats as integers in the same order: of negative ones, all bits but the sign are flipped
    bits = share.to(tl.int32, bitcast=True)
    key = tl.where(valid, bits ^ ((bits >> 31) & _INT_MAX), _INT_MIN)
    lo = tl.maximum(tl.min(tl.where(valid, key, _INT_MAX), 1), floor).to(tl.int64)
    # rows with fewer, which keep all, need no search
    hi = tl.where(tl.sum(valid.to(tl.int32), 1) > wanted, tl.max(key, 1).to(tl.int64) + 1, lo)
    # at least ``wanted`` keys reach lo, fewer reach hi
    while tl.max(hi - lo, 0) > 1:
        middle = lo + (hi - lo) // 2
        reach = tl.sum((key >= middle.to(tl.int32)[:, None]).to(tl.int32), 1)
        lo = tl.where(reach >= wanted, middle, lo)
        # exactly ``wanted`` keys reach it: the search ends
        hi = tl.where(reach > wanted, hi, tl.where(reach == wanted, middle + 1, middle))
    worst = lo.to(tl.int32)
    best = (valid & (key >= worst[:, None])).to(tl.int32)
    excess = tl.maximum(tl.sum(best, 1) - wanted, 0)
    if tl.max(excess, 0) > 0:  # of those that tie with the worst, the first
        tied = (valid & (key == worst[:, None])).to(tl.int32)
        kept = tl.sum(tied, 1) - excess
        best = tl.where(tl.cumsum(tied, 1) * tied > kept[:, None], 0, best)
    return best != 0, tl.cumsum(best, 1) - best, worst


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_cells_kernel(
    cell_ptr, lse_ptr, starts_ptr, picked_ptr, floor_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, prompt_entries, r, part, of,
    R: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, CELLS: tl.constexpr, PICKED: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The cells with the best shares in rising order, as many as groups are wanted, int32 ``[B * K, n, PICKED]``; CELLS
    where there are fewer. And the floor for `_best` among their groups, int32 ``[B * K, n]``.

    CELLS and PICKED are powers of two. A program has BQ queries of one KV head.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, prompt_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    spans = Spans(rule, start_of_row(row.b.to(tl.int64), start, starts_ptr, KIND), 0, 0)
    i = first + tl.program_id(0) * BQ + tl.arange(0, BQ)
    closed = tl.where(i < stop, _closed(i, row, spans, G, KIND), 0)
    lines, head = (stop - first) * R, tl.program_id(1).to(tl.int64)
    query = tl.minimum(i, stop - 1) - first
    n, slot = tl.arange(0, CELLS)[None, :], tl.arange(0, PICKED)[None, :]
    valid = n * C < closed[:, None]
    # whole chunks are read at once
    there = n // CHUNK * (CHUNK * C) < closed[:, None]
    at = query[:, None] * (R * CHUNK) + _place(n, lines)
    share = _best_share(cell_ptr + head * cells * lines, at, CHUNK, lse_ptr + head * lines, query, there, valid, R)
    query += head * (stop - first)
    wanted = wanted_groups(closed, r, part, of)
    picked, place, worst = _best(share, valid, wanted, _INT_MIN)
    # as many cells have a group that is as good as the best of the worst of them
    floor = tl.where(tl.cdiv(closed, C) > wanted, worst, _INT_MIN)
    tl.store(floor_ptr + query, floor, mask=i < stop)
    tl.store(picked_ptr + query[:, None] * PICKED + place, n + tl.zeros_like(place), mask=picked)
    unused = (slot >= tl.minimum(wanted, tl.cdiv(closed, C))[:, None]) & (i < stop)[:, None]
    tl.store(picked_ptr + query[:, None] * PICKED + slot, tl.full([BQ, PICKED], CELLS, tl.int32), mask=unused)


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_groups_kernel(
    score_ptr, lse_ptr, picked_ptr, floor_ptr, starts_ptr, groups_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, prompt_entries, r, part, of,
    R: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr, PICKED: tl.constexpr, PLACES: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The open groups of queries ``[first, stop)`` in rising order, int32 ``[B * K, L, r]``; G where there are fewer.

    PLACES: r as a power of two. A program has BQ queries of one KV head.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, prompt_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    spans = Spans(rule, start_of_row(row.b.to(tl.int64), start, starts_ptr, KIND), 0, 0)
    i = first + tl.program_id(0) * BQ + tl.arange(0, BQ)
    closed = tl.where(i < stop, _closed(i, row, spans, G, KIND), 0)
    lines, head = (stop - first) * R, tl.program_id(1).to(tl.int64)
    query = tl.minimum(i, stop - 1) - first
    line = head * (stop - first) + query
    c, place = tl.arange(0, C)[None, None, :], tl.arange(0, PLACES)[None, :]
    cell = tl.load(picked_ptr + line[:, None] * PICKED + tl.arange(0, PICKED)[None, :])
    group = cell[:, :, None] * C + c
    valid = group < closed[:, None, None]
    # whole cells are there, so that several scores are loaded at once
    there = (cell * C < closed[:, None])[:, :, None]
    at = (cell * lines + query[:, None] * R)[:, :, None] * C + c
    share = _best_share(score_ptr + head * cells * lines * C, at, C, lse_ptr + head * lines, query, there, valid, R)
    group, valid = tl.reshape(group, [BQ, PICKED * C]), tl.reshape(valid, [BQ, PICKED * C])
    wanted = wanted_groups(closed, r, part, of)
    is_open, at, _ = _best(tl.reshape(share, [BQ, PICKED * C]), valid, wanted, tl.load(floor_ptr + line))
    groups_at = groups_ptr + ((tl.program_id(1).to(tl.int64) * L + i) * r)[:, None]
    tl.store(groups_at + at, group, mask=is_open)
    unused = (place >= wanted[:, None]) & (place < r) & (i < stop)[:, None]
    tl.store(groups_at + place, tl.zeros([BQ, PLACES], tl.int32) + G, mask=unused)


@triton.jit(do_not_specialize=("L", "G", "first", "stop", "words"))
def recall_mark_kernel(
    groups_ptr, mark_ptr, L, G, first, stop, words, r, Q: tl.constexpr, PLACES: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Sets bit ``i % Q`` of word ``[B * K, T, words]`` for every group that query i opens; all were 0 before.

    An "or" of integers gives the same in any order. A program has BQ queries of one KV head.
    """
    head, place = tl.program_id(1).to(tl.int64), tl.arange(0, PLACES)[None, :]
    i = tl.program_id(0) * BQ + tl.arange(0, BQ)
    there = (i < stop - first)[:, None] & (place < r)
    group = tl.load(groups_ptr + ((head * L + first + i) * r)[:, None] + place, mask=there, other=G)
    bit = tl.full([BQ, PLACES], 1, mark_ptr.dtype.element_ty) << (i % Q)[:, None]
    tile = head * tl.cdiv(stop - first, Q) + i // Q
    tl.atomic_or(mark_ptr + tile[:, None] * row_of_words(words) + group, bit, mask=group < G, sem="relaxed")


@triton.jit(do_not_specialize=("words", "room"))
def recall_list_kernel(mark_ptr, group_ptr, opens_ptr, count_ptr, words, room, BW: tl.constexpr):
    """The groups of a tile that any of its queries opens, in rising order, with their words: int32 and as marked,
    ``[B * K, T, room]``; and how many these are, int32 ``[B * K, T]``.
    """
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    count = tl.full([], 0, tl.int32)
    for start in range(0, words, BW):
        n = start + tl.arange(0, BW)
        word = tl.load(mark_ptr + tile * row_of_words(words) + n, mask=n < words, other=0)
        some = (word != 0).to(tl.int32)
        place = count + tl.cumsum(some, 0) - some
        tl.store(group_ptr + tile * room + place, n, mask=some != 0)
        tl.store(opens_ptr + tile * room + place, word, mask=some != 0)
        count += tl.sum(some, 0)
    tl.store(count_ptr + tile, count)
