"""The pipeline of the kernels for Hopper: one warp loads keys and values, two warp groups multiply in turn.

A persistent program loops over tiles of ``2 * 64`` rows (see `condense.ops.triton.device.rule`). Each of the two warp
groups owns 64 rows: their queries in shared memory, their softmax and their accumulators in registers. Both read the
same keys and values, which one more warp loads into ring buffers in shared memory, without a pause between tiles. The
two groups take turns to start their products, so that one multiplies while the other computes its softmax; within a
group, ``q @ k`` of the next block runs at the same time as ``p @ v`` of the last block.

Ring buffers, queries and accumulators are cut into parts of columns.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries. BN keys per block.
"""

from collections import namedtuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from condense.ops.triton.device.rule import Row, RowSpans, start_of_row, tile_rows

ROWS = gl.constexpr(64)
# 12 warps start with 168 registers per thread; the loading warps then give most of theirs to the others
OPTIONS = {"num_warps": 4, "maxnreg": 168}


class Work(namedtuple("Work", "K R L tiles works side_by_side spans first room")):
    """The numbers that are the same for all tiles.

    K: KV heads. R: query heads per KV head. L: end of the queries. tiles: tiles of queries. works: tiles times B times
    K. side_by_side: see `tile_of_work`. spans: `RowSpans` without the start of a row. first: first query, and room:
    length of a tile's list of open groups; both 0 if queries open no groups.
    """


class Memory(namedtuple("Memory", "k v k_full k_empty v_full v_empty turns")):
    """Shared memory. k, v: rings of keys and of values, both in parts.

    k_full, k_empty, v_full, v_empty: barriers that mark a slot of a ring as full or empty. turns: one barrier for each
    of the two multiplying warp groups, which the other one arrives at when it has started its products.
    """


class Online(namedtuple("Online", "acc p m total")):
    """An online softmax.

    acc: weighted values, in parts. p: weights of the newest block. m, total: largest score and sum of weights per row.
    """


@gluon.jit
def memory_of(k_rings, v_rings, STAGES: gl.constexpr):
    """Return the `Memory` of these rings, with newly initialised barriers."""
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    hopper.fence_async_shared()
    return Memory(k_rings, v_rings, k_full, k_empty, v_full, v_empty, turns)


@gluon.jit
def tile_of_work(work, problem):
    """First query and `Row` of tile number ``work``. The last queries see the most keys, so their tiles come first.

    side_by_side: the tiles of all rows and KV heads are in one order. Each program has one tile of a round, and every
    second round is turned around. So all programs read about as many keys; otherwise, with 8,192 tokens, some read 28 %
    more than the mean. Longer texts are read row by row and head by head, so that programs share what is in the L2
    cache.
    """
    tile, head = work % problem.tiles, work // problem.tiles
    if problem.side_by_side:
        programs, heads = gl.num_programs(0), problem.works // problem.tiles
        start, place = work // programs * programs, work % programs
        last = gl.minimum(programs, problem.works - start) - 1
        number = start + gl.where(work // programs % 2 == 1, last - place, place)
        tile, head = number // heads, number % heads
    first = (problem.tiles - 1 - tile) * (2 * ROWS // problem.R)
    return first, Row(head // problem.K, head % problem.K)


@gluon.jit
def spans_of_row(spans, row, KIND: gl.constexpr):
    """``spans`` with the start of the given batch row filled in."""
    start = start_of_row(row.b.to(gl.int64), spans.start, spans.arrays, KIND)
    return RowSpans(spans.rule, start, spans.arrays, spans.strides)


@gluon.jit
def start_scores(q, memory, count, BN: gl.constexpr, STAGES: gl.constexpr):
    """Wait for block ``count`` of keys and start its product with the queries, ``[ROWS, BN]``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage, phase = count % STAGES, count // STAGES & 1
    mbarrier.wait(memory.k_full.index(stage), phase)
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    for n in gl.static_range(len(q)):
        k = memory.k[n].index(stage).reshape([BN, q[n].shape[1]])
        s = hopper.warpgroup_mma(q[n], k.permute([1, 0]), s, use_acc=n > 0, is_async=True)
    return s


@gluon.jit
def add_values(p, acc, memory, count, STAGES: gl.constexpr):
    """Start to add ``p @ v`` of block ``count`` to the accumulators. Its values must have arrived in shared memory."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    p = gl.convert_layout(p.to(memory.v[0].dtype), operand)  # [ROWS, BN]
    found = ()
    for part in gl.static_range(len(acc)):
        v = memory.v[part].index(count % STAGES).reshape([p.shape[1], acc[part].type.shape[1]])
        found += (hopper.warpgroup_mma(p, v, acc[part], is_async=True),)  # [ROWS, width]
    return found


@gluon.jit
def softmax_step(s, m, total, level, scale, MASKED: gl.constexpr, SCALED: gl.constexpr):
    """One step of the online softmax, base 2: weights, new maximum and sum, factor for earlier values.

    level: base-2 number added to all scores. MASKED: a row may have seen no key. SCALED: s has scale and level already.
    """
    # scale > 0, so the maximum can be taken before scaling: one fused multiply-add per score remains
    m_new = gl.maximum(m, gl.max(s, 1) if SCALED else gl.max(s, 1) * scale + level)  # [ROWS]
    safe = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(s - safe[:, None] if SCALED else s * scale - (safe - level)[:, None])  # [ROWS, BN]
    alpha = gl.exp2(m - safe)  # [ROWS]
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def first_scores(q, memory, count, BN: gl.constexpr, STAGES: gl.constexpr):
    """Scores ``[ROWS, BN]`` of the first block of a tile, number ``count`` of the program; no values are added yet."""
    s = hopper.warpgroup_mma_wait(0, deps=[start_scores(q, memory, count, BN, STAGES)])  # [ROWS, BN]
    mbarrier.arrive(memory.k_empty.index(count % STAGES))
    return s


@gluon.jit
def start_turn(q, p, acc, memory, count, piece, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Wait for the warp group's turn, then start the scores of block ``count`` and the last block's ``p @ v``.

    piece: tiles that the program has finished.
    """
    mbarrier.wait(memory.turns.index(GROUP), ((count - 1 - piece) & 1) ^ (1 - GROUP))
    s = start_scores(q, memory, count, BN, STAGES)  # [ROWS, BN]
    added = add_values(p, acc, memory, count - 1, STAGES)
    mbarrier.arrive(memory.turns.index(1 - GROUP))
    return s, added


@gluon.jit
def end_turn(added, p, alpha, memory, count, STAGES: gl.constexpr):
    """Accumulators with the last block's values, scaled by ``alpha``, and the weights of block ``count``.

    The wait for the values is a loop, across which the assembler moves no instructions: the softmax that computes p
    must come before it, to run at the same time as the products.
    """
    mbarrier.wait(memory.v_full.index(count % STAGES), count // STAGES & 1)
    if len(added) == 1:
        first, p = hopper.warpgroup_mma_wait(0, deps=[added[0], p])
        mbarrier.arrive(memory.v_empty.index((count - 1) % STAGES))
        return (first * _by_rows(alpha, first),), p
    else:
        first, second, p = hopper.warpgroup_mma_wait(0, deps=[added[0], added[1], p])
        factor = _by_rows(alpha, first)  # [ROWS, 1]
        acc = (first * factor, second * factor)
        mbarrier.arrive(memory.v_empty.index((count - 1) % STAGES))
        return acc, p


@gluon.jit
def last_values(online, memory, count, STAGES: gl.constexpr):
    """The accumulators with the values of block ``count``, the last one of a tile."""
    added = add_values(online.p, online.acc, memory, count, STAGES)
    acc = hopper.warpgroup_mma_wait(0, deps=added)
    if len(added) == 1:
        acc = (acc,)
    mbarrier.arrive(memory.v_empty.index(count % STAGES))
    return acc


@gluon.jit
def _by_rows(x, acc):
    """x ``[ROWS]`` as a column ``[ROWS, 1]`` in the layout of ``acc``."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout))[:, None]


@triton.constexpr_function
def packed_layout(width):
    """Layout for loading and storing rows, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def fetch_queries(place, q_ptr, s_q, first, row, R, L, COLUMN: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr):
    """Copy columns ``[COLUMN, COLUMN + WIDTH)`` of a warp group's 64 rows of queries to shared memory at ``place``."""
    packed: gl.constexpr = packed_layout(WIDTH)
    i, r, real = tile_rows(first, GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, packed)), L, R, 2 * ROWS)
    at = row.b.to(gl.int64) * s_q[0] + (row.head.to(gl.int64) * R + r) * s_q[1] + i.to(gl.int64) * s_q[2] + COLUMN
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, packed))[None, :]
    place.store(gl.load(q_ptr + at[:, None] + d, mask=real[:, None], other=0.0))  # [ROWS, WIDTH]


@gluon.jit
def load_block(sources, row, start, rings, full, empty, count, STAGES: gl.constexpr):
    """Load rows from ``start`` on into a slot of the rings, once both warp groups have released the slot.

    sources: a descriptor for each ring, or a single one, whose blocks of columns go to the rings in order.
    """
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
    if len(sources) == 1:
        mbarrier.expect(full.index(stage), len(rings) * sources[0].block_type.nbytes)
    else:
        mbarrier.expect(full.index(stage), sources[0].block_type.nbytes + sources[1].block_type.nbytes)
    for n in gl.static_range(len(rings)):
        source = sources[n] if len(sources) > 1 else sources[0]
        column = 0 if len(sources) > 1 else n * source.block_shape[3]
        at = [row.b, row.head, start, column]
        tma.async_copy_global_to_shared(source, at, full.index(stage), rings[n].index(stage))


@gluon.jit
def store_tile(q, acc, online, pointers, places, packed_j, first, row, K, R, L):
    """Store the rows of a warp group: outputs, and natural log-sum-exps; 0 and -inf for rows that saw no key.

    acc: the accumulators with all values. pointers: to outputs and log-sum-exps, and their length in queries. places:
    query and query head of each row, and whether the row counts. packed_j: row numbers in `packed_layout`. Outputs go
    through the shared memory of the queries q, so that whole rows are stored; they lie as
    `condense.ops.triton.attend_call.results` makes them.
    """
    out_ptr, lse_ptr, length = pointers
    i, r, real = places
    WIDTH: gl.constexpr = acc[0].shape[1]
    packed: gl.constexpr = packed_layout(WIDTH)
    safe = gl.where(online.total > 0, online.total, 1.0)
    lse = gl.where(online.total > 0, (online.m + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    b, head = row.b.to(gl.int64), row.head * R
    gl.store(lse_ptr + (b * K * R + head + r) * length + i, lse, mask=real)
    safe = _by_rows(safe, acc[0])  # [ROWS, 1]
    if len(acc) == 1:  # frees the accumulator's registers for the addresses that are computed next
        q[0].store((acc[0] / safe).to(out_ptr.dtype.element_ty))
    i, r, real = tile_rows(first, packed_j, L, R, 2 * ROWS)
    at = ((b * length + i) * (K * R) + head + r) * (len(acc) * WIDTH)
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, packed))[None, :]
    for part in gl.static_range(len(acc)):
        if len(acc) > 1:
            q[part].store((acc[part] / safe).to(out_ptr.dtype.element_ty))
        gl.store(out_ptr + at[:, None] + part * WIDTH + d, q[part].load(packed), mask=real[:, None])
