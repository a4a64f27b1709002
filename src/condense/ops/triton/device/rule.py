"""The spans of queries inside a kernel: computed by the uniform rule from a few integers, or loaded from arrays.

A tile has BM rows: ``BM // R`` queries times the R query heads that share a KV head. So any R works, and each key is
read once for all heads. Rows that are left over repeat the tile's last query.

KIND: "row", the rule with the same start in all rows; "rows", the rule with a start per row; "arrays", lo and hi of
each query. The rule knows two sources, the entries and the window; arrays may have any number of sources.

Kernels build records on their first lines, so that functions take a few of these and not many arguments. Numbers are
launch arguments of their own, not in tuples: ``do_not_specialize`` does not reach into tuples, so each new value would
compile a new kernel. No field is None, which Triton 3.6 does not allow in a record.
"""

from collections import namedtuple

import triton
import triton.language as tl

# not specialised: these numbers change from call to call, and a new value must not compile a new kernel
VARYING = ("L", "query_start", "window_start", "padding", "first_entries", "chunk", "window", "max_chunks")


class Rule(namedtuple("Rule", "chunk window entries max_chunks")):
    """The fields of `condense.ops.spans.UniformRule`."""


class Start(namedtuple("Start", "query window padding first_entries")):
    """The fields of `condense.ops.spans.RowStart`."""


class RowSpans(namedtuple("RowSpans", "rule start arrays strides")):
    """The spans of a program's queries, by a rule or from an array.

    rule, start: the rule and the start of the program's row. arrays: pointer to lo and hi of each source, int32
    ``[sources, 2, B|1, K|1, L]``. strides: of its second, third and fourth dimension; the first dimension's is twice
    the second's, the last one's is 1.
    """


class Row(namedtuple("Row", "b head")):
    """Batch row ``b`` and KV head ``head`` of a program."""


@triton.jit
def tile_rows(first, j, L, R, BM: tl.constexpr):
    """Query and query head of each row j of a tile whose first query is ``first``, and whether the row counts."""
    rows = BM // R * R
    kept = tl.minimum(j, rows - 1)
    i = first + kept // R
    return tl.minimum(i, L - 1), kept % R, (j < rows) & (i < L)


@triton.jit
def start_of_row(b, start, starts_ptr, KIND: tl.constexpr):
    """`Start` of batch row b: loaded from int32 ``[B, 4]`` if KIND is "rows", else ``start``."""
    if KIND == "rows":
        at = starts_ptr + b * 4
        start = Start(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    return start


@triton.jit
def row_of_program(numbers, spans_ptr, K, KIND: tl.constexpr, strides=0, AXIS: tl.constexpr = 1):
    """Batch row and KV head of a program of a grid that has B * K on one axis, and the spans of that row.

    numbers: the fields of `Rule`, and then those of `Start`. spans_ptr, strides: starts of the rows, or
    `RowSpans.arrays` and their strides.
    """
    row, rule = Row(tl.program_id(AXIS) // K, tl.program_id(AXIS) % K), Rule(*numbers[:4])
    start = start_of_row(row.b.to(tl.int64), Start(*numbers[4:]), spans_ptr, KIND)
    return row, RowSpans(rule, start, spans_ptr if KIND == "arrays" else 0, strides)


@triton.jit
def program_rows(first, stop, R, BM: tl.constexpr):
    """`tile_rows` for a program of a grid (tiles, B * K) over queries ``[first, stop)``. first: None means 0.

    The last queries see the most keys and take longest, so their programs start first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    begin = tile * (BM // R)
    return tile_rows(begin if first is None else first + begin, tl.arange(0, BM), stop, R, BM)


@triton.jit
def visible(n: tl.constexpr, i, row, spans, KIND: tl.constexpr):
    """Entries ``[lo, hi)`` of source n that queries i (int32) see."""
    if KIND == "arrays":
        edge, s_b, s_h = spans.strides
        at = spans.arrays + 2 * n * edge + row.b.to(tl.int64) * s_b + row.head.to(tl.int64) * s_h + i
        lo, hi = tl.load(at), tl.load(at + edge)
    else:
        rule, start = spans.rule, spans.start
        seen = start.query + i + 1
        closed = tl.maximum(seen - rule.window, 0) // rule.chunk
        real = i >= start.padding
        if n == 0:
            lo = closed * 0
            hi = tl.where(real, start.first_entries + tl.minimum(closed, rule.max_chunks) * rule.entries, 0)
        else:
            lo = tl.where(real, tl.maximum(closed * rule.chunk - start.window, 0), 0)
            hi = tl.where(real, seen - start.window, 0)
    return lo, hi


@triton.constexpr_function
def begins_at_0(n, KIND):
    """True if every span of source n is known at compile time to begin at 0, as those of entries by the rule."""
    return KIND != "arrays" and n == 0


@triton.jit
def seen_by(n: tl.constexpr, keys, size, L, row, spans, seen, s_seen, KIND: tl.constexpr):
    """Queries ``[lo, hi)`` that see each of ``keys`` of source n, which has ``size`` keys; none for keys past its end.

    lo and hi of spans never decrease along the queries, so the queries that see a key are adjacent. seen: with arrays,
    for each source a pointer to this function's results, int32 ``[2, B|1, K|1, size]``; s_seen: its first 3 strides.
    """
    if KIND == "arrays":
        edge, s_b, s_h = s_seen[n]
        at = seen[n] + row.b.to(tl.int64) * s_b + row.head.to(tl.int64) * s_h + keys
        lo, hi = tl.load(at, mask=keys < size, other=0), tl.load(at + edge, mask=keys < size, other=0)
    else:
        rule, start = spans.rule, spans.start
        if n == 0:
            number = tl.maximum(keys - start.first_entries, 0) // rule.entries
            # the first query for which the chunk is closed; all queries see the first entries
            closing = (number + 1) * rule.chunk + rule.window - 1 - start.query
            lo = tl.maximum(tl.where(keys < start.first_entries, 0, closing), start.padding)
            hi = tl.full(keys.shape, 0, tl.int32) + L
        else:
            position = keys + start.window
            closing = (tl.maximum(position, 0) // rule.chunk + 1) * rule.chunk + rule.window - 1 - start.query
            lo = tl.maximum(position - start.query, start.padding)
            hi = tl.where(position >= 0, tl.minimum(closing, L), 0)
    hi = tl.where(keys < size, hi, 0)
    return tl.minimum(lo, hi), hi


@triton.jit
def split(lo, inner_lo, inner_hi, hi, step):
    """Cut ``[lo, hi)`` into blocks of ``step``; return the cuts ``left`` and ``right``.

    Blocks in ``[left, right)`` lie inside ``[inner_lo, inner_hi)`` and need no mask; those in ``[lo, left)`` and
    ``[right, hi)`` do.
    """
    left = tl.minimum(lo + tl.cdiv(tl.maximum(inner_lo - lo, 0), step) * step, tl.maximum(hi, lo))
    right = left + tl.maximum(tl.minimum(inner_hi, hi) - left, 0) // step * step
    return left, right


@triton.jit
def cut(lo, hi, FROM_0: tl.constexpr, STEP: tl.constexpr):
    """Begin and end of the keys that a tile's rows see, with both cuts of `split` in between. FROM_0: every lo is 0."""
    if FROM_0:
        first, inner = 0, 0
    else:
        first, inner = tl.min(lo), tl.max(lo)
    last = tl.max(hi)
    left, right = split(first, inner, tl.min(hi), last, STEP)
    return first, left, right, last
