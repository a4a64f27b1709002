"""Addresses of rows: a ring or an array whose rows lie side by side, or pages that a table finds. Also those of sums of
the values of a row's first groups, float64: in a ring (`condense.ops.step.StepState.sums`), or in the pages of tokens
(`condense.ops.step.pages.PagedState.window`).

Kernels take a `PageForm`, or None where rows lie side by side; then the table is None too and the compiler sees nothing
of pages. Offsets have 64 bits: pages may lie megabytes apart.

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

    slots: of a page. s_page, s_head, s_slot: strides of the cache, of records those of the index. s_table: from one
    request's pages to the next one's. s_stored_page, s_stored_head, s_stored: strides of stored tokens, which have
    planes, or pages, of their own.
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
        """Those of a cache and its table."""
        return cls(pages.slots, *pages.cache.stride()[:3], pages.table.stride(0))

    @classmethod
    def of_records(cls, pages: Pages, form: RecordFormat, store: Tensor | None) -> Self:
        """Those of pages of records of stored groups, in bytes. store: the pages of a plane that lies apart."""
        index, _, stored = form.sizes
        s_page, s_head, *_ = (pages.cache if store is None else store).stride()
        return cls.of(pages)._replace(s_slot=index, s_stored_page=s_page, s_stored_head=s_head, s_stored=stored)


class Tokens(namedtuple("Tokens", "rows new place")):
    """Keys, or values, of one KV head and the newest one of them.

    rows: pointer to the ring, or to the first slot of page 0. new: pointer to the newest. place: slots of the ring, or
    pointer to the numbers of the request's pages.
    """


class HeadSums(namedtuple("HeadSums", "rows place")):
    """The sums of one KV head.

    rows: pointer to the ring, or in the dtype of tokens to what the first slot of page 0 holds of a sum. place: slots
    of the ring, or pointer to the numbers of the request's pages.
    """


@triton.jit
def form_row(table_ptr, slot, inside, FORM: tl.constexpr):
    """Offset of a slot of a request, int64; that of a slot of page 0 where not inside. inside: None if all are."""
    page_ptr = table_ptr + slot // FORM.slots
    page = tl.load(page_ptr) if inside is None else tl.load(page_ptr, mask=inside, other=0)
    return page.to(tl.int64) * FORM.s_page + (slot % FORM.slots).to(tl.int64) * FORM.s_slot


@triton.jit
def tile_in_pages(table_ptr, first, count, tile, N: tl.constexpr, FORM: tl.constexpr):
    """Offsets ``[N]`` of a tile of the ``count`` slots from slot ``first`` on; past the last of them that of the last,
    of page 0 if there is none.
    """
    i = tl.minimum(tile * N + tl.arange(0, N), count - 1)
    return form_row(table_ptr, first + i, i >= 0, FORM)


@triton.jit
def form_place(table_ptr, slot, inside, FORM: tl.constexpr):
    """The page of a slot of a request times the slots of a page, plus the slot there, for `place_row`; that of a slot
    of page 0 where not inside.
    """
    return tl.load(table_ptr + slot // FORM.slots, mask=inside, other=0) * FORM.slots + slot % FORM.slots


@triton.jit
def place_row(place, FORM: tl.constexpr, STORED: tl.constexpr = False):
    """Offset of what `form_place` found, int64. STORED: of stored tokens, not of the index."""
    s_page: tl.constexpr = FORM.s_stored_page if STORED else FORM.s_page
    s_slot: tl.constexpr = FORM.s_stored if STORED else FORM.s_slot
    place = place.to(tl.uint32)  # divided without a look at its sign
    return (place // FORM.slots).to(tl.int64) * s_page + (place % FORM.slots).to(tl.int64) * s_slot


@triton.jit
def token_rows(place, position, inside, stride, NEAR: tl.constexpr):
    """Offsets of tokens ``[n]``. place: as in `Tokens`; stride: from row to row of a ring; inside: as of `form_row`."""
    if NEAR is None:
        return (position % place).to(tl.int64) * stride
    else:
        return form_row(place, position, inside, NEAR)


@triton.jit
def part_at(ptr, record):
    """Offset of a part of records, in the part's numbers. ptr: to the part; record: offset of the record, in bytes."""
    return record // (ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def head_rows(ptr, head, kvh, rows, WIDTH: tl.constexpr, FAR: tl.constexpr, STORED: tl.constexpr = False):
    """Offset of what is kept for a KV head: ``rows`` rows of WIDTH numbers for each, or its records in page 0.

    STORED: as of `place_row`.
    """
    if FAR is None:
        return head * rows * WIDTH
    else:
        return part_at(ptr, kvh * (FAR.s_stored_head if STORED else FAR.s_head))


@triton.constexpr_function
def num_columns(WIDTH, g, NEAR):
    """Columns that there are for a sum WIDTH wide: in pages as many for each token of a group."""
    return WIDTH if NEAR is None else g * _sum_part(WIDTH, g)


@triton.jit
def head_sums(ptr, head, kvh, slots, table_ptr, WIDTH: tl.constexpr, NEAR: tl.constexpr):
    """The `HeadSums` of a KV head, WIDTH wide. slots: of a ring; table: of a request's pages."""
    if NEAR is None:
        return HeadSums(ptr + head * slots * WIDTH, slots)
    else:
        return HeadSums(ptr + kvh * NEAR.s_head, table_ptr)


@triton.jit
def sum_columns(sums, j, d, there, WIDTH: tl.constexpr, g: tl.constexpr, NEAR: tl.constexpr):
    """Pointers to columns d ``[n]`` of the sum of the first j groups, WIDTH wide. there: columns that may be read."""
    if NEAR is None:
        return sums.rows + (j % sums.place).to(tl.int64) * WIDTH + d
    else:
        N: tl.constexpr = _sum_part(WIDTH, g)
        row = form_row(sums.place, (j - 1) * g + d // N, there, NEAR)
        return (sums.rows + row).to(tl.pointer_type(tl.float64)) + d % N
