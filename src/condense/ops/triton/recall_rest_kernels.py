"""Kernels of what queries of a prompt do not open: one weighs it, by the closed groups' centres as the index scores
them, one adds it to attention, as one token.

Shapes: B rows of the batch, H query heads, K KV heads, R query heads per KV head, L queries of which a block has n, G
groups of g tokens, T tiles of Q queries, D and Dv widths.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device.records import Rule, Start
from condense.ops.triton.device.rule import VARYING, program_rows, row_of_program
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.signs import floats_of
from condense.ops.triton.recall_score_kernels import closed_groups, log_of_sum, products_of_parts


class RestForm(NamedTuple):
    """The constants of a tile: BM rows, BN groups, P columns that are read at a time, the reads per row."""

    BM: int
    BN: int
    P: int
    parts: int


@triton.jit(do_not_specialize=(*VARYING, "G", "first", "stop", "words", "columns"))
def recall_rest_kernel(
    unit_ptr, q, centres_ptr, of_centres_ptr, words_ptr, starts_ptr, weight_ptr,
    s_centre, level, K, L, G, first, stop, words, columns,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries,
    R: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, CAP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write the natural logarithm of the weight of what queries ``[first, stop)`` do not open, float32 ``[B * K, R,
    L]``; -inf where they open all closed groups.

    Grid (tiles of ``BM // R`` queries, B * K). unit, q: as `condense.ops.triton.recall_score.turned` returns them, in
    base 2, queries as a descriptor. centres int8 ``[B * K, columns, D]``, of_centres float32 ``[B * K, columns]``:
    those of the index, up to whole tiles; rows of centres are s_centre apart. words ``[B * K, T, words]``: as of
    `condense.ops.triton.recall_choice.marked`. level: what is added to scores, base 2. CAP: soft cap, base 2, 0.0 for
    none.
    """
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BN
    Q: tl.constexpr = BM // R
    # a thread has two neighbouring groups of eight
    PLACES: tl.constexpr = 8
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, r, real = program_rows(first, stop, R, BM)
    closed = closed_groups(i, row, spans, G, KIND)
    unit = tl.load(unit_ptr + (head * (stop - first) + i - first) * R + r)  # [BM]
    words_ptr += (head * tl.num_programs(0) + tile) * words
    bit = tl.full([BM], 1, words_ptr.dtype.element_ty) << ((i - first) % Q)
    centres_ptr += head * columns * s_centre
    line = tile * (Q * R)
    held = q if FORM.parts > 1 else q.load([tl.program_id(1), line, 0]).reshape(BM, FORM.P)
    # kept per place: to join them, threads would wait for each other
    top, total = tl.full([BM, PLACES], float("-inf"), tl.float32), tl.zeros([BM, PLACES], tl.float32)
    for group in range(0, tl.max(closed), BN):
        n = group + tl.arange(0, BN)
        s = products_of_parts(held, tl.program_id(1), line, centres_ptr + n.to(tl.int64)[:, None] * s_centre, D, FORM)
        s = floats_of(s) * tl.load(of_centres_ptr + head * columns + n)[None, :] * unit[:, None]
        word = tl.load(words_ptr + n, mask=n < words, other=0)  # [BN]
        is_rest = ((word[None, :] & bit[:, None]) == 0) & (n[None, :] < closed[:, None])  # [BM, BN]
        s = tl.reshape(tl.where(is_rest, soft_cap(s, CAP)[0], float("-inf")), [BM, BN // PLACES, PLACES])
        larger = tl.maximum(top, tl.max(s, 1))  # [BM, PLACES]
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None, :]), 1)
        top = larger
    weight = (log_of_sum(top, total) + level) * 0.6931471805599453  # [BM]
    weight = tl.where(tl.max(top, 1) == float("-inf"), float("-inf"), weight)
    tl.store(weight_ptr + (head * R + r) * L + i, weight, mask=real)


@triton.jit(do_not_specialize=("L", "n", "begin"))
def recall_join_kernel(
    out_ptr, lse_ptr, weight_ptr, mean_ptr, begin_ptr, s_out, s_mean, H, L, n, begin,
    g: tl.constexpr, R: tl.constexpr, Dv: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add a token to attention, in place: out ``[B, H, L, Dv]``, lse float32 ``[B, H, L]``, as
    `condense.ops.recall.rest.with_rest` does.

    Grid (tiles of BM queries times H, B). weight: as `recall_rest_kernel` writes it. mean: ``[B, H / R, n, Dv]``, of
    which query i sees column ``(begin + i) // g``, or the first or last one. begin_ptr: begin by row, None for one of
    all.
    """
    row, head = tl.program_id(1), tl.program_id(0) % H
    i, d = tl.program_id(0) // H * BM + tl.arange(0, BM), tl.arange(0, BD)
    if begin_ptr is not None:
        begin = tl.load(begin_ptr + row)
    column = tl.minimum(tl.maximum(begin + i, 0) // g, n - 1)
    line = (row.to(tl.int64) * H + head) * L + i
    lse = tl.load(lse_ptr + line, mask=i < L, other=float("-inf"))
    weight = tl.load(weight_ptr + line, mask=i < L, other=float("-inf"))
    top = tl.maximum(lse, weight)
    nothing = top == float("-inf")
    top = tl.where(nothing, 0.0, top)
    total = top + tl.log(tl.where(nothing, 1.0, tl.exp(lse - top) + tl.exp(weight - top)))
    s_b, s_h, s_l = s_out
    out_ptr += row.to(tl.int64) * s_b + head.to(tl.int64) * s_h + i.to(tl.int64)[:, None] * s_l + d[None, :]
    there = (i < L)[:, None] & (d < Dv)[None, :]
    out = tl.load(out_ptr, mask=there, other=0.0).to(tl.float32)
    s_b, s_h, s_n = s_mean
    mean_ptr += row.to(tl.int64) * s_b + (head // R).to(tl.int64) * s_h
    mean = tl.load(mean_ptr + column.to(tl.int64)[:, None] * s_n + d[None, :], mask=there, other=0.0)
    out = out * tl.exp(lse - total)[:, None] + mean * tl.exp(weight - total)[:, None]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=there)
    # other warps of the program read the same numbers
    tl.debug_barrier()
    tl.store(lse_ptr + line, tl.where(nothing, float("-inf"), total), mask=i < L)
