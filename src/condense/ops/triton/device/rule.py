"""Who sees what, inside a kernel: the uniform rule from a few integers in registers, or bounds from arrays.

A tile has BM rows: ``BM // R`` queries of the R query heads that share a KV head, so that any ratio works and each
key is read once for all of them. Rows left over stand for the tile's last query again.

``RULE``: "arrays" (``bounds`` are int32 ``[B|1, K|1, L]`` each), "row" (the uniform rule, the same in all rows:
``start`` holds query_start, band_start, padding and offset of `UniformBounds`) or "rows" (``bounds[0]`` holds these
four per row, int32 ``[B, 4]``).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_rows(first, L, R, BM: tl.constexpr):
    """Query and head of each row of a tile that begins at query ``first``, and whether the row counts."""
    j = tl.arange(0, BM)
    rows = BM // R * R
    kept = tl.minimum(j, rows - 1)
    i = first + kept // R
    return tl.minimum(i, L - 1), kept % R, (j < rows) & (i < L)


@triton.jit
def _starts(bounds, start, b, RULE: tl.constexpr):
    if RULE == "rows":
        at = bounds[0] + b * 4
        query_start, band_start, pads, offset = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        query_start, band_start, pads, offset = start[0], start[1], start[2], start[3]
    return query_start, band_start, pads, offset


@triton.jit
def visible(i, b, kvh, bounds, s_bounds, start, rule, RULE: tl.constexpr):
    """rep_end, raw_start and raw_end of queries i (int32 vector)."""
    if RULE == "arrays":
        at = b * s_bounds[0] + kvh * s_bounds[1] + i
        rep_end, raw_start, raw_end = tl.load(bounds[0] + at), tl.load(bounds[1] + at), tl.load(bounds[2] + at)
    else:
        chunk, window, entries, max_chunks = rule
        query_start, band_start, pads, offset = _starts(bounds, start, b, RULE)
        seen = query_start + i + 1
        closed = tl.maximum(seen - window, 0) // chunk
        real = i >= pads
        rep_end = tl.where(real, offset + tl.minimum(closed, max_chunks) * entries, 0)
        raw_start = tl.where(real, tl.maximum(closed * chunk - band_start, 0), 0)
        raw_end = tl.where(real, seen - band_start, 0)
    return rep_end, raw_start, raw_end


@triton.jit
def seen_by(n, size, is_prefix, L, b, kvh, seen, s_seen, bounds, start, rule, RULE: tl.constexpr):
    """Queries ``[lo, hi)`` that see each of the keys n of one source; none for keys past its end.

    Bounds never decrease, so these queries have no gap. ``seen``: for arrays, both ends int32 ``[B|1, K|1, size]``.
    """
    if RULE == "arrays":
        at = b * s_seen[0] + kvh * s_seen[1] + n
        lo = tl.load(seen[0] + at, mask=n < size, other=0)
        hi = tl.load(seen[1] + at, mask=n < size, other=0)
    else:
        chunk, window, entries, max_chunks = rule
        query_start, band_start, pads, offset = _starts(bounds, start, b, RULE)
        position = n + band_start
        number = tl.where(is_prefix, tl.maximum(n - offset, 0) // entries, tl.maximum(position, 0) // chunk)
        # the first query that sees the chunk closed; entries ahead of the rule's own are there from the start
        closing = tl.where(is_prefix & (n < offset), 0, (number + 1) * chunk + window - 1 - query_start)
        lo = tl.maximum(tl.where(is_prefix, closing, position - query_start), pads)
        hi = tl.where(is_prefix, L, tl.minimum(closing, L))
        hi = tl.where(is_prefix | (position >= 0), hi, 0)
    hi = tl.where(n < size, hi, 0)
    return tl.minimum(lo, hi), hi


@triton.jit
def split(lo, inner_lo, inner_hi, hi, step):
    """Cuts ``[lo, hi)`` into steps: ``[lo, left)`` touches the left edge, ``[left, right)`` lies within the inner
    range, ``[right, hi)`` touches the right edge.
    """
    left = tl.minimum(lo + tl.cdiv(tl.maximum(inner_lo - lo, 0), step) * step, tl.maximum(hi, lo))
    right = left + tl.maximum(tl.minimum(inner_hi, hi) - left, 0) // step * step
    return left, right
