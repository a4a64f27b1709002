"""Kernels for sums of values after each whole group: within blocks of sums, then with what earlier blocks add up to.

Neither uses atomics, so results are deterministic.

Shapes: B rows, K KV heads, N tokens, n groups of g tokens, D width. A block is ``tiles`` tiles of BS sums, of which a
program owns BD columns; sum 0 is the one before all groups. Strides are in elements, those of the width are 1.
"""

import triton
import triton.language as tl

# totals of blocks that are loaded at once
_TOTALS = tl.constexpr(64)
# not specialised: these numbers change from call to call, and a new value must not compile a new kernel
_VARYING = ["s_cb", "start", "N", "n", "tiles"]


@triton.jit
def _place(K, D: tl.constexpr, BD: tl.constexpr):
    """Block, row, KV head, both as one number, and columns of a program."""
    parts: tl.constexpr = (D + BD - 1) // BD
    at, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    return at // parts, row // K, row % K, row, at % parts * BD + tl.arange(0, BD)


@triton.jit(do_not_specialize=_VARYING)
def block_sums_kernel(
    v_ptr, columns_ptr, before_ptr, sums_ptr, totals_ptr, s_vb, s_vk, s_vn, s_cb, s_bb, s_bk, start, K, N, n, tiles,
    g: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the sums within each block to sums, float64 ``[B, K, 1 + n, D]``, and its last one to totals, float64
    ``[B, K, blocks, D]``.

    columns: first column of each group, int32 ``[B|1, n]``; None if groups follow one another from ``start`` on. BT:
    tokens of a group that are loaded at once.
    """
    block, b, kvh, row, d = _place(K, D, BD)
    v_ptr += b * s_vb + kvh * s_vk + d
    total = tl.load(before_ptr + b * s_bb + kvh * s_bk + d, mask=(d < D) & (block == 0), other=0.0)  # [BD]
    for tile in range(tiles):
        i = (block * tiles + tile) * BS + tl.arange(0, BS)
        is_group, x = (i > 0) & (i <= n), tl.zeros([BS, BD], tl.float64)
        if columns_ptr is None:
            begin = start + (i - 1) * g
        else:
            begin = tl.load(columns_ptr + b * s_cb + i - 1, mask=is_group, other=0)
        for t0 in range(0, g, BT):
            for t in tl.static_range(BT):
                there = is_group & (t0 + t < g)
                token = tl.minimum(begin + t0 + t, N - 1).to(tl.int64)
                v = tl.load(v_ptr + (token * s_vn)[:, None], mask=there[:, None] & (d < D)[None, :], other=0.0)
                x += v.to(tl.float32).to(tl.float64)
        at = sums_ptr + ((row * (n + 1) + i) * D)[:, None] + d[None, :]
        tl.store(at, total[None, :] + tl.cumsum(x, 0), mask=(i <= n)[:, None] & (d < D)[None, :])
        total += tl.sum(x, 0)
    blocks = (n + tiles * BS) // (tiles * BS)
    tl.store(totals_ptr + (row * blocks + block) * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=_VARYING)
def add_blocks_kernel(
    totals_ptr, counts_ptr, sums_ptr, means_ptr, s_cb, K, n, tiles,
    D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the totals of earlier blocks to sums, in place, and write means, float32 ``[B, K, 1 + n, D]``.

    counts: what to divide sums by, int64 ``[B|1, 1 + n]``.
    """
    block, b, _, row, d = _place(K, D, BD)
    blocks, x = (n + tiles * BS) // (tiles * BS), tl.zeros([_TOTALS, BD], tl.float64)
    for lo in range(0, block, _TOTALS):
        i = lo + tl.arange(0, _TOTALS)
        at = totals_ptr + ((row * blocks + i) * D)[:, None] + d[None, :]
        x += tl.load(at, mask=(i < block)[:, None] & (d < D)[None, :], other=0.0)
    earlier = tl.sum(x, 0)
    for tile in range(tiles):
        i = (block * tiles + tile) * BS + tl.arange(0, BS)
        at, there = ((row * (n + 1) + i) * D)[:, None] + d[None, :], (i <= n)[:, None] & (d < D)[None, :]
        sums = tl.load(sums_ptr + at, mask=there, other=0.0) + earlier[None, :]
        tl.store(sums_ptr + at, sums, mask=there)
        count = tl.load(counts_ptr + b * s_cb + i, mask=i <= n, other=1).to(tl.float64)
        tl.store(means_ptr + at, (sums / count[:, None]).to(tl.float32), mask=there)
