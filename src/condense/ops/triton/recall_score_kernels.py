"""Kernels that score the index for a block of queries of a prompt.

`recall_score_kernel` computes scores by matrix products, the best score of every *cell* (C adjacent groups), and the
log-sum-exp of all scores; `recall_score_wide_kernel` does the same for keys as wide as latents.
`condense.ops.triton.recall_choice_kernels` chooses groups by these.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries of which a block has n, G groups, m blocks
per group, D width, P columns of the tile that holds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.records import Row, RowSpans, Rule, Start
from condense.ops.triton.device.rule import start_of_row, tile_rows, visible

# not specialised: these numbers differ between blocks of queries, and a new value must not compile a new kernel
BLOCK = ("G", "first", "stop", "cells")

# cells whose best scores lie side by side in memory for each row: 16 bytes
CELLS_PER_LINE = tl.constexpr(4)


class ScoreForm(NamedTuple):
    """The constants of an index and of its tiles.

    MP: blocks per group, m, rounded up to a power of two. BG: groups per tile. C: groups per cell. grid: the index is
    quantised, with a step and a zero per group. steps: of `_wide_products`, 0 if queries are held in registers.
    precision: of products.
    """

    MP: int
    BG: int
    C: int
    grid: bool
    steps: int
    precision: str


@triton.jit
def place_of_cell(cell, lines):
    """Offset of the best score of a cell for row 0 of ``lines`` rows."""
    return cell // CELLS_PER_LINE * lines * CELLS_PER_LINE + cell % CELLS_PER_LINE


@triton.jit
def row_of_program(rule, start, starts_ptr, K, KIND: tl.constexpr):
    """Batch row and KV head of a program of a grid (tiles, B * K), and the spans of that row."""
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    return row, RowSpans(rule, start_of_row(row.b.to(tl.int64), start, starts_ptr, KIND), 0, 0)


@triton.jit
def closed_groups(i, row, spans, G, KIND: tl.constexpr):
    """Number of groups that are closed for queries i, at most the G of the index."""
    return tl.minimum(visible(0, i, row, spans, KIND)[1], G).to(tl.int32)


@triton.jit
def _load_queries(q_ptr, at, real, D: tl.constexpr, P: tl.constexpr):
    d = tl.arange(0, P)
    return tl.load(q_ptr + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)


class _Index(NamedTuple):
    """The index of one KV head.

    rows: descriptor, see `recall_score_kernel`. b, head: its batch row and first head. grid: pointer to the steps and
    zeros of the groups.
    """

    rows: Any
    b: Any
    head: Any
    grid: Any


class _Wide(NamedTuple):
    """Queries of a tile.

    rows: descriptor ``[B * K, ...]``. head: its first index, ``b * K + head``. line: first row.
    """

    rows: Any
    head: Any
    line: Any


class _Lines(NamedTuple):
    """The rows of a tile.

    line: index of a row within the block of queries. real: whether the row counts. closed: closed groups of its query.
    size: rows of the block.
    """

    line: Any
    real: Any
    closed: Any
    size: Any


class _Results(NamedTuple):
    """Pointers to the scores, the cells' best scores and the log-sum-exps; cells: the number of cells."""

    score: Any
    cell: Any
    lse: Any
    cells: Any


class _Scored(NamedTuple):
    """The queries of a tile, as `_score_groups` takes them.

    q: tiles of the negative and the positive part, or `_Wide`. sum_q: the sum of each query. scale: of scores.
    score, cell: pointers to the results of each row. real: whether a row counts. lines: rows of the block.
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
    """Products of a tile of queries with the rows of the index from ``at`` on, both parts added."""
    x = index.rows.load([index.b, index.head, at, 0])
    s = tl.dot(q[0], tl.trans(x.reshape(x.shape[2], x.shape[3])), input_precision=PRECISION)
    x = index.rows.load([index.b, index.head + 1, at, 0])
    return tl.dot(q[1], tl.trans(x.reshape(x.shape[2], x.shape[3])), s, input_precision=PRECISION)


@triton.jit
def _wide_products(q, index, at, FORM: tl.constexpr):
    """As `_index_products` for keys of any width, in ``FORM.steps`` steps of as many columns as descriptors read."""
    STEPS: tl.constexpr = FORM.steps
    PRECISION: tl.constexpr = FORM.precision
    BM: tl.constexpr = q.rows.block_shape[2]
    BN: tl.constexpr = index.rows.block_shape[2]
    BK: tl.constexpr = q.rows.block_shape[3]
    s = tl.zeros([BM, BN], tl.float32)
    for step in range(STEPS * 2):
        part, d = step // STEPS, step % STEPS * BK
        x = q.rows.load([q.head, part, q.line, d]).reshape(BM, BK)
        y = index.rows.load([index.b, index.head + part, at, d]).reshape(BN, BK)
        s = tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    return s


@triton.jit
def _score_groups(queries, index, lse, stretch, closed, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Score the groups ``[lo, hi)`` of a stretch, write the scores, and add them to lse.

    lse: the largest score of each row, and the sum of ``2 ** (score - largest)``. MASKED: the closed groups of some row
    may end among them.
    """
    top, total = lse
    lo, hi = stretch
    MP: tl.constexpr = FORM.MP
    BG: tl.constexpr = FORM.BG
    C: tl.constexpr = FORM.C
    PRECISION: tl.constexpr = FORM.precision
    BM: tl.constexpr = closed.shape[0]
    BC: tl.constexpr = BG // C
    for group in range(lo, hi, BG):
        cell, c = group // C + tl.arange(0, BC), tl.arange(0, C)
        if FORM.steps > 0:
            s = _wide_products(queries.q, index, group * MP, FORM)
        else:
            s = _index_products(queries.q, index, group * MP, PRECISION)
        s = tl.permute(tl.reshape(s, [BM, BC, 2, MP, C // 4, 2]), [0, 1, 4, 2, 5, 3])
        s = tl.reshape(s, [BM, BC, C, MP])
        # step > 0 and zero are the same for all blocks of a group, so the best block is known before scaling
        s = tl.max(s, 3)
        if FORM.grid:
            at = index.grid + cell[:, None] * (2 * C) + c[None, :]
            s = s * tl.load(at)[None] + queries.sum_q[:, None, None] * tl.load(at + C)[None]
        else:
            s = s * queries.scale
        if MASKED:
            n = cell[:, None] * C + c[None, :]
            s = tl.where(n[None] < closed[:, None, None], s, float("-inf"))
        of_cells = tl.max(s, 2)
        tl.store(
            queries.cell[:, None] + place_of_cell(cell, queries.lines)[None, :], of_cells, mask=queries.real[:, None]
        )
        at = (cell * queries.lines)[:, None] * C + c[None, :]
        tl.store(queries.score[:, None, None] + at[None], s, mask=queries.real[:, None, None])
        larger = tl.maximum(top, tl.max(of_cells, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
        total = total * tl.exp2(top - safe) + tl.sum(tl.sum(tl.exp2(s - safe[:, None, None]), 2), 1)
        top = larger
    return top, total


@triton.jit
def _log_of_sum(lse):
    """Log-sum-exp, base 2, from the largest score and the sum relative to it; 0 if no group is closed."""
    some = lse[1] > 0
    return tl.where(some, lse[0], 0.0) + tl.log2(tl.where(some, lse[1], 1.0))


@triton.jit
def _score_tile(q, sum_q, lines, row, rows, grid_ptr, results, scale, FORM: tl.constexpr):
    """Score the closed groups of a tile of queries. rows, grid_ptr: see `recall_score_kernel`."""
    head, line = tl.program_id(1).to(tl.int64), lines.line
    of_head = head * lines.size
    index = _Index(rows, row.b, row.head * 2, grid_ptr + head * results.cells * 2 * FORM.C)
    queries = _Scored(
        q, sum_q, scale, results.score + (of_head * results.cells + line) * FORM.C,
        results.cell + of_head * results.cells + line * CELLS_PER_LINE, lines.real, lines.size,
    )  # fmt: skip
    BM: tl.constexpr = lines.closed.shape[0]
    lse = (tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32))
    whole = tl.min(lines.closed) // FORM.BG * FORM.BG
    lse = _score_groups(queries, index, lse, (0, whole), lines.closed, FORM, False)
    lse = _score_groups(queries, index, lse, (whole, tl.max(lines.closed)), lines.closed, FORM, True)
    tl.store(results.lse + of_head + line, _log_of_sum(lse), mask=lines.real)


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_score_kernel(
    q_ptr, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    s_q, K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale,
    R: tl.constexpr, D: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write, for queries ``[first, stop)``, all float32: the scores of closed groups ``[B * K, cells, n * R, C]``, base
    2; the best score of every cell ``[B * K, cells / 4, n * R, 4]``; the log-sum-exp ``[B * K, n * R]``.

    Grid (tiles of BM rows, B * K). Tiles of groups behind the last closed group of a tile of queries are not written.

    rows: descriptor of the index in the dtype of q, ``[B, K * 2, cells * C * MP, D]``, for each head the lowest keys,
    then the highest. The rows of a cell are ordered as ``[2, MP, C / 4,
    2]``: block p of group ``4 i + 2 j + k`` at ``[j, p, i, k]``. A thread holds every other pair of columns of a
    product, and by this order the scores of adjacent groups.
    grid: float32 ``[B, K, cells, 2, C]``, step and zero of each group, both times the scale; read if the index is
    quantised. Its rows then hold codes, and ``q . (zero + step * code)`` is ``zero * sum(q) + step * (q . code)``.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    # the last queries see the most groups and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(first + tile * (BM // R), stop, R, BM)
    at = row.b.to(tl.int64) * s_q[0] + (row.head.to(tl.int64) * R + r) * s_q[1] + i.to(tl.int64) * s_q[2]
    q = _load_queries(q_ptr, at, real, D, P)
    negative, positive = tl.where(q < 0, q, tl.zeros_like(q)), tl.where(q > 0, q, tl.zeros_like(q))
    lines = _Lines((i - first) * R + r, real, closed_groups(i, row, spans, G, KIND), (stop - first) * R)
    _score_tile(
        (negative, positive), tl.sum(q.to(tl.float32), 1), lines, row, rows, grid_ptr,
        _Results(score_ptr, cell_ptr, lse_ptr, cells), scale, FORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*VARYING, *BLOCK))
def recall_score_wide_kernel(
    sum_q_ptr, q, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale,
    R: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As `recall_score_kernel`, for keys of any width, whose queries do not stay in registers.

    q: descriptor ``[B * K, 2, n * R, D]``, the negative and the positive part. sum_q: float32 ``[B * K, n * R]``. The
    blocks of both descriptors have the same number of columns.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    # the last queries see the most groups and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    size, line = (stop - first) * R, tile * BM + tl.arange(0, BM)
    real = line < size
    line = tl.minimum(line, size - 1)
    lines = _Lines(line, real, closed_groups(first + line // R, row, spans, G, KIND), size)
    _score_tile(
        _Wide(q, tl.program_id(1), tile * BM), tl.load(sum_q_ptr + tl.program_id(1).to(tl.int64) * size + line), lines,
        row, rows, grid_ptr, _Results(score_ptr, cell_ptr, lse_ptr, cells), scale, FORM,
    )  # fmt: skip
