"""Kernels of one decode step over pages: store the new tokens and entries, attend by splits of the keys, join.

The first kernel writes what the second reads, so that a request may see pages that another one fills in the same step.
All decisions are made on the device, from ``seen``: a request that has seen no token is an unused place of the batch;
its output is 0 and its pages are not touched.

Shapes: R requests, H query heads, K KV heads, r = H / K, S splits, V columns of values, N slots of a page. Pages are as
in `condense.ops.paged`. Scores are base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device.address import page_row
from condense.ops.triton.device.entry import Chunk, Queries, RequestPages, make_entries, mean_query, summary_query
from condense.ops.triton.device.parts import load_row, load_rows, store_row
from condense.ops.triton.device.softmax import add_keys, empty_softmax, join_parts, key_products, store_part


class _Stretch(NamedTuple):
    """The ``count`` slots of a request's pages from slot ``first`` on."""

    first: Any
    count: Any


class _Order(NamedTuple):
    """Tiles of entries and of tokens in the order in which splits share them.

    First the ``old_far`` tiles of entries and the ``old_near`` tiles of tokens that hold nothing that this step stores,
    then the other tiles of entries, ``far_tiles`` in all, and those of tokens.
    """

    far: Any
    near: Any
    far_tiles: Any
    old_far: Any
    old_near: Any


@triton.jit
def _pages(ptr, table_ptr, request, head, strides, KIND: tl.constexpr):
    """The `RequestPages` of one request and KV head; values stand behind keys."""
    s_page, s_head, s_slot, s_table = strides
    k = ptr + head * s_head
    return RequestPages(k, k + (KIND.D0 + KIND.D1), s_slot, s_slot, table_ptr + request * s_table, s_page)


@triton.jit
def _slot(pages, position, PAGE: tl.constexpr):
    """Offset of the row of one position in pages of so many slots."""
    return page_row(pages.table, position, None, PAGE, pages.s_page, pages.s_k)


@triton.jit
def paged_store_kernel(
    q_ptr, k_ptr, v_ptr, seen_ptr, window_ptr, window_table_ptr, entries_ptr, entries_table_ptr, ring_ptr,
    ring_table_ptr, s_qt, s_qh, s_kt, s_kh, s_vt, s_vh, s_wp, s_wh, s_wn, s_wt, s_ep, s_eh, s_en, s_et, s_rp, s_rh,
    s_rn, s_rt, K, R, num_summary, chunk_size, summary_delay, max_chunks, scale,
    KIND: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Store keys, values and mean queries in pages, and the entry of a group that is due; grid (K, R requests, 1).

    RING: slots of a ring, 0 without one.
    """
    if KIND.early:
        gdc_wait()
        # only now: what the next kernel reads before it waits must have been written before this one
        gdc_launch_dependents()
    request, kvh = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    t = tl.load(seen_ptr + request).to(tl.int32) - 1
    if t >= 0:
        window = _pages(window_ptr, window_table_ptr, request, kvh, (s_wp, s_wh, s_wn, s_wt), KIND)
        entries = _pages(entries_ptr, entries_table_ptr, request, kvh, (s_ep, s_eh, s_en, s_et), KIND)
        k = load_row(k_ptr + request * s_kt + kvh * s_kh, KIND.D0, KIND.D1)
        v = (k[0],) if KIND.latent else load_row(v_ptr + request * s_vt + kvh * s_vh, KIND.V0, KIND.V1)
        at = _slot(window, t, KIND.page)
        store_row(window.k + at, k, KIND.D0, KIND.D1)
        if not KIND.latent:
            store_row(window.v + at, v, KIND.V0, KIND.V1)
        # without a ring the newest query is all that a summary needs, and `past` is not read
        past, mean = Queries(q_ptr, s_qh, RING), k
        if KIND.scored:
            mean = mean_query(Queries(q_ptr + request * s_qt + kvh * R * s_qh, s_qh, R), KIND.D0, KIND.D1)
        if RING > 0:
            page = tl.load(ring_table_ptr + request * s_rt).to(tl.int64)
            past = Queries(ring_ptr + page * s_rp + kvh * s_rh, s_rn, RING)
            store_row(past.q + (t % RING) * s_rn, mean, KIND.D0, KIND.D1)
        complete = t + 1 - summary_delay
        if (complete > 0) & (complete % chunk_size == 0) & (complete // chunk_size <= max_chunks):
            summary = [x.to(tl.float32) for x in mean]
            if RING > 0:
                summary = summary_query(mean, past, t, num_summary, KIND.D0, KIND.D1)
            chunk = Chunk(complete - chunk_size, chunk_size, t, k, v)
            entry_k, entry_v = make_entries(entries, window, chunk, summary, summary, 0, True, scale, KIND)
            # an entry stands in slot `t // chunk_size` of the token t that completes its summary:
            # `condense.serving.plan`
            at = _slot(entries, t // chunk_size, KIND.far_page)
            store_row(entries.k + at, entry_k, KIND.D0, KIND.D1)
            if not KIND.latent:
                store_row(entries.v + at, entry_v, KIND.V0, KIND.V1)


@triton.jit
def _tile(order, place, KIND: tl.constexpr):
    """The tile at a place of an `_Order`: whether it holds entries, its positions, and whether each is inside."""
    is_old = place < order.old_far + order.old_near
    fresh = place - order.old_far - order.old_near
    new_far = order.far_tiles - order.old_far
    is_far = tl.where(is_old, place < order.old_far, fresh < new_far)
    tile = tl.where(is_old, place - order.old_far, order.old_near + fresh - new_far)
    tile = tl.where(is_far, tl.where(is_old, place, order.old_far + fresh), tile)
    i = tile * KIND.keys + tl.arange(0, KIND.keys)
    first = tl.where(is_far, order.far.first, order.near.first)
    return is_far, first + i, i < tl.where(is_far, order.far.count, order.near.count)


@triton.jit
def _tile_pages(entries, window, order, place, hi, KIND: tl.constexpr):
    """Page of every row of a tile; page 0 from place ``hi`` on."""
    is_far, position, inside = _tile(order, place, KIND)
    table = tl.where(is_far, entries.table, window.table)
    column = tl.where(is_far, position // KIND.far_page, position // KIND.page)
    return tl.load(table + column, mask=inside & (place < hi), other=0)


@triton.jit
def _attend_pages(softmax, q, entries, window, order, page, lo, hi, scale, bias, KIND: tl.constexpr):
    """Add the tiles at places ``[lo, hi)``; no tile is empty. page: pages of the first tile's rows."""
    PRECISION: tl.constexpr = KIND.precision
    for place in range(lo, hi):
        is_far, position, inside = _tile(order, place, KIND)
        s_page, s_slot = tl.where(is_far, entries.s_page, window.s_page), tl.where(is_far, entries.s_k, window.s_k)
        slot = tl.where(is_far, position % KIND.far_page, position % KIND.page)
        at = page.to(tl.int64) * s_page + slot.to(tl.int64) * s_slot
        k = load_rows(tl.where(is_far, entries.k, window.k), at, inside, KIND.D0, KIND.D1)
        s = key_products(q, k, PRECISION) * scale + tl.where(is_far, bias, 0.0)
        v = (k[0],)
        if not KIND.latent:
            v = load_rows(tl.where(is_far, entries.v, window.v), at, inside, KIND.V0, KIND.V1)
        softmax = add_keys(softmax, tl.where(inside[None, :], s, float("-inf")), v, PRECISION)
        # the next tile's pages are loaded while this tile's keys are on their way
        page = _tile_pages(entries, window, order, place + 1, hi, KIND)
    return softmax


@triton.jit
def paged_attend_kernel(
    q_ptr, seen_ptr, window_ptr, window_table_ptr, entries_ptr, entries_table_ptr, part_ptr, lse_ptr,
    s_qt, s_qh, s_wp, s_wh, s_wn, s_wt, s_ep, s_eh, s_en, s_et, K, R, chunk_size, window_size, summary_delay,
    max_chunks, score_scale, bias, KIND: tl.constexpr,
):  # fmt: skip
    """part float32 ``[R, H, S, V]`` and log-sum-exp ``[R, H, S]``; grid (S, row tiles, R requests * K)."""
    if KIND.early:
        gdc_launch_dependents()
    split, S, row_tile, program = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    request, kvh = (program // K).to(tl.int64), (program % K).to(tl.int64)
    seen = tl.load(seen_ptr + request).to(tl.int32)
    if seen > 0:
        window = _pages(window_ptr, window_table_ptr, request, kvh, (s_wp, s_wh, s_wn, s_wt), KIND)
        entries = _pages(entries_ptr, entries_table_ptr, request, kvh, (s_ep, s_eh, s_en, s_et), KIND)
        closed = tl.maximum(seen - window_size, 0) // chunk_size
        far = _Stretch(summary_delay // chunk_size, tl.minimum(closed, max_chunks))
        near = _Stretch(closed * chunk_size, seen - closed * chunk_size)
        far_tiles, near_tiles = tl.cdiv(far.count, KIND.keys), tl.cdiv(near.count, KIND.keys)
        old_far, old_near, tiles = far_tiles, near_tiles, far_tiles + near_tiles
        lo, hi = tiles * split // S, tiles * (split + 1) // S
        if KIND.early:
            # this step stores at most the newest entry and the newest two tokens of what this request reads
            old_far, old_near = tl.maximum(far.count - 1, 0) // KIND.keys, tl.maximum(near.count - 2, 0) // KIND.keys
            old = old_far + old_near
            lo = tl.where(split == S - 1, old, old * split // (S - 1))
            hi = tl.where(split == S - 1, tiles, old * (split + 1) // (S - 1))
            if split == S - 1:
                gdc_wait()
        order = _Order(far, near, far_tiles, old_far, old_near)
        page = _tile_pages(entries, window, order, lo, hi, KIND)
        r = row_tile * KIND.rows + tl.arange(0, KIND.rows)
        at = request * s_qt + (kvh * R + r) * s_qh
        q = load_rows(q_ptr, at, r < R, KIND.D0, KIND.D1)
        softmax = empty_softmax(KIND.rows, KIND.V0, KIND.V1)
        softmax = _attend_pages(softmax, q, entries, window, order, page, lo, hi, score_scale, bias, KIND)
        if KIND.early:
            # from here on all that the step stores is there, for the kernel that follows too
            gdc_wait()
        at = (program.to(tl.int64) * R + r) * S + split
        store_part(part_ptr, lse_ptr, softmax, at, r < R, KIND.V0, KIND.V1)


@triton.jit
def paged_join_kernel(
    part_ptr, lse_ptr, seen_ptr, out_ptr, s_ot, s_oh, H, S,
    V: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out ``[R, H, V]``: all splits of a query head joined, 0 for places left empty; grid (R requests * H, columns)."""
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = row // H
    live = tl.load(seen_ptr + request).to(tl.int32) > 0
    column, one = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, 1)
    out = join_parts(part_ptr, lse_ptr, row + one, one < 1, tl.where(live, S, 0), column, V, BS)
    at = request * s_ot + (row % H) * s_oh
    tl.store(out_ptr + at + column[None, :], out.to(out_ptr.dtype.element_ty), mask=(column < V)[None, :])
