"""Kernel of Recall's decode step that scores the index of closed groups.

Shapes and names as in `condense.ops.triton.recall_step_kernels`. F rows of the index per group. A row is read as C
words of 16 bits, PC the same as a power of two; a word holds the codes of PARTS columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device.address import form_row, head_rows, part_at
from condense.ops.triton.recall_close_kernels import row_of_step


@triton.constexpr_function
def _first_column(part, D, BITS):
    """First of the key columns whose codes stand in this part of the words."""
    return part if BITS >= 8 else part // 2 + part % 2 * (D // 2)


@triton.jit
def _queries(
    q_ptr, s_qh, r, R, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, part: tl.constexpr, BITS: tl.constexpr
):
    """Columns ``[BR, P]`` of query heads r of one KV head that go with one part of the index's words."""
    STRIDE: tl.constexpr = 1 if BITS == 16 else 2
    d = _first_column(part, D, BITS) + STRIDE * tl.arange(0, P)
    there = (r < R)[:, None] & (tl.arange(0, P) < C)[None, :]
    return tl.load(q_ptr + r.to(tl.int64)[:, None] * s_qh + d[None, :], mask=there, other=0.0)


@triton.constexpr_function
def _half_asm(part, BITS):
    """Assembly that turns a part's codes of two words into float16: ``1024.0 | code``, minus 1024.0."""
    digits = 0x00FF00FF if BITS == 8 else 0x000F000F
    return f"""{{
        .reg .b32 kilo;
        mov.b32 kilo, 0x64006400;
        shr.b32 $0, $1, {part * BITS};
        lop3.b32 $0, $0, {digits}, kilo, 0xEA;
        sub.rn.f16x2 $0, $0, kilo;
    }}"""


@triton.jit
def _codes_of(words, part: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Codes in bits ``[part * BITS, (part + 1) * BITS)`` of int16 words."""
    if ASM and dtype == tl.float16:
        return tl.inline_asm_elementwise(_half_asm(part, BITS), "=r,r", [words], tl.float16, True, 2)
    else:
        return ((words >> (part * BITS)) & (2**BITS - 1)).to(dtype)


@triton.jit
def _index_products(
    codes_ptr, at, queries, row, C: tl.constexpr, PC: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Products ``[BG, BR]`` of one row of each group's index, which begins at ``at``, with the queries; of these one
    tile per part.
    """
    c = tl.arange(0, PC)
    at = codes_ptr + (at + row * C)[:, None] + c[None, :]
    codes = tl.load(at) if C == PC else tl.load(at, mask=(c < C)[None, :], other=0)
    if BITS == 16:
        s = tl.dot(codes, tl.trans(queries[0]), input_precision=PRECISION)
    else:
        s = tl.zeros([codes.shape[0], queries[0].shape[0]], tl.float32)
        for part in tl.static_range(16 // BITS):
            tile = _codes_of(codes, part, BITS, queries[0].dtype, ASM)
            s = tl.dot(tile, tl.trans(queries[part]), s, input_precision=PRECISION)
    return s


@triton.jit
def _positive(queries):
    return [tl.where(x > 0, x, tl.zeros_like(x)) for x in queries]


@triton.jit
def _negative(queries):
    return [tl.where(x < 0, x, tl.zeros_like(x)) for x in queries]


@triton.jit
def _grid_of(grid_ptr, at, closed, BITS: tl.constexpr):
    """Steps and zeros of groups, 0 if no group is closed; for an index of 16 bits two tensors that are not read."""
    if BITS < 16:
        some = closed > 0
        return tl.load(grid_ptr + at, mask=some, other=0.0), tl.load(grid_ptr + at + 1, mask=some, other=0.0)
    else:
        return at, at


@triton.jit
def _found(far_ptr, grid_ptr, group, closed, FAR: tl.constexpr):
    """Find groups: numbers of rows, or offsets of records in bytes; and offsets of their grids.

    Places beyond the closed groups read the last one again.
    """
    row = tl.minimum(group, closed - 1)
    if FAR is None:
        return row, row * 2
    else:
        record = form_row(far_ptr, row, closed > 0, FAR)
        return record, part_at(grid_ptr, record)


@triton.jit
def recall_score_kernel(
    q_ptr, codes_ptr, grid_ptr, seen_ptr, real_ptr, score_ptr, top_ptr, total_ptr, far_ptr, before_ptr, arrived_ptr,
    s_qb, s_qh, K, R, G, window, scale,
    g: tl.constexpr, D: tl.constexpr, INDEX: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, GROUPS: tl.constexpr,
    HAS_REAL: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write index scores of closed groups, float32 ``[B, H, GROUPS]``; and for every split the largest score, and the
    sum of ``2 ** (score - largest)``.

    Grid (S, B * K, tiles of BR query heads). If the index is quantised, ``q . (zero + step * code)`` is computed as
    ``zero * sum(q) + step * (q . code)``. far: table of the pages of records, for which scores are ``[H, G]``, with the
    groups of a row from its ``start`` on; arrived then becomes 0, for the kernel that chooses. None for arrays.
    """
    split, S, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    b, kvh = head // K, head % K
    this = row_of_step(seen_ptr, real_ptr, before_ptr, b, window, G, g, HAS_REAL, FAR is not None)
    t, all_closed, closed = this.t, this.all_closed, this.closed
    tiles = tl.cdiv(closed, BG)
    BITS: tl.constexpr = INDEX.bits
    PC: tl.constexpr = INDEX.words_tile
    m: tl.constexpr = INDEX.blocks
    F: tl.constexpr = 2 * m
    PARTS: tl.constexpr = 16 // BITS
    C: tl.constexpr = D // PARTS
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    q_ptr += b * s_qb + kvh * R * s_qh
    codes_ptr += head_rows(codes_ptr, head, kvh, G, F * C, FAR)
    grid_ptr += head_rows(grid_ptr, head, kvh, G, 2, FAR)
    if FAR is not None:
        far_ptr += b * FAR.s_table
        if (split == 0) & (tl.program_id(2) == 0):
            tl.store(arrived_ptr + head, 0)
    queries = ()
    for part in tl.static_range(PARTS):
        queries = queries + (_queries(q_ptr, s_qh, r, R, D, C, PC, part, BITS),)  # noqa: RUF005
    sum_q = tl.zeros([BR], tl.float32)
    unit = tl.full([BR], 1.0, tl.float32)
    if BITS < 16:
        largest = tl.zeros([BR], tl.float32)
        for part in tl.static_range(PARTS):
            x = queries[part].to(tl.float32)
            sum_q += tl.sum(x, 1)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        if q_ptr.dtype.element_ty == tl.bfloat16:
            # codes become float16 with half the work of bfloat16; queries are scaled into the range of float16 by a
            # power of two, which keeps their digits
            unit = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 2.0**-100))))
            queries = [(x.to(tl.float32) / unit[:, None]).to(tl.float16) for x in queries]
    up, down = _positive(queries), _negative(queries)
    if EARLY:
        gdc_launch_dependents()
        # the kernel before this one closes a group, and writes its index; in pages, one that another row may read too
        if (FAR is not None) | (t + 1 - window == all_closed * g):
            gdc_wait()
    lo, hi = tiles * split // S, tiles * (split + 1) // S
    i = tl.arange(0, BG)
    # found and loaded one tile ahead
    record, grid_at = _found(far_ptr, grid_ptr, lo * BG + i, closed, FAR)
    step, zero = _grid_of(grid_ptr, grid_at, closed, BITS)
    top = tl.full([BG, BR], float("-inf"), tl.float32)
    total = tl.zeros([BG, BR], tl.float32)
    for tile in range(lo, hi):
        group = tile * BG + i
        inside = group < closed
        place = tl.minimum(group, closed - 1) if FAR is None else record
        record, grid_at = _found(far_ptr, grid_ptr, group + BG, closed, FAR)
        next_step, next_zero = _grid_of(grid_ptr, grid_at, closed, BITS)
        codes_at = place.to(tl.int64) * (F * C) if FAR is None else part_at(codes_ptr, place)
        best = tl.full([BG, BR], float("-inf"), tl.float32)
        for block in tl.static_range(m):
            # programmatic launches and this assembly are what a GPU has and the interpreter has not
            s = _index_products(codes_ptr, codes_at, down, block, C, PC, BITS, PRECISION, EARLY)
            s += _index_products(codes_ptr, codes_at, up, m + block, C, PC, BITS, PRECISION, EARLY)
            if BITS < 16:
                s = s * (step[:, None] * (unit * scale)[None, :]) + zero[:, None] * (sum_q * scale)[None, :]
            else:
                s *= scale
            best = tl.maximum(best, s)
        if FAR is None:
            at = (head * R + r)[None, :] * GROUPS + group[:, None]
        else:
            at = (kvh * R + r)[None, :] * G + (this.start + group)[:, None]
        tl.store(score_ptr + at, best, mask=inside[:, None] & (r < R)[None, :])
        # kept per place in a tile: to join them, warps would wait for each other
        best = tl.where(inside[:, None], best, float("-inf"))
        larger = tl.maximum(top, best)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(top - safe) + tl.exp2(best - safe)
        top, step, zero = larger, next_step, next_zero
    larger = tl.max(top, 0)
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    at = (head * R + r) * S + split
    tl.store(top_ptr + at, larger, mask=r < R)
    tl.store(total_ptr + at, tl.sum(total * tl.exp2(top - safe[None, :]), 0), mask=r < R)
    if EARLY:
        # a kernel that waits for this one also needs what the one before this one wrote
        gdc_wait()
