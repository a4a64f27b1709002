"""Recall's index scores for Hopper: one warp loads the index, two warp groups multiply in turn.

Computes the same as `condense.ops.triton.recall_choice_kernels.recall_score_kernel`, for an index of bounds of 16-bit
queries. Arranged as `condense.ops.hopper.attend_forward`: a persistent program loops over tiles of ``2 * 64`` rows, and
one group multiplies while the other computes shares and writes.

Shapes as there; BN rows of the index per block, of ``BN // MP`` groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from condense.ops.hopper.attend_forward import ROWS, _packed, _rows, _tile
from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.records import Rule, Spans, Start
from condense.ops.triton.device.rule import start_of_row, visible
from condense.ops.triton.recall_choice_kernels import BLOCK


class Problem(NamedTuple):
    """The numbers that are the same for all tiles: heads, ratio, the end of the block of queries, tiles of queries,
    tiles in all rows and heads; the block's first query and its groups; spans without the start of a row.
    """

    K: Any
    R: Any
    L: Any
    tiles: Any
    works: Any
    first: Any
    G: Any
    spans: Any


class Memory(NamedTuple):
    """Shared memory: rings of the lowest and the highest keys, barriers that mark their slots as full or empty, and
    barriers by which the two groups take turns.
    """

    low: Any
    high: Any
    full: Any
    empty: Any
    turns: Any


class Results(NamedTuple):
    """Where scores, cells' best scores and log-sum-exps go, and how many numbers a row of the first two has."""

    score: Any
    cell: Any
    lse: Any
    scores: Any
    cells: Any


class Lines(NamedTuple):
    """Of each row the sum of its query, its closed groups, where its scores and cells go, and whether it counts."""

    sum_q: Any
    closed: Any
    score: Any
    cell: Any
    real: Any


class Index(NamedTuple):
    """Steps and zeros of the groups of one KV head; how many groups there are; the scale of scores."""

    grid: Any
    size: Any
    scale: Any


@gluon.jit
def _groups(i, row, problem, KIND: gl.constexpr):
    """Closed groups of queries i."""
    spans = problem.spans
    start = start_of_row(row.b.to(gl.int64), spans.start, spans.arrays, KIND)
    hi = visible(0, i, row, Spans(spans.rule, start, 0, 0), KIND)[1]
    return gl.minimum(hi, problem.G).to(gl.int32)


@gluon.jit
def _blocks(first, row, problem, BG: gl.constexpr, KIND: gl.constexpr):
    """Blocks that every query of a tile sees whole, and all; at least one."""
    last = gl.minimum(first + 2 * ROWS // problem.R, problem.L) - 1
    whole = _groups(first, row, problem, KIND) // BG
    return whole, gl.maximum(gl.cdiv(_groups(last, row, problem, KIND), BG), 1)


@gluon.jit
def _produce(rows, problem, memory, BN: gl.constexpr, BG: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr):
    """The loading warp."""
    count = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = _tile(work, problem)
        _, blocks = _blocks(problem.first + first, row, problem, BG, KIND)
        for t in range(blocks):
            stage, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(memory.empty.index(stage), phase ^ 1)
            full = memory.full.index(stage)
            mbarrier.expect(full, 2 * rows.block_type.nbytes)
            tma.async_copy_global_to_shared(rows, [row.b, row.head * 2, t * BN, 0], full, memory.low.index(stage))
            tma.async_copy_global_to_shared(rows, [row.b, row.head * 2 + 1, t * BN, 0], full, memory.high.index(stage))
            count += 1


@gluon.jit
def _products(q, memory, count, BN: gl.constexpr, STAGES: gl.constexpr):
    """Starts the product of queries with one block of the index."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage = count % STAGES
    mbarrier.wait(memory.full.index(stage), count // STAGES & 1)
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    low = memory.low.index(stage).reshape([BN, q[0].shape[1]])
    high = memory.high.index(stage).reshape([BN, q[1].shape[1]])
    s = hopper.warpgroup_mma(q[0], low.permute([1, 0]), s, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q[1], high.permute([1, 0]), s, is_async=True)


@gluon.jit
def _best_blocks(s, BG: gl.constexpr, MP: gl.constexpr):
    """The largest of each group's blocks."""
    return gl.reshape(gl.max(gl.reshape(s, [ROWS, BG // 8, MP, 8]), 2), [ROWS, BG])


@gluon.jit
def _score(
    lse, lo, hi, now, lines, q, index, memory,
    BN: gl.constexpr, MP: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr,
    MASKED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Scores blocks ``[lo, hi)`` of a tile; now: number of block lo among all that the program has loaded."""
    BG: gl.constexpr = BN // MP
    top, total = lse
    for t in range(lo, hi):
        count = now + t - lo
        mbarrier.wait(memory.turns.index(GROUP), (count & 1) ^ (1 - GROUP))
        s = _products(q, memory, count, BN, STAGES)
        mbarrier.arrive(memory.turns.index(1 - GROUP))
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(memory.empty.index(count % STAGES))
        s = _best_blocks(s, BG, MP)
        n = t * BG + gl.arange(0, BG, layout=gl.SliceLayout(0, s.type.layout))
        if GRID:
            step = gl.load(index.grid + n * 2, mask=n < index.size, other=0.0) * index.scale
            zero = gl.load(index.grid + n * 2 + 1, mask=n < index.size, other=0.0) * index.scale
            s = s * step[None, :] + lines.sum_q[:, None] * zero[None, :]
        else:
            s = s * index.scale
        if MASKED:
            s = gl.where(n[None, :] < lines.closed[:, None], s, float("-inf"))
        gl.store(lines.score[:, None] + n[None, :], s, mask=lines.real[:, None])
        cells = gl.max(gl.reshape(s, [ROWS, BG // C, C]), 2)
        cell = t * (BG // C) + gl.arange(0, BG // C, layout=gl.SliceLayout(0, cells.type.layout))
        of_rows: gl.constexpr = gl.SliceLayout(1, cells.type.layout)
        place = gl.convert_layout(lines.cell, of_rows)[:, None] + cell[None, :]
        gl.store(place, cells, mask=gl.convert_layout(lines.real, of_rows)[:, None])
        larger = gl.maximum(top, gl.max(s, 1))
        safe = gl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
        total = total * gl.exp2(top - safe) + gl.sum(gl.exp2(s - safe[:, None]), 1)
        top = larger
    return top, total


@gluon.jit
def _consume(
    tensors, queries, problem, results, scale, memory,
    D: gl.constexpr, BN: gl.constexpr, MP: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, GRID: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: 64 of the 128 rows of each tile."""
    q_ptr, s_q, grid_ptr = tensors
    K, R, L = problem.K, problem.R, problem.L
    BG: gl.constexpr = BN // MP
    packed: gl.constexpr = _packed(D)
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    of_scores: gl.constexpr = _best_blocks(gl.zeros([ROWS, BN], gl.float32, narrow), BG, MP).type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    q = [place.index(GROUP) for place in queries]
    j = GROUP * ROWS + gl.arange(0, ROWS, layout=of_rows)
    packed_j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, packed))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, packed))[None, :]
    count = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = _tile(work, problem)
        first += problem.first
        head = row.b.to(gl.int64) * K + row.head.to(gl.int64)
        i, r, real = _rows(first, packed_j, L, R)
        at = row.b.to(gl.int64) * s_q[0] + (row.head.to(gl.int64) * R + r) * s_q[1] + i.to(gl.int64) * s_q[2]
        x = gl.load(q_ptr + at[:, None] + d, mask=real[:, None], other=0.0)
        q[0].store(gl.where(x < 0, x, gl.zeros_like(x)))
        q[1].store(gl.where(x > 0, x, gl.zeros_like(x)))
        hopper.fence_async_shared()
        sum_q = gl.convert_layout(gl.sum(x.to(gl.float32), 1), of_rows)
        i, r, real = _rows(first, j, L, R)
        line = (head * (L - problem.first) + (i - problem.first)) * R + r
        lines = Lines(
            sum_q, _groups(i, row, problem, KIND), results.score + line * results.scores,
            results.cell + line * results.cells, real,
        )  # fmt: skip
        index = Index(grid_ptr + head * problem.G * 2, problem.G, scale)
        whole, blocks = _blocks(first, row, problem, BG, KIND)
        lse = (gl.full([ROWS], float("-inf"), gl.float32, of_rows), gl.zeros([ROWS], gl.float32, of_rows))
        lse = _score(lse, 0, whole, count, lines, q, index, memory, BN, MP, C, STAGES, GRID, False, GROUP)
        lse = _score(lse, whole, blocks, count + whole, lines, q, index, memory, BN, MP, C, STAGES, GRID, True, GROUP)
        count += blocks
        top, total = lse
        # 0 where no group is closed
        lse = gl.where(total > 0, top, 0.0) + gl.log2(gl.where(total > 0, total, 1.0))
        gl.store(results.lse + line, lse, mask=real)


@gluon.jit(do_not_specialize=(*VARYING, *BLOCK, "tiles", "works"))
def recall_score_hopper_kernel(
    q_ptr, rows, grid_ptr, starts_ptr, score_ptr, cell_ptr, lse_ptr,
    s_q, K, L, G, first, stop, scores, cells,
    chunk, window, entries, max_chunks, query_start, window_start, padding, prompt_entries, scale, tiles, works,
    R: gl.constexpr, D: gl.constexpr, MP: gl.constexpr, GRID: gl.constexpr, KIND: gl.constexpr, BN: gl.constexpr,
    C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """See `condense.ops.triton.recall_choice_kernels.recall_score_kernel`. tiles: of queries; works: tiles times B
    times K.
    """
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, prompt_entries)
    problem = Problem(K, R, stop, tiles, works, first, G, Spans(rule, start, starts_ptr, 0))
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    of_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    queries = (
        gl.allocate_shared_memory(dtype, [2, ROWS, D], of_queries),
        gl.allocate_shared_memory(dtype, [2, ROWS, D], of_queries),
    )
    low = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], rows.layout)
    high = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    hopper.fence_async_shared()
    tensors, results = (q_ptr, s_q, grid_ptr), Results(score_ptr, cell_ptr, lse_ptr, scores, cells)
    memory = Memory(low, high, full, empty, turns)
    gl.warp_specialize([
        (_consume, (tensors, queries, problem, results, scale, memory, D, BN, MP, C, STAGES, GRID, KIND, 0)),
        (_consume, (tensors, queries, problem, results, scale, memory, D, BN, MP, C, STAGES, GRID, KIND, 1)),
        (_produce, (rows, problem, memory, BN, BN // MP, STAGES, KIND)),
    ], [4, 1], [240, 24])  # fmt: skip
