"""Recall's index scores for Hopper: one warp loads the index, three warp groups multiply.

Computes the same as `condense.ops.triton.recall_score_kernels.recall_score_kernel`, for an index of bounds of 16-bit
queries. A persistent program loops over tiles of ``GROUPS * 64`` rows, all of which read the same blocks of the index
from a ring in shared memory. Once a warp group has reduced a product to one number per group of tokens, it starts the
product with the next block, and scales, sums and writes the scores of the last one meanwhile.

Shapes as there. A block has BN rows of the index: those of ``BN // MP`` groups, in BC cells of C groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from condense.ops.hopper.attend_forward import ROWS, _packed
from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.records import Row, RowSpans, Rule, Start
from condense.ops.triton.device.rule import start_of_row, visible
from condense.ops.triton.recall_score_kernels import BLOCK, CELLS_PER_LINE, place_of_cell

# multiplying warp groups
GROUPS = gl.constexpr(3)


class HopperScoreForm(NamedTuple):
    """The constants that the kernel is compiled for.

    D: width of keys. BN: rows of the index per block. MP: blocks per group, rounded up to a power of two. C: groups per
    cell. stages: blocks that are loaded ahead. grid: the index is quantised. kind: of positions.
    """

    D: int
    BN: int
    MP: int
    C: int
    stages: int
    grid: bool
    kind: str


class ScoreWork(NamedTuple):
    """The numbers that are the same for all tiles.

    K: KV heads. R: query heads per KV head. L: end of the block of queries. Q: queries per tile. tiles: tiles of
    queries. works: tiles times B times K. first: the block's first query. G: groups of the index. spans: `RowSpans`
    without the start of a row.
    """

    K: Any
    R: Any
    L: Any
    Q: Any
    tiles: Any
    works: Any
    first: Any
    G: Any
    spans: Any


class ScoreMemory(NamedTuple):
    """Shared memory. low, high: rings of bounds. full, empty: barriers that mark a slot of both as full or empty."""

    low: Any
    high: Any
    full: Any
    empty: Any


class Results(NamedTuple):
    """Pointers to the scores, the cells' best scores and the log-sum-exps; cells: the number of cells."""

    score: Any
    cell: Any
    lse: Any
    cells: Any


class Lines(NamedTuple):
    """The rows of a warp group.

    q: negative and positive parts of the queries, in shared memory. Per row: sum_q, sum of its query; closed, its
    closed groups; line, its index within the block of queries; real, whether it counts. Pointers of the KV head: score
    and cell, to the results; grid, to steps and zeros. lines: rows of the block. scale: of scores.
    """

    q: Any
    sum_q: Any
    closed: Any
    line: Any
    real: Any
    score: Any
    cell: Any
    grid: Any
    lines: Any
    scale: Any


@gluon.jit
def _tile(work, problem):
    """First query and `Row` of tile number ``work``.

    The last queries see the most groups, so their tiles come first.
    """
    first = problem.first + (problem.tiles - 1 - work % problem.tiles) * problem.Q
    return first, Row(work // problem.tiles // problem.K, work // problem.tiles % problem.K)


@gluon.jit
def _rows(first, j, problem):
    """`condense.ops.triton.device.rule.tile_rows` for rows j of a tile."""
    kept = gl.minimum(j, problem.Q * problem.R - 1)
    i = first + kept // problem.R
    return gl.minimum(i, problem.L - 1), kept % problem.R, (j < problem.Q * problem.R) & (i < problem.L)


@gluon.jit
def _groups(i, row, problem, FORM: gl.constexpr):
    """Closed groups of queries i."""
    KIND: gl.constexpr = FORM.kind
    spans = problem.spans
    start = start_of_row(row.b.to(gl.int64), spans.start, spans.arrays, KIND)
    hi = visible(0, i, row, RowSpans(spans.rule, start, 0, 0), KIND)[1]
    return gl.minimum(hi, problem.G).to(gl.int32)


@gluon.jit
def _blocks(first, row, problem, FORM: gl.constexpr):
    """Number of blocks that every query of a tile sees whole, and of all blocks, at least one."""
    BG: gl.constexpr = FORM.BN // FORM.MP
    last = gl.minimum(first + problem.Q, problem.L) - 1
    whole = _groups(first, row, problem, FORM) // BG
    return whole, gl.maximum(gl.cdiv(_groups(last, row, problem, FORM), BG), 1)


@gluon.jit
def _produce(rows, problem, memory, FORM: gl.constexpr):
    """Run the loading warp."""
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.stages
    count = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = _tile(work, problem)
        _, blocks = _blocks(first, row, problem, FORM)
        for t in range(blocks):
            stage, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(memory.empty.index(stage), phase ^ 1)
            full = memory.full.index(stage)
            mbarrier.expect(full, 2 * rows.block_type.nbytes)
            tma.async_copy_global_to_shared(rows, [row.b, row.head * 2, t * BN, 0], full, memory.low.index(stage))
            tma.async_copy_global_to_shared(rows, [row.b, row.head * 2 + 1, t * BN, 0], full, memory.high.index(stage))
            count += 1


@gluon.jit
def _products(q, memory, count, FORM: gl.constexpr):
    """Start the product of queries with one block of the index."""
    BN: gl.constexpr = FORM.BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage = count % FORM.stages
    mbarrier.wait(memory.full.index(stage), count // FORM.stages & 1)
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    low = memory.low.index(stage).reshape([BN, q[0].shape[1]])
    high = memory.high.index(stage).reshape([BN, q[1].shape[1]])
    s = hopper.warpgroup_mma(q[0], low.permute([1, 0]), s, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q[1], high.permute([1, 0]), s, is_async=True)


@triton.constexpr_function
def _of_cells(BC, C):
    """Layout of ``[ROWS, BC, C]`` scores: that of the product's columns, four groups in a row per thread."""
    cells, bit = [], 1
    while bit < BC:
        cells.append([0, bit, 0])
        bit *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0], *cells],
        lane_bases=[[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[ROWS.value, BC, C],
    )


@triton.constexpr_function
def _of_best(BC):
    """Layout of the best scores ``[ROWS, BC]`` of cells: all of a row in one thread."""
    cells, bit = [], 1
    while bit < BC:
        cells.append([0, bit])
        bit *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[*cells, [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS.value, BC],
    )


@gluon.jit
def _best_blocks(s, FORM: gl.constexpr):
    """Largest score of each group's blocks, in the layout of `_of_cells`."""
    MP: gl.constexpr = FORM.MP
    C: gl.constexpr = FORM.C
    BC: gl.constexpr = FORM.BN // MP // C
    s = gl.max(gl.reshape(s, [ROWS, BC, 2, MP, C // 4, 2]), 3)
    return gl.convert_layout(gl.reshape(gl.permute(s, [0, 1, 3, 2, 4]), [ROWS, BC, C]), _of_cells(BC, C))


@gluon.jit
def _by_thread(x, BC: gl.constexpr, C: gl.constexpr):
    """Sum of the numbers that each thread holds of a row, ``[ROWS, C // 4]``."""
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, BC, C // 4, 4]), 3), 1)


@gluon.jit
def _add(lse, s, t, lines, FORM: gl.constexpr, MASKED: gl.constexpr):
    """Scale and write the scores of block t, ``[ROWS, BC, C]``, and add them to lse.

    lse: the largest score so far, and sums of ``2 ** (score - largest)``, both per row; the sums also per thread.
    """
    top, total = lse
    C: gl.constexpr = FORM.C
    BC: gl.constexpr = s.shape[1]
    of_groups: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    cell = t * BC + gl.arange(0, BC, layout=gl.SliceLayout(1, of_groups))[:, None]
    c = gl.arange(0, C, layout=gl.SliceLayout(0, of_groups))[None, :]
    if FORM.grid:
        at = lines.grid + cell * (2 * C) + c
        s = s * gl.load(at)[None] + lines.sum_q[:, None, None] * gl.load(at + C)[None]
    else:
        s = s * lines.scale
    if MASKED:
        s = gl.where((cell * C + c)[None] < lines.closed[:, None, None], s, float("-inf"))
    place = (cell * lines.lines * C + c)[None] + (lines.line * C)[:, None, None]
    gl.store(lines.score + place, s, mask=lines.real[:, None, None])
    best = gl.max(s, 2)
    larger = gl.maximum(top, gl.max(best, 1))
    # this layout puts adjacent cells into adjacent registers, so that one store writes them
    best = gl.convert_layout(best, _of_best(BC))
    of_rows: gl.constexpr = gl.SliceLayout(1, best.type.layout)
    cell = t * BC + gl.arange(0, BC, layout=gl.SliceLayout(0, best.type.layout))
    place = gl.convert_layout(lines.line, of_rows)[:, None] * CELLS_PER_LINE + place_of_cell(cell, lines.lines)[None, :]
    gl.store(lines.cell + place, best, mask=gl.convert_layout(lines.real, of_rows)[:, None])
    safe = gl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
    added = _by_thread(gl.exp2(s - safe[:, None, None]), BC, C)
    kept = gl.convert_layout(gl.exp2(top - safe), gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return larger, total * kept[:, None] + added


@gluon.jit
def _score(s, lse, lo, hi, now, lines, memory, FORM: gl.constexpr, MASKED: gl.constexpr):
    """Score blocks ``[lo, hi)`` of a tile. The products s of block lo have been started; those of block hi are on exit.

    now: number of block 0 among all blocks that the program reads.
    """
    STAGES: gl.constexpr = FORM.stages
    for t in range(lo, hi):
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(memory.empty.index((now + t) % STAGES))
        best = _best_blocks(s, FORM)
        s = _products(lines.q, memory, now + t + 1, FORM)
        # the block is already there; this wait only ends a basic block, so that the assembler cannot move what follows
        # before the products
        mbarrier.wait(memory.full.index((now + t + 1) % STAGES), (now + t + 1) // STAGES & 1)
        lse = _add(lse, best, t, lines, FORM, MASKED)
    return s, lse


@gluon.jit
def _consume(
    tensors, queries, problem, results, scale, memory, FORM: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Run a multiplying warp group, which owns 64 rows of each tile."""
    q_ptr, s_q, grid_ptr = tensors
    K, R, L = problem.K, problem.R, problem.L
    D: gl.constexpr = FORM.D
    C: gl.constexpr = FORM.C
    BC: gl.constexpr = FORM.BN // FORM.MP // C
    packed: gl.constexpr = _packed(D)
    nothing = gl.zeros([ROWS, BC, C], gl.float32, _of_cells(BC, C))
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, nothing.type.layout))
    q = [place.index(GROUP) for place in queries]
    j = GROUP * ROWS + gl.arange(0, ROWS, layout=of_rows)
    packed_j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, packed))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, packed))[None, :]
    lines = (L - problem.first) * R
    count = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = _tile(work, problem)
        head = row.b.to(gl.int64) * K + row.head.to(gl.int64)
        i, r, real = _rows(first, packed_j, problem)
        at = row.b.to(gl.int64) * s_q[0] + (row.head.to(gl.int64) * R + r) * s_q[1] + i.to(gl.int64) * s_q[2]
        x = gl.load(q_ptr + at[:, None] + d, mask=real[:, None], other=0.0)
        q[0].store(gl.where(x < 0, x, gl.zeros_like(x)))
        q[1].store(gl.where(x > 0, x, gl.zeros_like(x)))
        hopper.fence_async_shared()
        sum_q = gl.convert_layout(gl.sum(x.to(gl.float32), 1), of_rows)
        i, r, real = _rows(first, j, problem)
        of_head = head * results.cells * lines
        of_lines = Lines(
            q, sum_q, _groups(i, row, problem, FORM), (i - problem.first) * R + r, real, results.score + of_head * C,
            results.cell + of_head, grid_ptr + head * results.cells * (2 * C), lines, scale,
        )  # fmt: skip
        whole, blocks = _blocks(first, row, problem, FORM)
        whole = gl.minimum(whole, blocks - 1)
        lse = (gl.full([ROWS], float("-inf"), gl.float32, of_rows), _by_thread(nothing, BC, C))
        s = _products(q, memory, count, FORM)
        s, lse = _score(s, lse, 0, whole, count, of_lines, memory, FORM, False)
        s, lse = _score(s, lse, whole, blocks - 1, count, of_lines, memory, FORM, True)
        count += blocks
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(memory.empty.index((count - 1) % FORM.stages))
        top, total = _add(lse, _best_blocks(s, FORM), blocks - 1, of_lines, FORM, True)
        total = gl.convert_layout(gl.sum(total, 1), of_rows)
        # 0 where no group is closed
        lse = gl.where(total > 0, top, 0.0) + gl.log2(gl.where(total > 0, total, 1.0))
        gl.store(results.lse + head * lines + of_lines.line, lse, mask=real)


@gluon.jit(do_not_specialize=(*VARYING, *BLOCK, "tiles", "works"))
def recall_score_hopper_kernel(
    q_ptr, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    s_q, K, L, G, first, stop, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, tiles, works,
    R: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """See `condense.ops.triton.recall_score_kernels.recall_score_kernel`.

    tiles: tiles of queries. works: tiles times B times K.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    problem = ScoreWork(K, R, stop, GROUPS * ROWS // R, tiles, works, first, G, RowSpans(rule, start, starts_ptr, 0))
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    D: gl.constexpr = FORM.D
    STAGES: gl.constexpr = FORM.stages
    of_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    queries = (
        gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], of_queries),
        gl.allocate_shared_memory(dtype, [GROUPS, ROWS, D], of_queries),
    )
    low = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, FORM.BN, D], rows.layout)
    high = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, FORM.BN, D], rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    hopper.fence_async_shared()
    tensors, results = (q_ptr, s_q, grid_ptr), Results(score_ptr, cell_ptr, lse_ptr, cells)
    memory = ScoreMemory(low, high, full, empty)
    gl.warp_specialize([
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 0)),
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 1)),
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 2)),
        (_produce, (rows, problem, memory, FORM)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip
