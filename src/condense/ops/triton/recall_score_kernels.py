"""Kernels that score the index for a block of queries of a prompt, and weigh the groups that these do not open.

`recall_rotate_kernel` rotates queries and rounds them to int8, `recall_spread_kernel` expands the index's sign bits to
int8. `recall_score_kernel` computes scores by exact int8 matrix products, the best score of every *cell* (C adjacent
groups), and the log-sum-exp of the scores of each stretch of groups. By these
`condense.ops.triton.recall_choice_kernels` chooses groups. `recall_rest_kernel` weighs the closed groups that queries
do not open, by their centres; `recall_join_kernel` adds these groups to attention, as one token.

Shapes: B rows of the batch, H query heads, K KV heads, R query heads per KV head, L queries of which a block has n, G
groups of g tokens, T tiles of Q queries, D and Dv widths.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.triton.device.rule import VARYING, program_rows, row_of_program, visible
from condense.ops.triton.device.signs import TINY, floats_of, rotated_columns, unit_of, whole_numbers
from condense.ops.triton.device.softmax import soft_cap

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("G", "first", "stop", "cells")

# cells whose best scores are adjacent in memory for each row: 16 bytes
CELLS_PER_LINE = tl.constexpr(4)
# groups that a program scores, so that few queries fill a GPU too. The same in all calls, because sums depend on it
STRETCH = tl.constexpr(512)


class ScoreForm(namedtuple("ScoreForm", "GP BG C BM P parts best")):
    """The constants of an index and of its tiles.

    GP: tokens per group, g, rounded up to a power of two. BG: groups per tile. C: groups per cell. BM: rows per tile.
    P: columns read at a time. parts: times that P columns are read per row; with one part, a program reads its queries
    once. best: whether to write the best score of every cell.
    """


@triton.jit
def place_of_cell(cell, lines):
    """Offset of a cell's best score for row 0. lines: rows of the block of queries, n * R."""
    return cell // CELLS_PER_LINE * lines * CELLS_PER_LINE + cell % CELLS_PER_LINE


@triton.jit
def closed_groups(i, row, spans, G, KIND: tl.constexpr):
    """Number of groups that are closed for each of queries i, at most the G of the index."""
    return tl.minimum(visible(0, i, row, spans, KIND)[1], G).to(tl.int32)


@triton.jit
def _rotated(q_ptr, at, real, rotation_ptr, LO: tl.constexpr, D: tl.constexpr):
    """Rotated columns ``[LO, LO + rotated_columns(D))`` of the queries at ``q_ptr + at``, float32; 0 past the last.

    The rotation, in the dtype of the queries or float32, holds 1 and -1: products are exact, sums are in float32.
    """
    d = LO + tl.arange(0, rotated_columns(D))
    there = d < D
    x = tl.load(q_ptr + at[:, None] + d[None, :], mask=real[:, None] & there[None, :], other=0.0)
    matrix = tl.load(rotation_ptr + d[:, None] * D + d[None, :], mask=there[:, None] & there[None, :], other=0.0)
    return tl.dot(x.to(matrix.dtype), matrix, input_precision="ieee")  # [BM, columns]


@triton.jit(do_not_specialize=("n",))
def recall_rotate_kernel(
    q_ptr, rotation_ptr, number_ptr, unit_ptr, s_q, K, n, width, scale,
    R: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rotate queries and round them as `condense.ops.recall.rotated_queries` does: write the first D columns of int8
    ``[B * K, n * R, width]``, and their quantization scales times ``scale``, float32 ``[B * K, n * R]``.

    Grid (tiles of BM rows, B * K). Rows of a query's R heads are adjacent. rotation: as in `_rotated`. scale > 0.
    """
    head, line = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    real = line < n * R
    s_b, s_h, s_l = s_q
    q_ptr += head // K * s_b
    at = (head % K * R + line % R) * s_h + (line // R).to(tl.int64) * s_l
    N: tl.constexpr = rotated_columns(D)
    x = _rotated(q_ptr, at, real, rotation_ptr, 0, D)
    largest = tl.max(tl.abs(x), 1)
    for lo in tl.static_range(N, D, N):
        largest = tl.maximum(largest, tl.max(tl.abs(_rotated(q_ptr, at, real, rotation_ptr, lo, D)), 1))
    unit = unit_of(largest)
    line = head * (n * R) + line
    tl.store(unit_ptr + line, unit * scale, mask=real)
    for lo in tl.static_range(0, D, N):
        d = lo + tl.arange(0, N)
        if lo > 0:
            x = _rotated(q_ptr, at, real, rotation_ptr, lo, D)
        numbers = whole_numbers(x, unit[:, None])  # [BM, N]
        at_numbers = number_ptr + line[:, None] * width + d[None, :]
        tl.store(at_numbers, numbers.to(tl.int8), mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=("G",))
def recall_spread_kernel(
    sign_ptr, step_ptr, token_ptr, of_token_ptr, centre_ptr, of_centre_ptr, s_sign, s_step, K, G, width,
    g: tl.constexpr, GP: tl.constexpr, C: tl.constexpr, D: tl.constexpr, W4: tl.constexpr,
):  # fmt: skip
    """Expand an index to a `condense.ops.triton.recall_score.CellIndex`, whose rows are ``width`` bytes apart.

    Grid (cells of C groups, B * K). sign, step: the fields of a `condense.ops.recall.index.GroupIndex`. GP: g rounded
    up to a power of two, 0 to write centres alone. W4: bytes of a centre rounded up to a power of two.
    """
    W: tl.constexpr = (D + 7) // 8
    head, line = tl.program_id(1).to(tl.int64), tl.program_id(0) * C + tl.arange(0, C)
    there = (line < G)[:, None]
    sign_ptr += head // K * s_sign[0] + head % K * s_sign[1]
    step_ptr += head // K * s_step[0] + head % K * s_step[1]
    first, half = head * tl.num_programs(0) * C, tl.arange(0, W4)[None, :]
    at = sign_ptr + (line.to(tl.int64) * s_sign[2] + g * W)[:, None] + half
    codes = tl.load(at, mask=there & (half < 4 * W), other=0)  # [C, 4 * W]
    to = centre_ptr + (first + line)[:, None] * width + half
    for high in tl.static_range(2):
        number = tl.where(there, ((codes >> (4 * high)) & 15).to(tl.int8) * 2 - 15, 0)
        tl.store(to + high * (4 * W), number, mask=(half < 4 * W) & (high * (4 * W) + half < D))
    step = tl.load(step_ptr + line.to(tl.int64) * s_step[2] + g, mask=line < G, other=0.0)
    tl.store(of_centre_ptr + first + line, step.to(tl.float32))
    if GP > 0:
        n, w = tl.arange(0, GP * C), tl.arange(0, W4 // 4)[None, :]
        token, group = tl.minimum(n // C, g - 1), tl.program_id(0) * C + n % C
        there, at = (group < G)[:, None], (first + tl.program_id(0) * C) * GP + n
        at_signs = sign_ptr + (group.to(tl.int64) * s_sign[2] + token * W)[:, None] + w
        byte = tl.load(at_signs, mask=there & (w < W), other=0)  # [GP * C, W]
        token_ptr += at[:, None] * width + w
        for i in tl.static_range(8):
            number = tl.where(there, ((byte >> i) & 1).to(tl.int8) * 2 - 1, 0)
            tl.store(token_ptr + i * W, number, mask=(w < W) & (i * W + w < D))
        step = tl.load(step_ptr + group.to(tl.int64) * s_step[2] + token, mask=group < G, other=0.0)
        tl.store(of_token_ptr + at, step.to(tl.float32))


class _TileRows(
    namedtuple("_TileRows", "q signs head line steps centres of_centres s_centre unit closed real score cell lines")
):
    """A tile of queries, and the index that it is multiplied with.

    q: the queries, or their descriptor if they are read in parts. signs: descriptor. head: index of a KV head in both.
    line: first row of the tile in the descriptor of queries. steps, centres, of_centres: pointers to the head's part of
    a `CellIndex`. s_centre: stride of centres. Per row: unit, its quantization scale; closed, its closed groups; real,
    whether it counts; score and cell, pointers to its results. lines: rows of the block of queries.
    """


@triton.jit
def _products(tile, token, FORM: tl.constexpr):
    """Products of a tile of queries with the signs of ``BG * GP`` tokens from ``token`` on, int32 ``[BM, BG * GP]``."""
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BG * FORM.GP
    P: tl.constexpr = FORM.P
    if FORM.parts == 1:
        return tl.dot(tile.q, tl.trans(tile.signs.load([tile.head, token, 0]).reshape(BN, P)))  # [BM, BN]
    else:
        s = tl.zeros([BM, BN], tl.int32)
        for part in range(FORM.parts):
            q = tile.q.load([tile.head, tile.line, part * P]).reshape(BM, P)
            s = tl.dot(q, tl.trans(tile.signs.load([tile.head, token, part * P]).reshape(BN, P)), s, out_dtype=tl.int32)
        return s


@triton.jit
def _centre_products(tile, at, D: tl.constexpr, FORM: tl.constexpr):
    """Products of a `_TileRows` or `_RestRows` with the centres at pointers ``at`` ``[n, 1]``, int32 ``[BM, n]``."""
    BM: tl.constexpr = FORM.BM
    P: tl.constexpr = FORM.P
    PARTS: tl.constexpr = FORM.parts
    s = tl.zeros([BM, at.shape[0]], tl.int32)
    for part in tl.static_range(PARTS):
        d = part * P + tl.arange(0, P)[None, :]
        q = tile.q if PARTS == 1 else tile.q.load([tile.head, tile.line, part * P]).reshape(BM, P)
        s = tl.dot(q, tl.trans(tl.load(at + d, mask=d < D, other=0)), s, out_dtype=tl.int32)
    return s


@triton.jit
def _of_centres(tile, group, FORM: tl.constexpr, D: tl.constexpr):
    """Products of a tile of queries with the centres of ``BG`` groups from ``group`` on, ``[BM, BG / C, C]``."""
    C: tl.constexpr = FORM.C
    # a tile with fewer than 16 groups repeats their centres, because tensor cores take at least 16 columns
    N: tl.constexpr = max(1, 16 // FORM.BG)
    n = tl.arange(0, FORM.BG * N)
    row = (group + n // (C * N) * C + n % C).to(tl.int64)
    at = tile.centres + row[:, None] * tile.s_centre  # [BG * N, 1]
    s = _centre_products(tile, at, D, FORM)
    return tl.max(tl.reshape(s, [FORM.BM, FORM.BG // C, N, C]), 2)


@triton.jit
def _score_groups(tile, lse, stretch, D: tl.constexpr, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Score the groups ``[lo, hi)`` of a stretch, write the scores, and return lse with them.

    lse: for each row and place in a tile the largest score, and the sum of ``2 ** (score - largest)``. MASKED: some of
    these groups may not be closed for some row.
    """
    top, total = lse
    lo, hi = stretch
    GP: tl.constexpr = FORM.GP
    BG: tl.constexpr = FORM.BG
    C: tl.constexpr = FORM.C
    BC: tl.constexpr = BG // C
    steps_at = tile.steps + tl.arange(0, BG * GP)
    # clamped, because an empty stretch may begin past the last steps
    next_steps = tl.load(steps_at + tl.maximum(tl.minimum(lo, hi - 1), 0) // BG * BG * GP)  # [BG * GP]
    for group in range(lo, hi, BG):
        cell, c = group // C + tl.arange(0, BC), tl.arange(0, C)
        steps = next_steps
        # loaded one tile ahead, because a load takes long; the steps of the last tile are loaded twice
        next_steps = tl.load(steps_at + tl.minimum(group + BG, hi - 1) // BG * BG * GP)
        # in the order of `condense.ops.recall.choice.index_scores`, which multiplies by the query's scale last
        s = floats_of(_products(tile, group * GP, FORM)) * steps[None, :]  # [BM, BG * GP]
        n = cell[:, None] * C + c[None, :]  # [BC, C]
        of_centres = floats_of(_of_centres(tile, group, FORM, D)) * tl.load(tile.of_centres + n)[None]
        s = (tl.max(tl.reshape(s, [FORM.BM, BC, GP, C]), 2) + of_centres) * tile.unit[:, None, None]  # [BM, BC, C]
        if MASKED:
            s = tl.where(n[None] < tile.closed[:, None, None], s, float("-inf"))
        if FORM.best:
            of_cells = tl.max(s, 2)  # [BM, BC]
            tl.store(tile.cell[:, None] + place_of_cell(cell, tile.lines)[None, :], of_cells, mask=tile.real[:, None])
        at = (cell * tile.lines)[:, None] * C + c[None, :]
        tl.store(tile.score[:, None, None] + at[None], s, mask=tile.real[:, None, None])
        # maxima and sums are kept per place in a tile, because a reduction over threads would make them wait
        s = tl.reshape(s, [FORM.BM, top.shape[1], BG // top.shape[1]])
        larger = tl.maximum(top, tl.max(s, 2))  # [BM, places]
        safe = tl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, :, None]), 2)
        top = larger
    return top, total


@triton.jit
def log_of_sum(top, total):
    """Log-sum-exp of each row, base 2, from largest scores and sums of ``2 ** (score - largest)``; 0 for sums of 0."""
    largest = tl.max(top, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(total * tl.exp2(top - largest[:, None]), 1)
    return largest + tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_score_kernel(
    unit_ptr, q, signs, steps_ptr, centres_ptr, of_centres_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    s_centre, K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries,
    R: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write score, cell and lse of `condense.ops.triton.recall_score.Scratch` for queries ``[first, stop)``, base 2.

    Grid (tiles of BM rows, B * K, stretches). Tiles of groups behind the last closed group of a tile of queries are not
    written.

    unit, q: results of `recall_rotate_kernel`, q as a descriptor. signs (a descriptor), steps, centres, of_centres: the
    fields of a `condense.ops.triton.recall_score.CellIndex`; rows of centres are s_centre apart.
    """
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = row_of_program(numbers, starts_ptr, K, KIND)
    C: tl.constexpr = FORM.C
    BM: tl.constexpr = FORM.BM
    # the last queries see the most groups and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    size, line = (stop - first) * R, tile * BM + tl.arange(0, BM)
    real = line < size
    line = tl.minimum(line, size - 1)
    closed = closed_groups(first + line // R, row, spans, G, KIND)
    head = tl.program_id(1).to(tl.int64)
    of_head = head * size
    held = q if FORM.parts > 1 else q.load([tl.program_id(1), tile * BM, 0]).reshape(BM, FORM.P)
    queries = _TileRows(
        held, signs, tl.program_id(1), tile * BM, steps_ptr + head * cells * (FORM.GP * C),
        centres_ptr + head * cells * C * s_centre, of_centres_ptr + head * cells * C, s_centre,
        tl.load(unit_ptr + of_head + line), closed, real, score_ptr + (of_head * cells + line) * C,
        cell_ptr + of_head * cells + line * CELLS_PER_LINE, size,
    )  # fmt: skip
    # a place is a pair of adjacent groups, which one thread holds
    PLACES: tl.constexpr = max(1, FORM.BG // 2)
    lse = (tl.full([BM, PLACES], float("-inf"), tl.float32), tl.zeros([BM, PLACES], tl.float32))
    lo, part = tl.program_id(2) * STRETCH, (head * tl.num_programs(2) + tl.program_id(2)) * size + line
    hi = tl.minimum(tl.max(closed), lo + STRETCH)
    whole = tl.maximum(tl.minimum(tl.min(closed) // FORM.BG * FORM.BG, hi), lo)
    lse = _score_groups(queries, lse, (lo, whole), D, FORM, False)
    lse = _score_groups(queries, lse, (whole, hi), D, FORM, True)
    is_empty = tl.max(lse[0], 1) == float("-inf")
    tl.store(lse_ptr + part, tl.where(is_empty, float("-inf"), log_of_sum(lse[0], lse[1])), mask=real)


@triton.jit
def joined_lse(lse_ptr, at, lines, stretches):
    """Join the base-2 log-sum-exps of all stretches, ``lines`` numbers apart from ``at`` on; 0 if nothing is closed."""
    top = tl.load(lse_ptr + at)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    for n in range(1, stretches):
        of_stretch = tl.load(lse_ptr + n * lines + at)
        larger = tl.maximum(top, of_stretch)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(top - safe) + tl.exp2(of_stretch - safe)
        top = larger
    return tl.where(top == float("-inf"), 0.0, top) + tl.log2(tl.where(total > 0, total, 1.0))


class RestForm(namedtuple("RestForm", "BM BN P parts")):
    """The constants of a tile: BM rows, BN groups, P columns that are read at a time, parts of P columns per row."""


class _RestRows(namedtuple("_RestRows", "q head line centres of_centres s_centre words unit bit closed")):
    """A tile of queries, and what it is multiplied with.

    q, head, line, centres, of_centres, s_centre: as in `_TileRows`. words: pointer to the tile's words. Per row: unit,
    the query's quantization scale; bit, the query's bit in a word; closed, its closed groups.
    """


@triton.jit
def _rest_scores(x, step, word, bit, Q: tl.constexpr):
    """Scores of centres without the query's scale, float32 ``[BM, BN]``; -inf for groups that the row's query opens.

    x: integer products. step, word ``[BN]``: of each group its centre's step, and a bit for each of Q queries that open
    it. bit ``[BM]``: that of the row's query.
    """
    EVERY: tl.constexpr = -1 if word.dtype.primitive_bitwidth == Q else 2**Q - 1
    if tl.max(((word != 0) & (word != EVERY)).to(tl.int32), 0) == 0:
        # each group is opened by all queries of the tile or by none, as where they share a choice: one number per group
        # hides it, which a fused multiply-add adds
        hidden = tl.where(word == 0, 0.0, float("-inf"))  # [BN]
        s = floats_of(x) * step[None, :] + hidden[None, :]
    else:
        s = tl.where((word[None, :] & bit[:, None]) == 0, floats_of(x) * step[None, :], float("-inf"))
    return s


@triton.jit
def _weigh_groups(
    rows, lse, lo, hi, D: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr, FORM: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add the centres of groups ``[lo, hi)`` to lse: for each row and place in a tile the largest score, and the sum of
    ``2 ** (score - largest)``. MASKED: some of these groups may not be closed for some row.
    """
    top, total = lse
    PLACES: tl.constexpr = top.shape[1]
    for group in range(lo, hi, FORM.BN):
        n = group + tl.arange(0, FORM.BN)
        at = rows.centres + n.to(tl.int64)[:, None] * rows.s_centre
        x = _centre_products(rows, at, D, FORM)
        word = tl.load(rows.words + n)
        s, unit = _rest_scores(x, tl.load(rows.of_centres + n), word, rows.bit, Q), rows.unit
        if CAP > 0:
            s, unit = soft_cap(s * unit[:, None], CAP)[0], tl.full(unit.shape, 1.0, tl.float32)
            # a cap makes -inf finite
            s = tl.where((word[None, :] & rows.bit[:, None]) == 0, s, float("-inf"))
        if MASKED:
            s = tl.where(n[None, :] < rows.closed[:, None], s, float("-inf"))
        s = tl.reshape(s, [FORM.BM, FORM.BN // PLACES, PLACES])
        larger = tl.maximum(top, tl.max(s, 1) * unit[:, None])  # [BM, PLACES]
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        # scaled here, so that one fused multiply-add per number remains
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s * unit[:, None, None] - safe[:, None, :]), 1)
        top = larger
    return top, total


@triton.jit(do_not_specialize=(*VARYING, "G", "first", "stop", "columns"))
def recall_rest_kernel(
    unit_ptr, q, centres_ptr, of_centres_ptr, words_ptr, starts_ptr, weight_ptr,
    s_centre, level, K, L, G, first, stop, columns,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries,
    R: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, CAP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of the weight of all closed groups that queries ``[first, stop)`` do not open, natural,
    float32 ``[B * K, R, L]``; -inf where a query opens all closed groups.

    Grid (tiles of ``BM // R`` queries, B * K). unit, q: from `condense.ops.triton.recall_score.rotated`, in base 2, q
    as a descriptor. centres int8 ``[B * K, columns, D]``, of_centres float32 ``[B * K, columns]``: of a `CellIndex` of
    whole tiles; rows of centres are s_centre apart. words ``[B * K, T, columns]``: from
    `condense.ops.triton.recall_choice.marked`. level: added to the log-sum-exp, base 2. CAP: soft cap, base 2, 0.0 for
    none.
    """
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BN
    Q: tl.constexpr = BM // R
    # a place is a position among eight adjacent groups, of which one thread holds two: a reduction over threads would
    # make them wait
    PLACES: tl.constexpr = 8
    numbers = chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries
    row, spans = row_of_program(numbers, starts_ptr, K, KIND)
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, r, real = program_rows(first, stop, R, BM)
    closed = closed_groups(i, row, spans, G, KIND)
    unit = tl.load(unit_ptr + (head * (stop - first) + i - first) * R + r)  # [BM]
    columns = columns // BN * BN  # so that the compiler knows that rows of words and steps are aligned
    words_ptr += (head * tl.num_programs(0) + tile) * columns
    bit = tl.full([BM], 1, words_ptr.dtype.element_ty) << ((i - first) % Q)
    line = tile * (Q * R)
    held = q if FORM.parts > 1 else q.load([tl.program_id(1), line, 0]).reshape(BM, FORM.P)
    rows = _RestRows(
        held, tl.program_id(1), line, centres_ptr + head * columns * s_centre, of_centres_ptr + head * columns,
        s_centre, words_ptr, tl.maximum(unit, TINY), bit, closed,
    )  # fmt: skip
    lse = (tl.full([BM, PLACES], float("-inf"), tl.float32), tl.zeros([BM, PLACES], tl.float32))
    whole = tl.min(closed) // BN * BN
    lse = _weigh_groups(rows, lse, 0, whole, D, Q, CAP, FORM, False)
    top, total = _weigh_groups(rows, lse, whole, tl.max(closed), D, Q, CAP, FORM, True)
    weight = (log_of_sum(top, total) + level) * 0.6931471805599453  # [BM]
    weight = tl.where(tl.max(top, 1) == float("-inf"), float("-inf"), weight)
    tl.store(weight_ptr + (head * R + r) * L + i, weight, mask=real)


@triton.jit(do_not_specialize=("L", "n", "begin"))
def recall_join_kernel(
    out_ptr, lse_ptr, weight_ptr, mean_ptr, begin_ptr, s_out, s_mean, H, L, n, begin,
    g: tl.constexpr, R: tl.constexpr, Dv: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add one token, which stands for the groups that a query does not open, to out ``[B, H, L, Dv]`` and lse float32
    ``[B, H, L]``, in place, as `condense.ops.recall.rest.with_rest` does.

    Grid (tiles of BM queries times H, B). weight: as `recall_rest_kernel` writes it. mean: ``[B, H / R, n, Dv]``; query
    i sees column ``(begin + i) // g``, clamped to the first and the last. begin_ptr: begin of each row, None if it is
    the same in all rows.
    """
    row, head = tl.program_id(1), tl.program_id(0) % H
    i, d = tl.program_id(0) // H * BM + tl.arange(0, BM), tl.arange(0, BD)
    if begin_ptr is not None:
        begin = tl.load(begin_ptr + row)
    column = tl.minimum(tl.maximum(begin + i, 0) // g, n - 1)
    line = (row.to(tl.int64) * H + head) * L + i
    lse = tl.load(lse_ptr + line, mask=i < L, other=float("-inf"))
    weight = tl.load(weight_ptr + line, mask=i < L, other=float("-inf"))
    top = tl.maximum(lse, weight)
    nothing = top == float("-inf")
    top = tl.where(nothing, 0.0, top)
    total = top + tl.log(tl.where(nothing, 1.0, tl.exp(lse - top) + tl.exp(weight - top)))
    s_b, s_h, s_l = s_out
    out_ptr += row.to(tl.int64) * s_b + head.to(tl.int64) * s_h + i.to(tl.int64)[:, None] * s_l + d[None, :]
    there = (i < L)[:, None] & (d < Dv)[None, :]
    out = tl.load(out_ptr, mask=there, other=0.0).to(tl.float32)
    s_b, s_h, s_n = s_mean
    mean_ptr += row.to(tl.int64) * s_b + (head // R).to(tl.int64) * s_h
    mean = tl.load(mean_ptr + column.to(tl.int64)[:, None] * s_n + d[None, :], mask=there, other=0.0)
    out = out * tl.exp(lse - total)[:, None] + mean * tl.exp(weight - total)[:, None]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=there)
    # other warps of the program may not have read their log-sum-exps yet, which the store below overwrites
    tl.debug_barrier()
    tl.store(lse_ptr + line, tl.where(nothing, float("-inf"), total), mask=i < L)
