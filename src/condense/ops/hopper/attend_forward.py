"""Forward kernel of prefix-band attention for Hopper: one warp loads, two warp groups multiply.

A program walks tiles of ``2 * 64`` rows (see `condense.ops.triton.device.rule`), one after the other. Each of the two
warp groups owns 64 rows: their queries in shared memory, their softmax and their accumulator in registers. Both read
the same keys and values, which one more warp keeps fetching into a ring in shared memory, across tiles of rows too. The
groups take turns to start their products, so one multiplies while the other is at its softmax; within a group, the
scores of the next keys are multiplied while the values of the last ones still are.

On an H200 (128K tokens, H 32, Hkv 8, width 128, group 16, window 1024) 19.9 ms, where
`condense.ops.triton.attend_forward` takes 23.6. Blocks of 128 keys; with a bias those would not fit into registers,
and 64 are taken.

Keys come as one stream of blocks that all three derive from the same integers: first the blocks that some row sees only
in part (prefix end, band start, band end), which need a mask, then those that every row sees whole.

Queries and keys may be wider than values: the first D0 columns, as many as a value has, and the D1 that follow, both a
power of two, lie apart in shared memory, and the scores are the sum of two products.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, M prefix entries, N band tokens,
D0 width of values, D0 + D1 of queries and keys. BN keys per block.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.rule import visible
from condense.ops.triton.host import cdiv

ROWS = gl.constexpr(64)


@gluon.jit
def _rows(first, j, L, R):
    """`condense.ops.triton.device.rule.tile_rows` for rows j of a tile of 128."""
    rows = 2 * ROWS // R * R
    kept = gl.minimum(j, rows - 1)
    i = first + kept // R
    return gl.minimum(i, L - 1), kept % R, (j < rows) & (i < L)


@gluon.jit
def _stream(first, L, R, b, kvh, bounds, s_bounds, start, rule, BN: gl.constexpr, RULE: gl.constexpr):
    """The blocks of keys of a tile whose first query is ``first``, in six integers, and how many blocks those are.

    Bounds never decrease, so a tile's first and last query hold the ends of all.
    """
    b, kvh = b.to(gl.int64), kvh.to(gl.int64)
    last = gl.minimum(first + 2 * ROWS // R, L) - 1
    rep_lo, start_lo, end_lo = visible(first, b, kvh, bounds, s_bounds, start, rule, RULE)
    rep_hi, start_hi, end_hi = visible(last, b, kvh, bounds, s_bounds, start, rule, RULE)
    whole = rep_lo // BN
    prefix_edge = gl.cdiv(rep_hi, BN) - whole
    band = gl.cdiv(gl.maximum(end_hi - start_lo, 0), BN)
    left = gl.minimum(gl.cdiv(gl.maximum(start_hi - start_lo, 0), BN), band)
    inner = gl.maximum(gl.maximum(end_lo - start_lo, 0) // BN - left, 0)
    # a tile that sees nothing reads one block, all masked
    edges = gl.where(whole + prefix_edge + band == 0, 1, prefix_edge + band - inner)
    return (whole, prefix_edge, start_lo, left, inner, edges), edges + whole + inner


@gluon.jit
def _block(t, stream, BN: gl.constexpr):
    """Block t of a stream: whether it lies in the prefix, and its first key."""
    whole, prefix_edge, lo, left, inner, edges = stream
    u = t - edges
    is_prefix = gl.where(u < 0, t < prefix_edge, u < whole)
    in_prefix = gl.where(u < 0, whole + t, u)
    in_band = gl.where(t < prefix_edge + left, t - prefix_edge, t - prefix_edge + inner)
    in_band = gl.where(u < 0, in_band, left + u - whole)
    return is_prefix, gl.where(is_prefix, in_prefix * BN, lo + in_band * BN)


@gluon.jit
def _tile(work, tiles, K, R):
    """First query, batch row and KV head of a piece of work; the last rows see most: they come first."""
    return (tiles - 1 - work % tiles) * (2 * ROWS // R), work // tiles // K, work // tiles % K


@gluon.jit
def _load(parts, b, kvh, start, rings, full, empty, count, STAGES: gl.constexpr):
    """Fetches one block into its place in the rings, as soon as both groups are done with what lies there."""
    stage, phase = count % STAGES, count // STAGES & 1
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if len(parts) == 1:
        mbarrier.expect(full.index(stage), parts[0].block_type.nbytes)
    else:
        mbarrier.expect(full.index(stage), parts[0].block_type.nbytes + parts[1].block_type.nbytes)
    for n in gl.static_range(len(parts)):
        tma.async_copy_global_to_shared(parts[n], [b, kvh, start, 0], full.index(stage), rings[n].index(stage))


@gluon.jit
def _produce(
    entries_k, entries_v, window_k, window_v, bounds, s_bounds, K, R, L, start, rule, tiles, works, rings, barriers,
    BN: gl.constexpr, STAGES: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    k_rings, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    count = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        first, b, kvh = _tile(work, tiles, K, R)
        stream, blocks = _stream(first, L, R, b, kvh, bounds, s_bounds, start, rule, BN, RULE)
        for t in range(blocks):
            is_prefix, at = _block(t, stream, BN)
            if is_prefix:
                _load(entries_k, b, kvh, at, k_rings, k_full, k_empty, count, STAGES)
                _load((entries_v,), b, kvh, at, (v_ring,), v_full, v_empty, count, STAGES)
            else:
                _load(window_k, b, kvh, at, k_rings, k_full, k_empty, count, STAGES)
                _load((window_v,), b, kvh, at, (v_ring,), v_full, v_empty, count, STAGES)
            count += 1


@gluon.jit
def _scores(q, k_rings, k_full, count, BN: gl.constexpr, STAGES: gl.constexpr):
    """Starts the product of queries and one block of keys, both in one or two parts."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage, phase = count % STAGES, count // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = gl.zeros([ROWS, BN], gl.float32, layout)
    for n in gl.static_range(len(q)):
        k = k_rings[n].index(stage).reshape([BN, q[n].shape[1]])
        s = hopper.warpgroup_mma(q[n], k.permute([1, 0]), s, use_acc=n > 0, is_async=True)
    return s


@gluon.jit
def _add_values(p, acc, v_ring, count, BN: gl.constexpr, STAGES: gl.constexpr):
    """Starts adding one block's values, weighted, to the accumulator; they have arrived."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    p = gl.convert_layout(p.to(v_ring.dtype), operand)
    return hopper.warpgroup_mma(p, v_ring.index(count % STAGES).reshape([BN, acc.type.shape[1]]), acc, is_async=True)


@gluon.jit
def _softmax(
    s, m, total, t, stream, seen, bias_ptr, M, scale, level,
    BN: gl.constexpr, MASKED: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax, scores base 2: weights, new maximum and sum, what earlier sums shrink by."""
    rep_end, raw_start, raw_end = seen
    is_prefix, at = _block(t, stream, BN)
    n = at + gl.arange(0, BN, layout=gl.SliceLayout(0, s.type.layout))
    if BIASED:
        s = s * scale + gl.load(bias_ptr + n, mask=(n < M) & is_prefix, other=0.0)[None, :]
    if MASKED:
        lo = gl.where(is_prefix, 0, raw_start)
        hi = gl.where(is_prefix, rep_end, raw_end)
        s = gl.where((n[None, :] >= lo[:, None]) & (n[None, :] < hi[:, None]), s, float("-inf"))
    # scale is positive: scaling the maximum leaves one fused multiply-add per score
    level = gl.where(is_prefix, level, 0.0)
    m_new = gl.maximum(m, gl.max(s, 1) if BIASED else gl.max(s, 1) * scale + level)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(s - m_safe[:, None] if BIASED else s * scale - (m_safe - level)[:, None])
    alpha = gl.exp2(m - m_safe)
    return p, m_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _step(
    acc, p, m, total, lo, hi, count, piece, stream, seen, q, bias_ptr, M, scale, level, rings, barriers, turns,
    BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Blocks ``[lo, hi)`` of a stream; the weights p of the block before are still to be used. count: of block lo."""
    k_rings, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for t in range(lo, hi):
        now = count + t - lo
        mbarrier.wait(turns.index(GROUP), ((now - 1 - piece) & 1) ^ (1 - GROUP))
        s = _scores(q, k_rings, k_full, now, BN, STAGES)
        acc_next = _add_values(p, acc, v_ring, now - 1, BN, STAGES)
        mbarrier.arrive(turns.index(1 - GROUP))
        s = hopper.warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(now % STAGES))
        p, m, total, alpha = _softmax(s, m, total, t, stream, seen, bias_ptr, M, scale, level, BN, MASKED, BIASED)
        # the softmax comes first: p goes through the wait, and the loop in which a barrier waits ends a run of
        # instructions within which the assembler would still move it
        mbarrier.wait(v_full.index(now % STAGES), now // STAGES & 1)
        acc, p = hopper.warpgroup_mma_wait(0, deps=[acc_next, p])
        mbarrier.arrive(v_empty.index((now - 1) % STAGES))
        acc = acc * gl.convert_layout(alpha, rows)[:, None]
    return acc, p, m, total


@triton.constexpr_function
def _packed(width):
    """How rows go to and from memory: 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def _fetch_queries(
    place, q_ptr, s_q, first, b, kvh, L, R, COLUMN: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr
):
    """Columns ``[COLUMN, COLUMN + WIDTH)`` of a group's queries, to shared memory."""
    packed: gl.constexpr = _packed(WIDTH)
    i, r, real = _rows(first, GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, packed)), L, R)
    at = b * s_q[0] + (kvh * R + r) * s_q[1] + i.to(gl.int64) * s_q[2] + COLUMN
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, packed))[None, :]
    place.store(gl.load(q_ptr + at[:, None] + d, mask=real[:, None], other=0.0))


@gluon.jit
def _consume(
    q_ptr, bias_ptr, bounds, out_ptr, lse_ptr, s_q, s_bias, s_bounds, K, R, L, M, start, rule, scale, level, tiles,
    works, queries, rings, barriers, turns,
    D0: gl.constexpr, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RULE: gl.constexpr,
    BIASED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: 64 of the 128 rows of each tile."""
    k_rings, v_ring = rings
    k_full, k_empty, v_full, v_empty = barriers
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D0, 16])
    packed: gl.constexpr = _packed(D0)
    q = [place.index(GROUP) for place in queries]
    packed_j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, packed))
    j = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, narrow))
    count, piece = 0, 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        first, b, kvh = _tile(work, tiles, K, R)
        wide_b, wide_kvh = b.to(gl.int64), kvh.to(gl.int64)
        _fetch_queries(q[0], q_ptr, s_q, first, wide_b, wide_kvh, L, R, 0, D0, GROUP)
        if D1 > 0:
            _fetch_queries(q[1], q_ptr, s_q, first, wide_b, wide_kvh, L, R, D0, D1, GROUP)
        hopper.fence_async_shared()

        stream, blocks = _stream(first, L, R, b, kvh, bounds, s_bounds, start, rule, BN, RULE)
        i, r, real = _rows(first, j, L, R)
        seen = visible(i, wide_b, wide_kvh, bounds, s_bounds, start, rule, RULE)
        bias = bias_ptr + wide_b * s_bias[0] + wide_kvh * s_bias[1]
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, narrow))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, narrow))
        acc = gl.zeros([ROWS, D0], gl.float32, wide)

        s = _scores(q, k_rings, k_full, count, BN, STAGES)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(count % STAGES))
        p, m, total, _ = _softmax(s, m, total, 0, stream, seen, bias, M, scale, level, BN, True, BIASED)
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        whole = gl.maximum(stream[5], 1)
        acc, p, m, total = _step(
            acc, p, m, total, 1, whole, count + 1, piece, stream, seen, q, bias, M, scale, level, rings, barriers,
            turns, BN, STAGES, True, BIASED, GROUP,
        )  # fmt: skip
        acc, p, m, total = _step(
            acc, p, m, total, whole, blocks, count + whole, piece, stream, seen, q, bias, M, scale, level, rings,
            barriers, turns, BN, STAGES, False, BIASED, GROUP,
        )  # fmt: skip
        count, piece = count + blocks, piece + 1
        acc = _add_values(p, acc, v_ring, count - 1, BN, STAGES)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((count - 1) % STAGES))

        safe = gl.where(total > 0, total, 1.0)
        lse = gl.where(total > 0, (m + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
        gl.store(lse_ptr + (wide_b * K * R + wide_kvh * R + r) * L + i, lse, mask=real)
        # through the queries' place in shared memory, to be written in whole rows
        q[0].store((acc / gl.convert_layout(safe, gl.SliceLayout(1, wide))[:, None]).to(dtype))
        i, r, real = _rows(first, packed_j, L, R)
        at = (wide_b * K * R + wide_kvh * R + r) * L + i
        d = gl.arange(0, D0, layout=gl.SliceLayout(0, packed))[None, :]
        gl.store(out_ptr + at[:, None] * D0 + d, q[0].load(packed), mask=real[:, None])


@gluon.jit(do_not_specialize=(*VARYING, "tiles", "works"))
def attend_fwd_hopper_kernel(
    q_ptr, entries_k, entries_k1, entries_v, window_k, window_k1, window_v, bias_ptr, bounds, out_ptr, lse_ptr,
    s_q, s_bias, s_bounds, K, R, L, M, query_start, band_start, pads, offset,
    chunk, window, entries, max_chunks, scale, level, tiles, works,
    D0: gl.constexpr, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RULE: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """See `condense.ops.triton.attend_forward.attend_fwd_kernel`. tiles: of queries; works: tiles times B times K.

    entries_k1, window_k1: the last D1 columns of the keys, None if D1 is 0.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q0 = gl.allocate_shared_memory(dtype, [2, ROWS, D0], gl.NVMMASharedLayout.get_default_for([ROWS, D0], dtype))
    k0_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D0], window_k.layout)
    if D1 == 0:
        queries, k_rings, prefix_keys, band_keys = (q0,), (k0_ring,), (entries_k,), (window_k,)
    else:
        q1 = gl.allocate_shared_memory(dtype, [2, ROWS, D1], gl.NVMMASharedLayout.get_default_for([ROWS, D1], dtype))
        k1_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D1], window_k1.layout)
        queries, k_rings = (q0, q1), (k0_ring, k1_ring)
        prefix_keys, band_keys = (entries_k, entries_k1), (window_k, window_k1)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D0], window_v.layout)
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

    start, rule = (query_start, band_start, pads, offset), (chunk, window, entries, max_chunks)
    rings, barriers = (k_rings, v_ring), (k_full, k_empty, v_full, v_empty)
    gl.warp_specialize([
        (_consume, (
            q_ptr, bias_ptr, bounds, out_ptr, lse_ptr, s_q, s_bias, s_bounds, K, R, L, M, start, rule, scale, level,
            tiles, works, queries, rings, barriers, turns, D0, D1, BN, STAGES, RULE, BIASED, 0,
        )),
        (_consume, (
            q_ptr, bias_ptr, bounds, out_ptr, lse_ptr, s_q, s_bias, s_bounds, K, R, L, M, start, rule, scale, level,
            tiles, works, queries, rings, barriers, turns, D0, D1, BN, STAGES, RULE, BIASED, 1,
        )),
        (_produce, (
            prefix_keys, entries_v, band_keys, window_v, bounds, s_bounds, K, R, L, start, rule, tiles, works, rings,
            barriers, BN, STAGES, RULE,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


def launch_fwd_hopper(
    q: Tensor,
    sources: list[Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    programs: int,
    K: int,
    R: int,
    BIASED: bool,
    **shared: Any,
) -> None:
    """Starts the kernel on 16-bit tensors, at most 128 query heads per KV head.

    Values are 64 or 128 wide, queries and keys as wide or half as wide again.

    sources: prefix k and v, band k and v, none empty. programs: one per multiprocessor. shared:
    the kernel's other arguments.
    """
    B, _, L, D = q.shape
    D0 = out.shape[3]
    D1 = D - D0
    tiles = cdiv(L, 2 * ROWS.value // R)
    works = tiles * B * K
    BN, stages = (64, 3) if BIASED else (128, 2)

    def descriptor(x: Tensor) -> TensorDescriptor:
        swizzle = min(128, x.shape[3] * x.element_size())
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=4)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, BN, x.shape[3]], layout)

    def keys(x: Tensor) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        return descriptor(x[..., :D0]), descriptor(x[..., D0:]) if D1 > 0 else None

    entries_k, entries_v, window_k, window_v = sources
    # 12 warps: 168 registers each to begin with, of which the loading warps give most to the others
    attend_fwd_hopper_kernel[(min(works, programs),)](
        q, *keys(entries_k), descriptor(entries_v), *keys(window_k), descriptor(window_v), out_ptr=out, lse_ptr=lse,
        s_q=q.stride()[:3], K=K, R=R, L=L, tiles=tiles, works=works, D0=D0, D1=D1, BN=BN, STAGES=stages,
        BIASED=BIASED, num_warps=4, maxnreg=168, **shared,
    )  # fmt: skip
