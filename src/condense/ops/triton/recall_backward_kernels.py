"""Gradients of Recall's keys and values over a prompt: entries and window tile by tile, the store group by group.

No atomics: a program owns its keys and goes through the queries that see them, in order. `recall_dkv_kernel` goes
through all tiles of queries from the first that sees one of its keys; `recall_store_kernel` through the queries that
open its group, from a list. lse and delta of a query are those of `condense.ops.triton.attend_backward`.

Shapes as in `condense.ops.triton.recall_attend_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.attend_forward import VARYING
from condense.ops.triton.device.parts import add_weighted, load_rows, products, store_rows, zeros
from condense.ops.triton.device.records import BackwardQueries, Row, Rule, Start
from condense.ops.triton.device.rule import seen_by
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.recall_attend_kernels import chooser
from condense.ops.triton.recall_score_kernels import row_of_program


@triton.jit
def _load_queries(
    queries, at_q, at_out, at, inside, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr
):
    """Load queries, gradients of their outputs, lse and delta. Rows that are not inside get lse inf, so weight 0."""
    return BackwardQueries(
        load_rows(queries.q, at_q, inside, D0, D1),
        load_rows(queries.d_out, at_out, inside, V0, V1),
        tl.load(queries.lse + at, mask=inside, other=float("inf")),
        tl.load(queries.delta + at, mask=inside, other=0.0),
    )


@triton.jit
def _add_queries(grads, k, v, rows, seen, level, bias, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Add rows to dk (still without the softmax scale), to dv and, if there are biases, to their gradient.

    seen ``[n, BM]``: whether a row sees a key. bias ``[n]``: the keys' own, None for none.
    """
    s = products(k, rows.q, PRECISION)
    dp = products(v, rows.d_out, PRECISION)
    s, slope = soft_cap(s * scale, CAP)
    if bias is not None:
        s += bias[:, None]
    p = tl.where(seen, tl.exp2(s - (rows.lse - level)[None, :]), 0.0)
    ds = p * (dp - rows.delta[None, :])
    dv = add_weighted(grads[1], p, rows.d_out, PRECISION)
    dk = add_weighted(grads[0], ds * slope, rows.q, PRECISION)
    if bias is None:
        return dk, dv
    else:
        return dk, dv, grads[2] + tl.sum(ds, 1)


@triton.jit(do_not_specialize=(*VARYING, "size", "words", "tiles"))
def recall_dkv_kernel(
    lse_ptr, delta_ptr, q_ptr, d_out_ptr, k_ptr, v_ptr, biases, words_ptr, starts_ptr, dk_ptr, dv_ptr, d_biases_ptr,
    s_q, s_out, s_keys, s_bias, level, K, choosers, L, size, words, tiles,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale, softmax_scale,
    R: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    ENTRIES: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr,
    BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write dk ``[B, K, size, D]`` and dv ``[B, K, size, Dv]``, contiguous, of the entries if ENTRIES, else of the
    window; and d_biases float32 ``[B, K, size]``, if entries have biases of their own.

    BM: rows of a tile, whose queries share a word. BS: rows that are read at a time.
    """
    Q: tl.constexpr = BM // R
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row, spans = row_of_program(rule, start, starts_ptr, K, KIND)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < size
    key = n.to(tl.int64)
    k = load_rows(k_ptr, b * s_keys[0] + kvh * s_keys[1] + key * s_keys[2], inside, D0, D1)
    v = load_rows(v_ptr, b * s_keys[3] + kvh * s_keys[4] + key * s_keys[5], inside, V0, V1)
    lo, hi = seen_by(0 if ENTRIES else 1, n, size, L, row, spans, 0, 0, KIND)
    queries = BackwardQueries(q_ptr, d_out_ptr, lse_ptr, delta_ptr)
    grads = (zeros(BN, D0, D1), zeros(BN, V0, V1))
    if biases is not None:
        bias = tl.load(biases + b * s_bias[0] + kvh * s_bias[1] + key, mask=inside, other=0.0)
        grads = grads + (tl.zeros([BN], tl.float32),)  # noqa: RUF005
    first = tl.min(tl.where(lo < hi, lo, L)) // Q
    STEPS: tl.constexpr = BM // BS
    for step in range(first * STEPS, tl.cdiv(tl.max(hi), Q) * STEPS):
        tile, j = step // STEPS, step % STEPS * BS + tl.arange(0, BS)
        i = tl.minimum(tile * Q + j // R, L - 1)
        real = (j < Q * R) & (tile * Q + j // R < L)
        head = kvh * R + j % R
        at_q = b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2]
        at_out = b * s_out[0] + head * s_out[1] + i.to(tl.int64) * s_out[2]
        rows = _load_queries(queries, at_q, at_out, (b * K * R + head) * L + i, real, D0, D1, V0, V1)
        sees = real[None, :] & (i[None, :] >= lo[:, None]) & (i[None, :] < hi[:, None])
        if ENTRIES:
            word_at = (chooser(row, choosers) * tiles + tile) * words + n
            word = tl.load(words_ptr + word_at, mask=n < words, other=0)
            sees = sees & (((word[:, None] >> (i % Q)[None, :]) & 1) == 0)
        grads = _add_queries(
            grads, k, v, rows, sees, level, bias if biases is not None else None, scale, CAP, PRECISION
        )
    at = (b * K + kvh) * size + key
    store_rows(dk_ptr, at * (D0 + D1), [x * softmax_scale for x in grads[0]], inside, D0, D1)
    store_rows(dv_ptr, at * (V0 + V1), grads[1], inside, V0, V1)
    if biases is not None:
        tl.store(d_biases_ptr + at, grads[2], mask=inside)


@triton.jit(do_not_specialize=("L", "G"))
def recall_store_kernel(
    lse_ptr, delta_ptr, q_ptr, d_out_ptr, k_ptr, v_ptr, first_ptr, order_ptr, dk_ptr, dv_ptr,
    s_q, s_out, s_keys, K, choosers, L, G, r, scale, softmax_scale,
    R: tl.constexpr, g: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk ``[B, K, G * g, D]`` and dv ``[B, K, G * g, Dv]``, contiguous; grid (B * K, G, tiles of a group's tokens).

    order int64 ``[B * choosers, L * r]``: indices of the pairs (query, opened group), sorted by group, then by query.
    first ``[B * choosers, G + 1]``: offset of each group's first pair in ``order``.
    """
    Q: tl.constexpr = BM // R
    row = Row(tl.program_id(0) // K, tl.program_id(0) % K)
    b, kvh, group = row.b.to(tl.int64), row.head.to(tl.int64), tl.program_id(1)
    token = tl.program_id(2) * BN + tl.arange(0, BN)
    inside = token < g
    key = group.to(tl.int64) * g + token
    k = load_rows(k_ptr, b * s_keys[0] + kvh * s_keys[1] + key * s_keys[2], inside, D0, D1)
    v = load_rows(v_ptr, b * s_keys[3] + kvh * s_keys[4] + key * s_keys[5], inside, V0, V1)
    j = tl.arange(0, BM)
    head = kvh * R + j % R
    order_ptr += chooser(row, choosers) * L * r
    first_ptr += chooser(row, choosers) * (G + 1) + group
    last = tl.load(first_ptr + 1)
    queries = BackwardQueries(q_ptr, d_out_ptr, lse_ptr, delta_ptr)
    grads = (zeros(BN, D0, D1), zeros(BN, V0, V1))
    for start in range(tl.load(first_ptr), last, Q):
        place = start + j // R
        there = (place < last) & (j < Q * R)
        i = tl.load(order_ptr + place, mask=there, other=0) // r
        at_q, at_out = b * s_q[0] + head * s_q[1] + i * s_q[2], b * s_out[0] + head * s_out[1] + i * s_out[2]
        rows = _load_queries(queries, at_q, at_out, (b * K * R + head) * L + i, there, D0, D1, V0, V1)
        grads = _add_queries(grads, k, v, rows, there[None, :], 0.0, None, scale, CAP, PRECISION)
    at = (b * K + kvh) * G * g + key
    store_rows(dk_ptr, at * (D0 + D1), [x * softmax_scale for x in grads[0]], inside, D0, D1)
    store_rows(dv_ptr, at * (V0 + V1), grads[1], inside, V0, V1)
