"""Recall's attention over a prompt for Hopper: one warp loads, two warp groups multiply in turn.

Computes what `condense.ops.triton.attend_forward.attend_fwd_kernel` does where queries open groups, and is arranged as
`condense.ops.hopper.attend_forward`: a persistent program loops over tiles of ``2 * 64`` rows. A tile reads blocks of
BN keys: first the window, then the tokens of the groups that any of its queries opens, which the loading warp gathers
group by group from the store.

Keys and values are cut into parts of 64 columns, each with a buffer of its own: so one part of one group is contiguous
in shared memory, and one TMA transfer fills it.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, G groups of g tokens, T tiles of Q
queries.
"""

from collections import namedtuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from condense.ops.hopper import pipeline
from condense.ops.hopper.attend_forward import of_block
from condense.ops.hopper.pipeline import ROWS, Online, Work
from condense.ops.triton.attend_call import AttendCall, not_empty, results
from condense.ops.triton.attend_forward import BLOCK
from condense.ops.triton.device.rule import VARYING, RowSpans, Rule, Start, tile_rows, visible
from condense.ops.triton.host import LOG2E, cdiv, on_device_of, whole_rows
from condense.ops.triton.launch import Launcher
from condense.ops.triton.recall_choice import OpenedGroups

PART = gl.constexpr(64)


class RecallForm(namedtuple("RecallForm", "g BN stages kind")):
    """The constants that the kernel is compiled for.

    g: tokens per group. BN: keys per block. stages: slots of the rings. kind: see `condense.ops.triton.device.rule`.
    """


class RecallStream(namedtuple("RecallStream", "window near blocks")):
    """The blocks that a tile reads, in this order.

    window: first key of the window that is read. near: number of blocks of the window. blocks: number of all blocks,
    with those of opened groups.
    """


class RecallView(namedtuple("RecallView", "q lo hi bit words count piece scale")):
    """A tile of queries.

    q: queries in shared memory. Per row: lo, hi, its span in the window; bit, the bit of its query in a word, in the
    layout of `_of_tokens`. words: pointer to one word for each of the ``count`` groups that the tile opens, with a bit
    per query that opens the group. piece: tiles that the program has finished. scale: of scores, base 2.
    """


@triton.constexpr_function
def _of_tokens(BN, g):
    """Layout of ``[ROWS, BN // g, g]``: that of the product ``[ROWS, BN]``, with its columns split into groups."""

    def column(n):
        return [0, n // g, 0] if n >= g else [0, 0, n]

    columns, n = [], 8
    while n < BN:
        columns.append(column(n))
        n *= 2
    return gl.DistributedLinearLayout(
        reg_bases=[column(1), [8, 0, 0], *columns],
        lane_bases=[column(2), column(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[ROWS.value, BN // g, g],
    )


@gluon.jit
def _stream(first, row, count, problem, FORM: gl.constexpr):
    """The `RecallStream` of a tile whose first query is ``first`` and which opens ``count`` groups."""
    KIND: gl.constexpr = FORM.kind
    last = gl.minimum(first + 2 * ROWS // problem.R, problem.L) - 1
    spans = pipeline.spans_of_row(problem.spans, row, KIND)
    lo, _ = visible(1, first, row, spans, KIND)
    _, hi = visible(1, last, row, spans, KIND)
    # a tile that sees nothing reads one block, all masked
    near = gl.maximum(gl.cdiv(gl.maximum(hi - lo, 0), FORM.BN), 1)
    return RecallStream(lo, near, near + gl.cdiv(count * FORM.g, FORM.BN))


@gluon.jit
def _load_groups(source, row, groups, rings, full, empty, count, FORM: gl.constexpr):
    """Load the tokens of ``BN // g`` groups, by their numbers, into the slot of block ``count`` once it is empty."""
    g: gl.constexpr = FORM.g
    stage = count % FORM.stages
    mbarrier.wait(empty.index(stage), count // FORM.stages & 1 ^ 1)
    mbarrier.expect(full.index(stage), FORM.BN // g * len(rings) * source.block_type.nbytes)
    for n in gl.static_range(FORM.BN // g):
        for part in gl.static_range(len(rings)):
            place = rings[part].index(stage).slice(n * g, g, dim=2)
            at = [row.b, row.head, groups[n] * g, part * PART]
            tma.async_copy_global_to_shared(source, at, full.index(stage), place)


@gluon.jit
def _listed(list_ptr, block, count, FORM: gl.constexpr):
    """Numbers of the groups in a block of the list of ``count`` groups; past the end the last one, which no row sees
    there, and 0 for an empty list.
    """
    groups = ()
    for n in gl.static_range(FORM.BN // FORM.g):
        place = gl.minimum(block * (FORM.BN // FORM.g) + n, count - 1)
        groups += (gl.load(list_ptr + gl.maximum(place, 0), mask=count > 0, other=0),)
    return groups


@gluon.jit
def _produce(sources, lists, problem, memory, FORM: gl.constexpr):
    """Run the loading warp. sources: descriptors of keys and values of store and window. lists: `OpenedGroups`."""
    store_k, store_v, window_k, window_v = sources
    at = 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = pipeline.tile_of_work(work, problem)
        tile = (row.b * problem.K + row.head) * problem.tiles + first // (2 * ROWS // problem.R)
        count = gl.load(lists.counts + tile)
        list_ptr = lists.groups + tile.to(gl.int64) * problem.room
        stream = _stream(problem.first + first, row, count, problem, FORM)
        for t in range(stream.near):
            start = stream.window + t * FORM.BN
            pipeline.load_block((window_k,), row, start, memory.k, memory.k_full, memory.k_empty, at, FORM.stages)
            pipeline.load_block((window_v,), row, start, memory.v, memory.v_full, memory.v_empty, at, FORM.stages)
            at += 1
        groups = _listed(list_ptr, 0, count, FORM)
        for t in range(stream.blocks - stream.near):
            # the numbers of the next block's groups are loaded now, because a load from global memory takes long
            next_groups = _listed(list_ptr, t + 1, count, FORM)
            _load_groups(store_k, row, groups, memory.k, memory.k_full, memory.k_empty, at, FORM)
            _load_groups(store_v, row, groups, memory.v, memory.v_full, memory.v_empty, at, FORM)
            groups = next_groups
            at += 1


@gluon.jit
def _words(view, start, FORM: gl.constexpr, OPENED: gl.constexpr):
    """Words ``[BN // g]`` of the groups in the block that begins at opened token ``start``; 0 for the window."""
    g: gl.constexpr = FORM.g
    BN: gl.constexpr = FORM.BN
    if OPENED:
        n = start // g + gl.arange(0, BN // g, layout=gl.SliceLayout(0, gl.SliceLayout(2, _of_tokens(BN, g))))
        return gl.load(view.words + n, mask=n < view.count, other=0)  # [BN // g]
    else:
        return 0


@gluon.jit
def _step(online, count, now, start, view, memory, FORM: gl.constexpr, OPENED: gl.constexpr, GROUP: gl.constexpr):
    """Read ``count`` blocks of one source from key ``start`` on. On entry and exit, the values of the last block are
    not added yet.

    now: number of the first block among all that the program reads. OPENED: the source is the list of opened groups,
    else the window.
    """
    g: gl.constexpr = FORM.g
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.stages
    acc, p, m, total = online.acc, online.p, online.m, online.total
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    word = _words(view, start, FORM, OPENED)
    for t in range(count):
        at = now + t
        s, added = pipeline.start_turn(view.q, p, acc, memory, at, view.piece, BN, STAGES, GROUP)
        # the words of the next block are loaded now, because a load from global memory takes long
        next_word = _words(view, start + (t + 1) * BN, FORM, OPENED)
        if OPENED:
            seen = (word[None, :] & view.bit[:, None]) != 0  # [ROWS, BN // g]
        else:
            n = start + t * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            seen = (n[None, :] >= view.lo[:, None]) & (n[None, :] < view.hi[:, None])  # [ROWS, BN]
        word = next_word
        s = hopper.warpgroup_mma_wait(len(acc), deps=[s])  # [ROWS, BN]
        mbarrier.arrive(memory.k_empty.index(at % STAGES))
        if OPENED:
            of_tokens: gl.constexpr = _of_tokens(BN, g)
            tokens = gl.convert_layout(gl.reshape(s, [ROWS, BN // g, g]), of_tokens, assert_trivial=True)
            tokens = gl.where(gl.expand_dims(seen, 2), tokens, float("-inf"))  # [ROWS, BN // g, g]
            s = gl.convert_layout(gl.reshape(tokens, [ROWS, BN]), layout, assert_trivial=True)
        else:
            s = gl.where(seen, s, float("-inf"))
        p, m, total, alpha = pipeline.softmax_step(s, m, total, 0.0, view.scale, True, False)
        acc, p = pipeline.end_turn(added, p, alpha, memory, at, STAGES)
    return Online(acc, p, m, total)


@gluon.jit
def _consume(tensors, queries, lists, problem, scale, memory, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Run a multiplying warp group, which owns 64 of the 128 rows of each tile."""
    BN: gl.constexpr = FORM.BN
    KIND: gl.constexpr = FORM.kind
    q_ptr, s_q, out_ptr, lse_ptr, length = tensors
    K, R, L = problem.K, problem.R, problem.L
    PARTS: gl.constexpr = len(queries)
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, narrow)
    q = [place.index(GROUP) for place in queries]
    packed_j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, pipeline.packed_layout(PART)))
    j = GROUP * ROWS + gl.arange(0, ROWS, layout=of_rows)
    Q = 2 * ROWS // R
    at, piece = 0, 0
    for work in range(gl.program_id(0), problem.works, gl.num_programs(0)):
        first, row = pipeline.tile_of_work(work, problem)
        tile = ((row.b * K + row.head) * problem.tiles + first // Q).to(gl.int64)
        first += problem.first
        count = gl.load(lists.counts + tile)
        for part in gl.static_range(PARTS):
            pipeline.fetch_queries(q[part], q_ptr, s_q, first, row, R, L, part * PART, PART, GROUP)
        hopper.fence_async_shared()
        stream = _stream(first, row, count, problem, FORM)
        spans = pipeline.spans_of_row(problem.spans, row, KIND)
        i, r, real = tile_rows(first, j, L, R, 2 * ROWS)
        lo, hi = visible(1, i, row, spans, KIND)  # [ROWS]
        bit = gl.full([ROWS], 1, lists.words.dtype.element_ty, of_rows) << ((i - problem.first) % Q)
        bit = gl.convert_layout(bit, gl.SliceLayout(1, gl.SliceLayout(2, _of_tokens(BN, FORM.g))))
        view = RecallView(q, lo, hi, bit, lists.words + tile * problem.room, count, piece, scale)
        m, total = gl.full([ROWS], float("-inf"), gl.float32, of_rows), gl.zeros([ROWS], gl.float32, of_rows)
        # the first block, which is in the window
        s = pipeline.first_scores(q, memory, at, BN, FORM.stages)  # [ROWS, BN]
        n = stream.window + gl.arange(0, BN, layout=gl.SliceLayout(0, narrow))
        s = gl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), s, float("-inf"))
        p, m, total, _ = pipeline.softmax_step(s, m, total, 0.0, scale, True, False)  # [ROWS, BN], [ROWS], [ROWS]
        mbarrier.wait(memory.v_full.index(at % FORM.stages), at // FORM.stages & 1)
        acc = ()
        for _ in gl.static_range(PARTS):
            acc += (gl.zeros([ROWS, PART], gl.float32, wide),)
        online = Online(acc, p, m, total)
        online = _step(online, stream.near - 1, at + 1, stream.window + BN, view, memory, FORM, False, GROUP)
        online = _step(online, stream.blocks - stream.near, at + stream.near, 0, view, memory, FORM, True, GROUP)
        at, piece = at + stream.blocks, piece + 1
        acc = pipeline.last_values(online, memory, at - 1, FORM.stages)
        pipeline.store_tile(q, acc, online, (out_ptr, lse_ptr, length), (i, r, real), packed_j, first, row, K, R, L)


@gluon.jit(do_not_specialize=(*VARYING, *BLOCK, "tiles", "works"))
def recall_fwd_hopper_kernel(
    q_ptr, store_k, store_v, window_k, window_v, group_ptr, word_ptr, count_ptr, starts_ptr, out_ptr, lse_ptr,
    s_q, K, L, first, stop, room,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, tiles, works,
    R: gl.constexpr, PARTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Write what `condense.ops.triton.attend_forward.attend_fwd_kernel` does for queries ``[first, stop)``.

    Keys and values are ``PARTS * 64`` wide, and a block of keys holds whole groups. tiles: tiles of these queries.
    works: tiles times B times K.
    """
    BN: gl.constexpr = FORM.BN
    STAGES: gl.constexpr = FORM.stages
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    problem = Work(K, R, stop, tiles, works, False, RowSpans(rule, start, starts_ptr, 0), first, room)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    of_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], dtype)
    queries, k_rings, v_rings = (), (), ()
    for _ in gl.static_range(PARTS):
        queries += (gl.allocate_shared_memory(dtype, [2, ROWS, PART], of_queries),)
        k_rings += (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, PART], window_k.layout),)
        v_rings += (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, PART], window_v.layout),)
    sources = (store_k, store_v, window_k, window_v)
    tensors, lists = (q_ptr, s_q, out_ptr, lse_ptr, L), OpenedGroups(group_ptr, word_ptr, count_ptr)
    memory = pipeline.memory_of(k_rings, v_rings, STAGES)
    gl.warp_specialize([
        (_consume, (tensors, queries, lists, problem, scale, memory, FORM, 0)),
        (_consume, (tensors, queries, lists, problem, scale, memory, FORM, 1)),
        (_produce, (sources, lists, problem, memory, FORM)),
    ], [4, 1], [232, 40])  # fmt: skip


_FORWARD = Launcher(recall_fwd_hopper_kernel)
# keys per block, and blocks that the rings hold
_KEYS, _STAGES = 64, 6


def launch_opened(call: AttendCall, programs: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call in which queries open groups. programs: most programs to start."""
    assert call.groups is not None, "queries open groups"
    q, (out, lse) = whole_rows(call.q), results(call.q, call.v)
    (B, H, L, D), K, g = q.shape, call.k[0].shape[1], call.group_size
    call = call._replace(groups=call.groups.expand(-1, K, -1, -1).contiguous())
    R = H // K
    Q = 2 * ROWS.value // R
    keys, of_group = [1, 1, _KEYS, PART.value], [1, 1, g, PART.value]
    store = [of_block(whole_rows(x[0]), of_group) for x in (call.k, call.v)]
    window = [of_block(not_empty(x[1:])[0], keys) for x in (call.k, call.v)]
    with on_device_of(q):
        for first, stop, lists in call.blocks(Q):
            assert lists is not None, "queries open groups"
            tiles = cdiv(stop - first, Q)
            _FORWARD(
                (min(tiles * B * K, programs), 1, 1),
                (q, *store, *window, *lists, q if call.spans is None else call.spans, out, lse),
                (
                    q.stride()[:3], K, L, first, stop, lists.groups.shape[2], *call.rule, call.scale * LOG2E, tiles,
                    tiles * B * K,
                ),
                (R, D // PART.value, RecallForm(g, _KEYS, _STAGES, call.kind)),
                pipeline.OPTIONS,
            )  # fmt: skip
            del lists  # before those of the next block are made
    return out, lse
