"""Kernel of Recall's decode step that reads the new token, and closes a group if the token completes one.

Shapes and names as in `condense.ops.triton.recall_step_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.recall import index
from condense.ops.triton.device.codes import row_width
from condense.ops.triton.device.entry import (
    Buffer,
    Chunk,
    Queries,
    make_entries,
    matched_bias,
    mean_query,
    put_entry,
    summary_query,
)
from condense.ops.triton.device.parts import load_row, store_row
from condense.ops.triton.recall_store_kernels import put_keys, put_values, ring_tokens


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


class _Ring(NamedTuple):
    """A KV head's ring of keys. keys: pointer to it. new: pointer to the newest key. size: slots."""

    keys: Any
    new: Any
    size: Any


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
def row_of_step(seen_ptr, real_ptr, b, window, G, g: tl.constexpr, HAS_REAL: tl.constexpr):
    """Position of row b's new token, whether there is one, closed groups, and these limited to the buffers' G."""
    t = tl.load(seen_ptr + b).to(tl.int32)
    live = t >= 0
    if HAS_REAL:
        live = live & (tl.load(real_ptr + b) != 0)
    closed = tl.where(live, tl.maximum(t + 1 - window, 0) // g, 0)
    return t, live, closed, tl.minimum(closed, G)


@triton.jit
def _block(ring, start, t, LO: tl.constexpr, D: tl.constexpr, INDEX: tl.constexpr):
    """Lowest and highest key of the block that begins at position ``start``; columns from LO on."""
    i = tl.arange(0, INDEX.tokens_tile)
    inside = i < INDEX.tokens
    x = ring_tokens(ring.keys, ring.new, start + i, t, ring.size, inside, LO, D, INDEX.columns_tile)
    low = tl.min(tl.where(inside[:, None], x, float("inf")), 0)
    return low, tl.max(tl.where(inside[:, None], x, float("-inf")), 0)


@triton.jit
def _codes(x, step, zero, LEVELS: tl.constexpr, UPWARDS: tl.constexpr):
    """Codes of x, rounded up or down as in `condense.ops.recall.build_index`."""
    position = tl.div_rn(x - zero, tl.zeros_like(x) + step)
    position = tl.ceil(position + _MARGIN) if UPWARDS else tl.floor(position - _MARGIN)
    return tl.minimum(tl.maximum(position, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _put_index(ring, codes_ptr, grid_ptr, first, t, D: tl.constexpr, INDEX: tl.constexpr):
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
                low, high = _block(ring, first + block * INDEX.tokens, t, part * C, D, INDEX)
                lowest = tl.minimum(lowest, tl.min(tl.where(c < C, low, float("inf")), 0))
                largest = tl.maximum(largest, tl.max(tl.where(c < C, high, float("-inf")), 0))
        LEVELS: tl.constexpr = 2**BITS - 1
        zero = lowest
        step = tl.maximum(tl.div_rn(largest - zero, LEVELS * 1.0) * _REACH, _TINY)
        tl.store(grid_ptr, step)
        tl.store(grid_ptr + 1, zero)
    for block in range(INDEX.blocks):
        low, high = _block(ring, first + block * INDEX.tokens, t, 0, D, INDEX)
        if BITS == 16:
            codes_low, codes_high = low, high
        else:
            codes_low = _codes(low, step, zero, LEVELS, False)
            codes_high = _codes(high, step, zero, LEVELS, True)
        if BITS == 4:
            low, high = _block(ring, first + block * INDEX.tokens, t, C, D, INDEX)
            codes_low += _codes(low, step, zero, LEVELS, False) * 16
            codes_high += _codes(high, step, zero, LEVELS, True) * 16
        element = codes_ptr.dtype.element_ty
        tl.store(codes_ptr + block * C + c, codes_low.to(element), mask=c < C)
        tl.store(codes_ptr + (INDEX.blocks + block) * C + c, codes_high.to(element), mask=c < C)


@triton.jit
def _put_token(new_ptr, ring_ptr, t, W, D: tl.constexpr, P: tl.constexpr):
    """Write the new token to the ring."""
    d = tl.arange(0, P)
    new = tl.load(new_ptr + d, mask=d < D, other=0.0)
    tl.store(ring_ptr + (t % W).to(tl.int64) * D + d, new, mask=d < D)


@triton.jit
def _put_group(
    ring_ptr, new_ptr, store_ptr, first, t, W,
    g: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the tokens of the group that begins at position ``first`` to its place in the store, as they are."""
    d = tl.arange(0, P)
    for start in range(0, g, 16):
        i = start + tl.arange(0, 16)
        x = ring_tokens(ring_ptr, new_ptr, first + i, t, W, i < g, 0, D, P)
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
    ring_q_ptr, biases_ptr, real_ptr, arrived_ptr, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, K, R, G, W, N, Q, window, scale,
    P: tl.constexpr, PV: tl.constexpr, PS: tl.constexpr,
    INDEX: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write the new token to rings, entries, index and store; grid (B * K, 4): keys, values, index, entry.

    PS: columns of bytes of a stored key or value. arrived int32 ``[B, K]`` becomes 0, for the kernel that chooses.
    """
    if KIND.early:
        gdc_launch_dependents()
    head, work = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if work == 0:
        tl.store(arrived_ptr + head, 0)
    b, kvh = head // K, head % K
    g: tl.constexpr = FORM.g
    D: tl.constexpr = FORM.D
    DV: tl.constexpr = FORM.DV
    t, live, closed, _ = row_of_step(seen_ptr, real_ptr, b, window, G, g, KIND.has_real)
    group = closed - 1
    first = group * g
    closes = live & (t + 1 - window == closed * g) & (closed > 0) & (closed <= G)
    k_ptr += b * s_kb + kvh * s_kh
    v_ptr += b * s_vb + kvh * s_vh
    ring_k_ptr += head * W * D
    ring_v_ptr += head * W * DV
    store_ptr += (head * (N // g) + group) * FORM.piece
    if live & (work == 0):
        if closes:
            if FORM.bits == 16:
                _put_group(ring_k_ptr, k_ptr, store_ptr, first, t, W, g, D, P, D + DV)
            else:
                put_keys(ring_k_ptr, k_ptr, store_ptr, first, t, W, FORM, PS)
        _put_token(k_ptr, ring_k_ptr, t, W, D, P)
    if DV > 0:  # noqa: SIM102 - latents have no values of their own
        if live & (work == 1):
            if closes:
                if FORM.bits == 16:
                    _put_group(ring_v_ptr, v_ptr, store_ptr + D, first, t, W, g, DV, PV, D + DV)
                else:
                    put_values(ring_v_ptr, v_ptr, store_ptr, first, t, W, FORM, PS)
            _put_token(v_ptr, ring_v_ptr, t, W, DV, PV)
    if closes & (work == 2):
        F: tl.constexpr = 2 * INDEX.blocks
        C: tl.constexpr = D // 2 if INDEX.bits == 4 else D
        at = head * G + group
        _put_index(_Ring(ring_k_ptr, k_ptr, W), codes_ptr + at * F * C, grid_ptr + at * 2, first, t, D, INDEX)
    if live & (work == 3):
        k = load_row(k_ptr, KIND.D0, KIND.D1)
        v = (k[0],) if KIND.latent else load_row(v_ptr, KIND.V0, KIND.V1)
        chunk = Chunk(first, g, t, k, v)
        heads = Queries(q_ptr + b * s_qb + kvh * R * s_qh, s_qh, R)
        past_queries = Queries(ring_q_ptr + head * Q * D, D, Q)
        ROW: tl.constexpr = row_width(D, KIND.entry_bits, k_ptr.dtype.element_ty)
        ROW_V: tl.constexpr = row_width(DV, KIND.entry_bits, k_ptr.dtype.element_ty)
        entries = Buffer(entries_k_ptr + head * G * ROW, entries_v_ptr + head * G * ROW_V, ROW, ROW_V, G)
        ring = Buffer(ring_k_ptr, ring_v_ptr, D, DV, W)
        _put_entry(heads, past_queries, entries, ring, biases_ptr + head * G, group, chunk, closes, scale, KIND)
