"""Addresses of tokens, entries and records: in a contiguous ring or array, or in pages that a page table lists. Also
addresses of running sums of values, float64: in a ring (`condense.ops.step.StepState.sums`), or in the pages of tokens
(`condense.ops.step.pages.PagedState.window`).

Kernels take a `PageForm` as a constant, or None for a ring or array; then the table is None too and no paging code is
compiled. Offsets have 64 bits: pages may lie megabytes apart.

Shapes: n rows.
"""

from collections import namedtuple
from typing import NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from condense.ops.step.pages import Pages, sum_part
from condense.ops.step.records import RecordFormat

_sum_part = triton.constexpr_function(sum_part)


class PageForm(NamedTuple):
    """The constants of pages.

    slots: slots per page. s_page, s_head, s_slot: strides of page, KV head and slot in the cache; with records, those
    of the index. s_table: stride of a request's row in the page table. s_stored_page, s_stored_head, s_stored: strides
    of page, KV head and slot of the stored tokens of records, 0 without records.
    """

    slots: int
    s_page: int
    s_head: int
    s_slot: int
    s_table: int
    s_stored_page: int = 0
    s_stored_head: int = 0
    s_stored: int = 0

    @classmethod
    def of(cls, pages: Pages) -> Self:
        """Return the form of a cache and its page table."""
        return cls(pages.slots, *pages.cache.stride()[:3], pages.table.stride(0))

    @classmethod
    def of_records(cls, pages: Pages, form: RecordFormat, store: Tensor | None) -> Self:
        """Return the form of pages of records, strides in bytes. store: stored tokens, if in pages of their own."""
        index, _, stored = form.sizes
        s_page, s_head, *_ = (pages.cache if store is None else store).stride()
        return cls.of(pages)._replace(s_slot=index, s_stored_page=s_page, s_stored_head=s_head, s_stored=stored)


class Tokens(namedtuple("Tokens", "rows new place")):
    """Keys, or values, of one KV head: those in a ring or in pages, and the newest one.

    rows: pointer to the ring, or to the head's first slot in page 0. new: pointer to the newest key or value. place:
    number of slots of the ring, or pointer to the request's row of the page table.
    """


class HeadSums(namedtuple("HeadSums", "rows place")):
    """The running sums of one KV head.

    rows: pointer to the ring; or, in the dtype of tokens, to the first slot in page 0 at its columns for sums. place:
    number of slots of the ring, or pointer to the request's row of the page table.
    """


@triton.jit
def form_row(table_ptr, slot, inside, FORM: tl.constexpr):
    """Offset of a request's slot, int64. inside: mask, False takes the slot from page 0; None: no mask."""
    page_ptr = table_ptr + slot // FORM.slots
    page = tl.load(page_ptr) if inside is None else tl.load(page_ptr, mask=inside, other=0)
    return page.to(tl.int64) * FORM.s_page + (slot % FORM.slots).to(tl.int64) * FORM.s_slot


@triton.jit
def tile_in_pages(table_ptr, first, count, tile, N: tl.constexpr, FORM: tl.constexpr):
    """Offsets ``[N]`` of tile number ``tile`` of the ``count`` slots from slot ``first`` on. Places past the last slot
    repeat it; if ``count`` is 0 they are in page 0.
    """
    i = tl.minimum(tile * N + tl.arange(0, N), count - 1)
    return form_row(table_ptr, first + i, i >= 0, FORM)


@triton.jit
def form_place(table_ptr, slot, inside, FORM: tl.constexpr):
    """A request's slot as one number for `place_row`: page times slots per page, plus slot in the page. Where not
    inside the page is 0.
    """
    return tl.load(table_ptr + slot // FORM.slots, mask=inside, other=0) * FORM.slots + slot % FORM.slots


@triton.jit
def place_row(place, FORM: tl.constexpr, STORED: tl.constexpr = False):
    """Offset, int64, of the place that `form_place` returned. STORED: of its stored tokens instead of its index."""
    s_page: tl.constexpr = FORM.s_stored_page if STORED else FORM.s_page
    s_slot: tl.constexpr = FORM.s_stored if STORED else FORM.s_slot
    place = place.to(tl.uint32)  # an unsigned division takes fewer instructions
    return (place // FORM.slots).to(tl.int64) * s_page + (place % FORM.slots).to(tl.int64) * s_slot


@triton.jit
def token_rows(place, position, inside, stride, NEAR: tl.constexpr):
    """Offsets ``[n]`` of tokens by position. place: as in `Tokens`; stride: of ring rows; inside: as in `form_row`."""
    if NEAR is None:
        return (position % place).to(tl.int64) * stride
    else:
        return form_row(place, position, inside, NEAR)


@triton.jit
def part_at(ptr, record):
    """Offset ``record``, in bytes, as a number of elements of the type that ``ptr`` points to."""
    return record // (ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def group_at(ptr, row, SIZE: tl.constexpr, FAR: tl.constexpr, STORED: tl.constexpr = False):
    """Offsets in ``ptr`` of the data of groups, SIZE elements each. row: the groups' numbers, or in pages the places
    (`form_place`) of their records. STORED: as in `place_row`.
    """
    return row.to(tl.int64) * SIZE if FAR is None else part_at(ptr, place_row(row, FAR, STORED))


@triton.jit
def of_group(ptr, row, SIZE: tl.constexpr, FAR: tl.constexpr, STORED: tl.constexpr = False):
    """Pointers to what `group_at` finds."""
    return ptr + group_at(ptr, row, SIZE, FAR, STORED)


@triton.jit
def head_rows(ptr, head, kvh, rows, WIDTH: tl.constexpr, FAR: tl.constexpr, STORED: tl.constexpr = False):
    """Offset of a KV head's data: of its ``rows`` rows of WIDTH numbers in a buffer, or of its records in page 0.

    head: batch row times K plus kvh, the KV head. STORED: as in `place_row`.
    """
    if FAR is None:
        return head * rows * WIDTH
    else:
        return part_at(ptr, kvh * (FAR.s_stored_head if STORED else FAR.s_head))


@triton.constexpr_function
def num_columns(WIDTH, g, NEAR):
    """Columns that a sum of WIDTH numbers takes: in pages rounded up, so that each of g tokens holds equally many."""
    return WIDTH if NEAR is None else g * _sum_part(WIDTH, g)


@triton.jit
def head_sums(ptr, head, kvh, slots, table_ptr, WIDTH: tl.constexpr, NEAR: tl.constexpr):
    """The `HeadSums` of a KV head. WIDTH: numbers of a sum. slots: of a ring. table_ptr: row of the page table."""
    if NEAR is None:
        return HeadSums(ptr + head * slots * WIDTH, slots)
    else:
        return HeadSums(ptr + kvh * NEAR.s_head, table_ptr)


@triton.jit
def sum_columns(sums, j, d, there, WIDTH: tl.constexpr, g: tl.constexpr, NEAR: tl.constexpr):
    """Pointers ``[n]`` to columns d of the sum over the first j groups. there: mask of columns that may be accessed."""
    if NEAR is None:
        return sums.rows + (j % sums.place).to(tl.int64) * WIDTH + d
    else:
        N: tl.constexpr = _sum_part(WIDTH, g)
        row = form_row(sums.place, (j - 1) * g + d // N, there, NEAR)
        return (sums.rows + row).to(tl.pointer_type(tl.float64)) + d % N
