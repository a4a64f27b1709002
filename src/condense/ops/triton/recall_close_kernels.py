"""Kernel of Recall's decode step that reads the new token, and closes a group if the token completes one.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.recall import index
from condense.ops.triton.device.address import Tokens, form_row, part_at, token_rows
from condense.ops.triton.device.codes import row_width
from condense.ops.triton.device.entry import (
    Buffer,
    Chunk,
    Queries,
    RequestPages,
    make_entries,
    matched_bias,
    mean_query,
    put_entry,
    summary_query,
)
from condense.ops.triton.device.parts import load_row, store_row
from condense.ops.triton.recall_store_kernels import chunk_tokens, put_keys, put_values


class Index(NamedTuple):
    """The constants of an index.

    blocks: per group. tokens: per block. bits: per number. As powers of two: tokens_tile, tokens per block;
    columns_tile, columns of a row where it is written (bytes, if quantised); words_tile, where it is read (words of 16
    bits).
    """

    blocks: int
    tokens: int
    bits: int
    tokens_tile: int
    columns_tile: int
    words_tile: int


class StepRow(NamedTuple):
    """The task of a step in one row.

    t: position of the new token. live: whether there is one. all_closed: closed groups. closed: those that there is
    room for. start: place of the row's first group in scratch memory that all rows share; 0 if each has its own.
    """

    t: Any
    live: Any
    all_closed: Any
    closed: Any
    start: Any


_MARGIN = tl.constexpr(index.MARGIN)
_REACH = tl.constexpr(index.REACH)
_TINY = tl.constexpr(2.0**-126)


@triton.jit
def after_the_last(EARLY: tl.constexpr):
    """Wait until the kernel before this one has ended, then let the next one be launched."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_of_step(
    seen_ptr, real_ptr, before_ptr, b, window, G, g: tl.constexpr, HAS_REAL: tl.constexpr, PAGED: tl.constexpr
):  # fmt: skip
    """The `StepRow` of row b. G: groups that there is room for, of this row; with ``before`` of all rows together.

    before: tokens of the rows before each; None where each row has room of its own. PAGED: ``seen`` counts the new
    token, and is 0 for rows that have none.
    """
    t = tl.load(seen_ptr + b).to(tl.int32)
    if PAGED:
        t -= 1
    live = t >= 0
    if HAS_REAL:
        live = live & (tl.load(real_ptr + b) != 0)
    closed = tl.where(live, tl.maximum(t + 1 - window, 0) // g, 0)
    if before_ptr is None:
        return StepRow(t, live, closed, tl.minimum(closed, G), 0)
    else:
        start = (tl.load(before_ptr + b) // g).to(tl.int32)
        return StepRow(t, live, closed, tl.where(start + closed <= G, closed, 0), start)


@triton.jit
def _block(keys, start, t, LO: tl.constexpr, D: tl.constexpr, INDEX: tl.constexpr, NEAR: tl.constexpr):
    """Lowest and highest key of the block that begins at position ``start``; columns from LO on."""
    i = tl.arange(0, INDEX.tokens_tile)
    inside = i < INDEX.tokens
    x = chunk_tokens(keys, start + i, t, inside, LO, D, INDEX.columns_tile, NEAR)
    low = tl.min(tl.where(inside[:, None], x, float("inf")), 0)
    return low, tl.max(tl.where(inside[:, None], x, float("-inf")), 0)


@triton.jit
def _codes(x, step, zero, LEVELS: tl.constexpr, UPWARDS: tl.constexpr):
    """Codes of x, rounded up or down as in `condense.ops.recall.build_index`."""
    position = tl.div_rn(x - zero, tl.zeros_like(x) + step)
    position = tl.ceil(position + _MARGIN) if UPWARDS else tl.floor(position - _MARGIN)
    return tl.minimum(tl.maximum(position, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _put_index(keys, codes_ptr, grid_ptr, first, t, D: tl.constexpr, INDEX: tl.constexpr, NEAR: tl.constexpr):
    """Write the index of the group that begins at position ``first``."""
    BITS: tl.constexpr = INDEX.bits
    PARTS: tl.constexpr = 2 if BITS == 4 else 1
    C: tl.constexpr = D // PARTS
    c = tl.arange(0, INDEX.columns_tile)
    lowest = tl.full([], float("inf"), tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    step, zero = 1.0, 0.0
    if BITS < 16:
        for part in tl.static_range(PARTS):
            for block in range(INDEX.blocks):
                low, high = _block(keys, first + block * INDEX.tokens, t, part * C, D, INDEX, NEAR)
                lowest = tl.minimum(lowest, tl.min(tl.where(c < C, low, float("inf")), 0))
                largest = tl.maximum(largest, tl.max(tl.where(c < C, high, float("-inf")), 0))
        LEVELS: tl.constexpr = 2**BITS - 1
        zero = lowest
        step = tl.maximum(tl.div_rn(largest - zero, LEVELS * 1.0) * _REACH, _TINY)
        tl.store(grid_ptr, step)
        tl.store(grid_ptr + 1, zero)
    for block in range(INDEX.blocks):
        low, high = _block(keys, first + block * INDEX.tokens, t, 0, D, INDEX, NEAR)
        if BITS == 16:
            codes_low, codes_high = low, high
        else:
            codes_low = _codes(low, step, zero, LEVELS, False)
            codes_high = _codes(high, step, zero, LEVELS, True)
        if BITS == 4:
            low, high = _block(keys, first + block * INDEX.tokens, t, C, D, INDEX, NEAR)
            codes_low += _codes(low, step, zero, LEVELS, False) * 16
            codes_high += _codes(high, step, zero, LEVELS, True) * 16
        element = codes_ptr.dtype.element_ty
        tl.store(codes_ptr + block * C + c, codes_low.to(element), mask=c < C)
        tl.store(codes_ptr + (INDEX.blocks + block) * C + c, codes_high.to(element), mask=c < C)


@triton.jit
def _put_token(tokens, t, D: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """Write the new token to its row."""
    d = tl.arange(0, P)
    new = tl.load(tokens.new + d, mask=d < D, other=0.0)
    tl.store(tokens.rows + token_rows(tokens.place, t, None, D, NEAR) + d, new, mask=d < D)


@triton.jit
def _put_group(
    tokens, store_ptr, first, t, g: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """Write the tokens of the group that begins at position ``first`` to its place in the store, as they are."""
    d = tl.arange(0, P)
    for start in range(0, g, 16):
        i = start + tl.arange(0, 16)
        x = chunk_tokens(tokens, first + i, t, i < g, 0, D, P, NEAR)
        at = i[:, None] * WIDTH + d[None, :]
        tl.store(store_ptr + at, x.to(store_ptr.dtype.element_ty), mask=(i < g)[:, None] & (d < D)[None, :])


@triton.jit
def _put_entry(heads, past_queries, entries, ring, biases_ptr, group, chunk, closes, scale, KIND: tl.constexpr):
    """Write the mean of the new token's queries to their ring, if entries need it, and, if the token closes a group,
    the group's entry and bias.
    """
    summary = chunk.k
    if KIND.scored:
        mean = mean_query(heads, KIND.D0, KIND.D1)
        at = (chunk.t % past_queries.size).to(tl.int64)
        store_row(past_queries.q + at * past_queries.s_q, mean, KIND.D0, KIND.D1)
        summary = [x.to(tl.float32) for x in mean]
    if closes:
        if KIND.scored:
            summary = summary_query(mean, past_queries, chunk.t, chunk.size, KIND.D0, KIND.D1)
        key, value = make_entries(entries, ring, chunk, summary, 0.0, 0, False, scale, KIND)
        put_entry(entries, group, key, value, True, KIND)
        if KIND.matched:
            bias = matched_bias(ring, chunk, summary, 0.0, key, scale, KIND)
            tl.store(biases_ptr + group.to(tl.int64) + tl.arange(0, 1), bias)


@triton.jit
def recall_close_kernel(
    q_ptr, k_ptr, v_ptr, entries_k_ptr, entries_v_ptr, codes_ptr, grid_ptr, store_ptr, ring_k_ptr, ring_v_ptr, seen_ptr,
    ring_q_ptr, biases_ptr, real_ptr, arrived_ptr, near_ptr, far_ptr,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, K, R, G, W, N, Q, delay, scale,
    P: tl.constexpr, PV: tl.constexpr, PS: tl.constexpr,
    INDEX: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Write the new token to rings, entries, index and store; grid (B * K, 4): keys, values, index, entry.

    A group is kept once ``delay`` tokens have followed it. PS: columns of bytes of a stored key or value. arrived int32
    ``[B, K]`` becomes 0, for the kernel that chooses; None: it is not needed. near, far: tables of the pages of tokens
    and of records; None for rings and arrays.
    """
    if KIND.early:
        gdc_launch_dependents()
    head, work = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if arrived_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if work == 0:
            tl.store(arrived_ptr + head, 0)
    b, kvh = head // K, head % K
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    DV: tl.constexpr = FORM.DV
    row = row_of_step(seen_ptr, real_ptr, None, b, delay, G, g, KIND.has_real, NEAR is not None)
    t, live, closed = row.t, row.live, row.all_closed
    group = closed - 1
    first = group * g
    closes = live & (t + 1 - delay == closed * g) & (closed > 0) & (closed <= G)
    k_ptr += b * s_kb + kvh * s_kh
    v_ptr += b * s_vb + kvh * s_vh
    place = W
    if NEAR is None:
        ring_k_ptr += head * W * D
        ring_v_ptr += head * W * DV
    else:
        place = near_ptr + b * NEAR.s_table
        ring_k_ptr += kvh * NEAR.s_head
        ring_v_ptr += kvh * NEAR.s_head
        record = kvh * FAR.s_head + form_row(far_ptr + b * FAR.s_table, group, closes, FAR)
    keys, values = Tokens(ring_k_ptr, k_ptr, place), Tokens(ring_v_ptr, v_ptr, place)
    if FAR is None:
        store_ptr += (head * (N // g) + group) * FORM.piece
    else:
        store_ptr += part_at(store_ptr, record)
    if live & (work == 0):
        if closes:
            if FORM.bits == 16:
                _put_group(keys, store_ptr, first, t, g, D, P, D + DV, NEAR)
            else:
                put_keys(keys, store_ptr, first, t, FORM, PS, NEAR)
        _put_token(keys, t, D, P, NEAR)
    if DV > 0:  # noqa: SIM102 - latents have no values of their own
        if live & (work == 1):
            if closes:
                if FORM.bits == 16:
                    _put_group(values, store_ptr + D, first, t, g, DV, PV, D + DV, NEAR)
                else:
                    put_values(values, store_ptr, first, t, FORM, PS, NEAR)
            _put_token(values, t, DV, PV, NEAR)
    if closes & (work == 2):
        F: tl.constexpr = 2 * INDEX.blocks
        C: tl.constexpr = D // 2 if INDEX.bits == 4 else D
        if FAR is None:
            at = head * G + group
            codes_ptr += at * F * C
            grid_ptr += at * 2
        else:
            codes_ptr += part_at(codes_ptr, record)
            grid_ptr += part_at(grid_ptr, record)
        _put_index(keys, codes_ptr, grid_ptr, first, t, D, INDEX, NEAR)
    if live & (work == 3):
        k = load_row(k_ptr, KIND.D0, KIND.D1)
        v = (k[0],) if KIND.latent else load_row(v_ptr, KIND.V0, KIND.V1)
        chunk = Chunk(first, g, t, k, v)
        heads = Queries(q_ptr + b * s_qb + kvh * R * s_qh, s_qh, R)
        past_queries = Queries(ring_q_ptr + head * Q * D, D, Q)
        ROW: tl.constexpr = row_width(D, KIND.entry_bits, k_ptr.dtype.element_ty)
        ROW_V: tl.constexpr = row_width(DV, KIND.entry_bits, k_ptr.dtype.element_ty)
        if FAR is None:
            entries = Buffer(entries_k_ptr + head * G * ROW, entries_v_ptr + head * G * ROW_V, ROW, ROW_V, G)
            ring, slot = Buffer(ring_k_ptr, ring_v_ptr, D, DV, W), group
        else:
            at = part_at(entries_k_ptr, record)
            entries = Buffer(entries_k_ptr + at, entries_v_ptr + at, ROW, ROW_V, G)
            ring = RequestPages(ring_k_ptr, ring_v_ptr, NEAR.s_slot, NEAR.s_slot, place, NEAR.s_page)
            slot = group * 0
        _put_entry(heads, past_queries, entries, ring, biases_ptr + head * G, slot, chunk, closes, scale, KIND)
