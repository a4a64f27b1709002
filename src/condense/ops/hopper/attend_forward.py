"""Forward kernel of attention over a list of sources for Hopper, by the pipeline of `condense.ops.hopper.pipeline`.

Blocks have 128 keys, or 64 in two cases: with a bias, where 128 do not fit into registers, and below 64K keys, where 64
are faster (H200, 8K tokens: 0.36 ms, not 0.41; 32K in 16 documents: 1.05, not 1.20).

The loading warp and both multiplying warp groups compute the same order of key blocks from the same integers: first,
source by source, the blocks that some row sees only in part (where spans begin and end), which need a mask; then the
blocks that every row sees whole.

Queries and keys may be wider than values: their first D0 columns, as many as a value has, and the other D1, both powers
of two, are separate buffers in shared memory, and the scores are the sum of two products.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, N entries of a source,
D0 width of values, D0 + D1 of queries and keys. BN keys per block.
"""

import functools
from collections import namedtuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from condense.ops.hopper import pipeline
from condense.ops.hopper.pipeline import ROWS, Online, Work
from condense.ops.triton.attend_call import AttendCall, AttendShared, results
from condense.ops.triton.device.rule import VARYING, RowSpans, Rule, Start, begins_at_0, tile_rows, visible
from condense.ops.triton.host import LOG2E, cdiv, on_device_of
from condense.ops.triton.launch import Launcher, described, descriptor
from condense.ops.triton.limits import MAX_SOURCES

# blocks of 128 keys are faster than blocks of 64 if a source has at least this many keys
_LONG = 1 << 16
# most bytes of keys and values with which all heads are read side by side: 64 MiB take less time so, 512 MiB more
_SIDE_BY_SIDE = 96 << 20


class Stream(namedtuple("Stream", "lo left inner all edges blocks")):
    """The blocks of keys that a tile reads.

    Per source: lo, first key; left, number of masked blocks before the unmasked ones; inner, number of unmasked blocks;
    all, number of blocks. Over all sources: edges, number of masked blocks; blocks, number of blocks.
    """


class Scores(namedtuple("Scores", "scale levels biases s_bias sizes")):
    """Scale of scores, base 2. Per source: level (added to all scores, base 2), biases, their strides, and its size."""


class View(namedtuple("View", "stream firsts lasts bias_at q piece")):
    """A tile of queries.

    stream: the `Stream` that it reads. firsts, lasts: per source, the span ``[first, last)`` of each row. bias_at: per
    source, offset of the biases. q: the queries. piece: tiles that the program has finished.
    """


@gluon.jit
def _stretch(n: gl.constexpr, first, row, problem, spans, BN: gl.constexpr, KIND: gl.constexpr):
    """lo, left, inner and all of `Stream` for source n and the tile whose first query is ``first``.

    lo and hi never decrease, so the spans of a tile's first and last query bound those of all.
    """
    last = gl.minimum(first + 2 * ROWS // problem.R, problem.L) - 1
    lo, lo_end = visible(n, first, row, spans, KIND)
    hi, hi_end = visible(n, last, row, spans, KIND)
    if begins_at_0(n, KIND):
        return lo, lo, lo_end // BN, gl.cdiv(hi_end, BN)
    else:
        blocks = gl.cdiv(gl.maximum(hi_end - lo, 0), BN)
        left = gl.minimum(gl.cdiv(gl.maximum(hi - lo, 0), BN), blocks)
        return lo, left, gl.maximum(gl.maximum(lo_end - lo, 0) // BN - left, 0), blocks


@gluon.jit
def _stream(first, row, problem, spans, N: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr):
    """The `Stream` of a tile whose first query is ``first``, over N sources."""
    los, lefts, inners, sizes, edges, blocks = (), (), (), (), 0, 0
    for n in gl.static_range(N):
        lo, left, inner, size = _stretch(n, first, row, problem, spans, BN, KIND)
        edges += size - inner
        blocks += size
        los += (lo,)
        lefts += (left,)
        inners += (inner,)
        sizes += (size,)
    # a tile that sees nothing reads one block, all masked
    return Stream(los, lefts, inners, sizes, gl.where(blocks == 0, 1, edges), gl.maximum(blocks, 1))


@gluon.jit
def _block(t, stream, BN: gl.constexpr):
    """Source and first key of block t of a stream."""
    u = t - stream.edges
    source, at = 0, 0
    edge, inner = 0, 0
    for n in gl.static_range(len(stream.lo)):
        left = stream.left[n]
        here = gl.where(u < 0, t >= edge, u >= inner)
        masked = gl.where(t - edge < left, t - edge, t - edge + stream.inner[n])
        block = gl.where(u < 0, masked, left + u - inner)
        source, at = gl.where(here, n, source), gl.where(here, stream.lo[n] + block * BN, at)
        edge += stream.all[n] - stream.inner[n]
        inner += stream.inner[n]
    return source, at


@gluon.jit
def _of_source(source, values):
    """``values[source]`` for a source that is known at run time only."""
    found = values[len(values) - 1]
    for n in gl.static_range(len(values) - 1):
        found = gl.where(source == n, values[n], found)
    return found


@gluon.jit
def _produce(k, k_rest, v, problem, memory, BN: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr):
    """Run the loading warp. k, k_rest, v: descriptors of the sources; k_rest is empty if keys have one part."""
    count = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = pipeline.tile_of_work(work, problem)
        spans = pipeline.spans_of_row(problem.spans, row, KIND)
        stream = _stream(first, row, problem, spans, len(k), BN, KIND)
        for t in range(stream.blocks):
            source, at = _block(t, stream, BN)
            for n in gl.static_range(len(k)):
                if source == n:
                    k_parts = (k[n], k_rest[n]) if len(k_rest) > 0 else (k[n],)
                    pipeline.load_block(k_parts, row, at, memory.k, memory.k_full, memory.k_empty, count, STAGES)
                    pipeline.load_block((v[n],), row, at, memory.v, memory.v_full, memory.v_empty, count, STAGES)
            count += 1


@gluon.jit
def _softmax(s, m, total, t, view, scores, BN: gl.constexpr, MASKED: gl.constexpr, BIASED: gl.constexpr):
    """Online softmax of block t with scores s: its weights, new maximum and sum, factor for earlier values; base 2."""
    source, at = _block(t, view.stream, BN)
    n = at + gl.arange(0, BN, layout=gl.SliceLayout(0, s.type.layout))
    scale, level = scores.scale, _of_source(source, scores.levels)
    if BIASED > 0:
        s = s * scale + level
        for i in gl.static_range(len(scores.sizes)):
            if (BIASED >> i) & 1:
                here = (n < scores.sizes[i]) & (source == i)
                s += gl.load(scores.biases[i] + view.bias_at[i] + n, mask=here, other=0.0)[None, :]
    if MASKED:
        lo, hi = _of_source(source, view.firsts), _of_source(source, view.lasts)  # [ROWS]
        s = gl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), s, float("-inf"))
    return pipeline.softmax_step(s, m, total, level, scale, MASKED, BIASED > 0)


@gluon.jit
def _step(
    online, lo, hi, now, view, scores, memory,
    BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Read blocks ``[lo, hi)`` of a stream. On entry and exit, the values of the last block are not added yet.

    now: number of block ``lo`` among all blocks that the program reads.
    """
    acc, p, m, total = online.acc, online.p, online.m, online.total
    for t in range(lo, hi):
        count = now + t - lo
        s, added = pipeline.start_turn(view.q, p, acc, memory, count, view.piece, BN, STAGES, GROUP)
        s = hopper.warpgroup_mma_wait(1, deps=[s])  # [ROWS, BN]
        mbarrier.arrive(memory.k_empty.index(count % STAGES))
        p, m, total, alpha = _softmax(s, m, total, t, view, scores, BN, MASKED, BIASED)
        acc, p = pipeline.end_turn(added, p, alpha, memory, count, STAGES)
    return Online(acc, p, m, total)


@gluon.jit
def _consume(
    tensors, queries, problem, scores, memory,
    D0: gl.constexpr, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Run a multiplying warp group, which owns 64 of the 128 rows of each tile."""
    q_ptr, s_q, out_ptr, lse_ptr = tensors
    K, R, L = problem.K, problem.R, problem.L
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D0, 16])
    q = [place.index(GROUP) for place in queries]  # [ROWS, D0], [ROWS, D1]
    packed_j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, pipeline.packed_layout(D0)))
    j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, narrow))
    count, piece = 0, 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = pipeline.tile_of_work(work, problem)
        pipeline.fetch_queries(q[0], q_ptr, s_q, first, row, R, L, 0, D0, GROUP)
        if D1 > 0:
            pipeline.fetch_queries(q[1], q_ptr, s_q, first, row, R, L, D0, D1, GROUP)
        hopper.fence_async_shared()

        spans = pipeline.spans_of_row(problem.spans, row, KIND)
        stream = _stream(first, row, problem, spans, len(scores.sizes), BN, KIND)
        i, r, real = tile_rows(first, j, L, R, 2 * ROWS)  # [ROWS]
        b, kvh, firsts, lasts, bias_at = row.b.to(gl.int64), row.head.to(gl.int64), (), (), ()
        for n in gl.static_range(len(stream.lo)):
            lo, hi = visible(n, i, row, spans, KIND)  # [ROWS]
            firsts += (lo,)
            lasts += (hi,)
            bias_at += (b * scores.s_bias[n][0] + kvh * scores.s_bias[n][1],)
        view = View(stream, firsts, lasts, bias_at, q, piece)
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, narrow))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, narrow))
        acc = (gl.zeros([ROWS, D0], gl.float32, wide),)

        s = pipeline.first_scores(q, memory, count, BN, STAGES)  # [ROWS, BN]
        p, m, total, _ = _softmax(s, m, total, 0, view, scores, BN, True, BIASED)  # [ROWS, BN], [ROWS], [ROWS]
        mbarrier.wait(memory.v_full.index(count % STAGES), count // STAGES & 1)
        online = Online(acc, p, m, total)
        whole = gl.maximum(stream.edges, 1)
        online = _step(online, 1, whole, count + 1, view, scores, memory, BN, STAGES, True, BIASED, GROUP)
        online = _step(
            online, whole, stream.blocks, count + whole, view, scores, memory, BN, STAGES, False, BIASED, GROUP
        )
        count, piece = count + stream.blocks, piece + 1
        acc = pipeline.last_values(online, memory, count - 1, STAGES)  # ([ROWS, D0],)
        pipeline.store_tile(q, acc, online, (out_ptr, lse_ptr, L), (i, r, real), packed_j, first, row, K, R, L)


@gluon.jit(do_not_specialize=(*VARYING, "tiles", "works", "side_by_side"))
def attend_fwd_hopper_kernel(
    q_ptr, k0, k1, k2, k3, k0_rest, k1_rest, k2_rest, k3_rest, v0, v1, v2, v3, biases, spans_ptr, out_ptr, lse_ptr,
    s_q, s_bias, s_spans, levels, K, R, L, chunk, window, entries, max_chunks,
    query_start, window_start, padding, first_entries, scale, tiles, works, side_by_side,
    N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, KIND: gl.constexpr, BIASED: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write the results of `condense.ops.triton.attend_forward.attend_fwd_kernel`, which describes the arguments.

    N: number of sources. BIASED: bit n is set if source n has a bias. tiles: tiles of queries. works: tiles times B
    times K. k0_rest to k3_rest: the last D1 columns of the keys, None if D1 is 0.
    """
    k, v = (k0, k1, k2, k3)[:N], (v0, v1, v2, v3)[:N]
    k_rest = (k0_rest, k1_rest, k2_rest, k3_rest)[: N if D1 > 0 else 0]
    sizes = ()
    for n in gl.static_range(N):
        sizes += (k[n].shape[2],)
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    problem = Work(K, R, L, tiles, works, side_by_side, RowSpans(rule, start, spans_ptr, s_spans), 0, 0)
    scores = Scores(scale, levels, biases, s_bias, sizes)

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q0 = gl.allocate_shared_memory(dtype, [2, ROWS, D0], gl.NVMMASharedLayout.get_default_for([ROWS, D0], dtype))
    k0_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D0], k0.layout)
    if D1 == 0:
        queries, k_rings = (q0,), (k0_ring,)
    else:
        q1 = gl.allocate_shared_memory(dtype, [2, ROWS, D1], gl.NVMMASharedLayout.get_default_for([ROWS, D1], dtype))
        queries, k_rings = (q0, q1), (k0_ring, gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D1], k0_rest.layout))
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D0], v0.layout)
    tensors = (q_ptr, s_q, out_ptr, lse_ptr)
    memory = pipeline.memory_of(k_rings, (v_ring,), STAGES)
    gl.warp_specialize([
        (_consume, (tensors, queries, problem, scores, memory, D0, D1, BN, STAGES, KIND, BIASED, 0)),
        (_consume, (tensors, queries, problem, scores, memory, D0, D1, BN, STAGES, KIND, BIASED, 1)),
        (_produce, (k, k_rest, v, problem, memory, BN, STAGES, KIND)),
    ], [4, 1], [240, 24])  # fmt: skip


_FORWARD = Launcher(attend_fwd_hopper_kernel)


@functools.cache
def _shared_layout(width: int) -> gl.NVMMASharedLayout:
    """Layout of 16-bit rows in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=4)


def of_block(x: Tensor, block: list[int]) -> TensorDescriptor:
    """TMA descriptor of tiles of shape ``block`` of x, whose numbers have 16 bits."""
    return descriptor(TensorDescriptor, x, block, layout=_shared_layout(block[3]))


def launch(call: AttendCall, programs: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of 16-bit tensors with at most 128 query heads per KV head.

    Values are 64 or 128 wide, queries and keys as wide or 1.5 times as wide. programs: most programs to start, one per
    multiprocessor.
    """
    shared, (out, lse) = AttendShared(call), results(call.q, call.v)
    q, k, v = shared.q, shared.k, shared.v
    (B, _, L, D), D0, K, R = q.shape, out.shape[3], shared.K, shared.R
    tiles = cdiv(L, 2 * ROWS.value // R)
    works = tiles * B * K
    # bit n is set if source n has a bias; other sources get some pointer, which is not read
    biased = sum(1 << n for n, x in enumerate(shared.biases) if x is not None)
    biases = tuple([lse if x is None else x for x in shared.biases])
    BN, stages = (64, 3) if biased or max(x.shape[2] for x in k) < _LONG else (128, 2)
    described_k, described_v = (described(x, BN, MAX_SOURCES, of_block) for x in (k, v))
    # values have one part
    tensors = (q, *described_k, *described_v[:MAX_SOURCES], biases, shared.spans, out, lse)
    numbers = (
        q.stride()[:3], shared.s_bias, shared.s_spans, shared.levels, K, R, L, *call.rule, call.scale * LOG2E,
        tiles, works, int(sum(x.nbytes for x in (*k, *v)) <= _SIDE_BY_SIDE),
    )  # fmt: skip
    constants = (len(k), D0, D - D0, call.kind, biased, BN, stages)
    with on_device_of(q):
        _FORWARD((min(works, programs), 1, 1), tensors, numbers, constants, pipeline.OPTIONS)
    return out, lse
