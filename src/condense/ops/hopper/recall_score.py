"""Recall's index scores for Hopper: one warp loads the index, three warp groups multiply.

Computes the same as `condense.ops.triton.recall_score_kernels.recall_score_kernel`, for an index of bounds of 16-bit
queries. A persistent program loops over tiles of ``GROUPS * 64`` rows, all of which read the same blocks of the index
from a ring in shared memory. A group starts the product with its next block as soon as it has taken the best blocks of
groups from the last one, and only then scales, sums and writes these: no tensor core waits for that.

Shapes as there; BN rows of the index per block, of ``BN // MP`` groups in BC cells of C.
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
from condense.ops.triton.device.records import Row, Rule, Spans, Start
from condense.ops.triton.device.rule import start_of_row, visible
from condense.ops.triton.recall_score_kernels import BLOCK, CHUNK, place_of_cell

# multiplying warp groups
GROUPS = gl.constexpr(3)


class ScoreForm(NamedTuple):
    """The constants that the kernel is compiled for: width of keys; rows of the index per block, blocks of a group as a
    power of two, groups of a cell; blocks that are loaded ahead; whether the index has a grid; kind of positions.
    """

    D: int
    BN: int
    MP: int
    C: int
    stages: int
    grid: bool
    kind: str


class Problem(NamedTuple):
    """The numbers that are the same for all tiles: heads, ratio, the end of the block of queries, queries of a tile,
    tiles, tiles in all rows and heads; the block's first query and the groups of the index; spans without the start of
    a row.
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


class Memory(NamedTuple):
    """Shared memory: rings of the lowest and the highest keys, and barriers that mark their slots as full or empty."""

    low: Any
    high: Any
    full: Any
    empty: Any


class Results(NamedTuple):
    """Where scores, cells' best scores and log-sum-exps go, and how many cells there are."""

    score: Any
    cell: Any
    lse: Any
    cells: Any


class Lines(NamedTuple):
    """The queries in shared memory, negative and positive parts. Of each row the sum of its query, its closed groups,
    its place among the rows of the block, and whether it counts. Where the scores and the cells of these rows' KV head
    go, and the steps and zeros of its groups stand; rows of the block, and the scale of scores.
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
    """First query, batch row and KV head of tile number ``work``; the last queries see the most groups and come
    first.
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
    hi = visible(0, i, row, Spans(spans.rule, start, 0, 0), KIND)[1]
    return gl.minimum(hi, problem.G).to(gl.int32)


@gluon.jit
def _blocks(first, row, problem, FORM: gl.constexpr):
    """Blocks that every query of a tile sees whole, and all; at least one."""
    BG: gl.constexpr = FORM.BN // FORM.MP
    last = gl.minimum(first + problem.Q, problem.L) - 1
    whole = _groups(first, row, problem, FORM) // BG
    return whole, gl.maximum(gl.cdiv(_groups(last, row, problem, FORM), BG), 1)


@gluon.jit
def _produce(rows, problem, memory, FORM: gl.constexpr):
    """The loading warp."""
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
    """Starts the product of queries with one block of the index."""
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
    """The largest of each group's blocks: a thread has four groups in a row of each cell."""
    MP: gl.constexpr = FORM.MP
    C: gl.constexpr = FORM.C
    BC: gl.constexpr = FORM.BN // MP // C
    s = gl.max(gl.reshape(s, [ROWS, BC, 2, MP, C // 4, 2]), 3)
    return gl.convert_layout(gl.reshape(gl.permute(s, [0, 1, 3, 2, 4]), [ROWS, BC, C]), _of_cells(BC, C))


@gluon.jit
def _by_thread(x, BC: gl.constexpr, C: gl.constexpr):
    """Sums over what a thread has of a row: ``[ROWS, C // 4]``."""
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, BC, C // 4, 4]), 3), 1)


@gluon.jit
def _add(lse, s, t, lines, FORM: gl.constexpr, MASKED: gl.constexpr):
    """Scales and writes the scores of block t, ``[ROWS, BC, C]``, and adds them to the log-sum-exp: the largest so far,
    and sums of ``2 ** (score - largest)`` by row and thread.
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
    # adjacent cells in adjacent registers, written at once
    best = gl.convert_layout(best, _of_best(BC))
    of_rows: gl.constexpr = gl.SliceLayout(1, best.type.layout)
    cell = t * BC + gl.arange(0, BC, layout=gl.SliceLayout(0, best.type.layout))
    place = gl.convert_layout(lines.line, of_rows)[:, None] * CHUNK + place_of_cell(cell, lines.lines)[None, :]
    gl.store(lines.cell + place, best, mask=gl.convert_layout(lines.real, of_rows)[:, None])
    safe = gl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
    added = _by_thread(gl.exp2(s - safe[:, None, None]), BC, C)
    kept = gl.convert_layout(gl.exp2(top - safe), gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return larger, total * kept[:, None] + added


@gluon.jit
def _score(s, lse, lo, hi, now, lines, memory, FORM: gl.constexpr, MASKED: gl.constexpr):
    """Scores blocks ``[lo, hi)`` of a tile, of which the first one's products s have been started, and starts those of
    block hi. now: number of block 0 among all that the program has loaded.
    """
    STAGES: gl.constexpr = FORM.stages
    for t in range(lo, hi):
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(memory.empty.index((now + t) % STAGES))
        best = _best_blocks(s, FORM)
        s = _products(lines.q, memory, now + t + 1, FORM)
        # this has been waited for: a wait's loop ends a basic block, so that the assembler cannot move what follows
        # before the products
        mbarrier.wait(memory.full.index((now + t + 1) % STAGES), (now + t + 1) // STAGES & 1)
        lse = _add(lse, best, t, lines, FORM, MASKED)
    return s, lse


@gluon.jit
def _consume(
    tensors, queries, problem, results, scale, memory, FORM: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """A multiplying warp group: 64 of the rows of each tile."""
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
    """See `condense.ops.triton.recall_score_kernels.recall_score_kernel`. tiles: of queries; works: tiles times B
    times K.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    problem = Problem(K, R, stop, GROUPS * ROWS // R, tiles, works, first, G, Spans(rule, start, starts_ptr, 0))
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
    memory = Memory(low, high, full, empty)
    gl.warp_specialize([
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 0)),
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 1)),
        (_consume, (tensors, queries, problem, results, scale, memory, FORM, 2)),
        (_produce, (rows, problem, memory, FORM)),
    ], [4, 4, 1], [160, 160, 24])  # fmt: skip
