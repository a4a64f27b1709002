"""Sums of the values of a row's first groups, float64: in a ring (`condense.ops.step.StepState.sums`), or in the pages
of tokens (`condense.ops.step.pages.PagedState.window`).
"""

from collections import namedtuple

import triton
import triton.language as tl

from condense.ops.step.pages import sum_part
from condense.ops.triton.device.address import form_row

_sum_part = triton.constexpr_function(sum_part)


class HeadSums(namedtuple("HeadSums", "rows place")):
    """The sums of one KV head.

    rows: pointer to the ring, or in the dtype of tokens to what the first slot of page 0 holds of a sum. place: slots
    of the ring, or pointer to the numbers of the request's pages.
    """


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
