"""Kernels of one decode step: attention split over the keys; split 0 also makes the entries of a chunk that is due.

Programs run in any order, so none reads what another writes in this step: split 0 takes the new token from the inputs,
the new entry from its registers and focal tokens from the ring, attends to these and stores them; the other splits
share the entries and tokens that the buffers held before. The last program of a KV head to finish joins the outputs of
all splits, in their order, and the last one of a row adds 1 to ``seen``; with many splits, a second kernel does both.

Shapes: B rows, H query heads, K KV heads, R = H / K, M entries, W and Q slots of the rings of tokens and of queries,
S splits, V columns of values. A summary is the mean of the newest ``num_summary`` queries. Scores are base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device.codes import load_vectors, row_width
from condense.ops.triton.device.entry import (
    Buffer,
    Chunk,
    Queries,
    all_scores,
    chunk_keys,
    chunk_values,
    focal_tokens,
    make_entries,
    matched_bias,
    mean_query,
    put_entry,
    row_products,
    summary_query,
)
from condense.ops.triton.device.parts import load_row, load_rows, parts, store_row
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.softmax import (
    Softmax,
    add_keys,
    empty_softmax,
    join_parts,
    key_products,
    store_part,
    whole,
)

_LOG2E = tl.constexpr(1.4426950408889634)


class Fixed(NamedTuple):
    """Numbers of a model and a method for which the kernel is compiled, because dividing by them would take long.

    K: KV heads. R: query heads per KV head. num_summary: mean queries in a summary query. chunk: tokens of a chunk.
    """

    K: int
    R: int
    num_summary: int
    chunk: int


class _Scores(NamedTuple):
    """Scales and biases of scores.

    weigh: scale of the scores that weigh a chunk's tokens. attend: scale of attention's scores, base 2. bias: of all
    entries, base 2. biases: pointer to a KV head's natural biases, if entries have their own.
    """

    weigh: Any
    attend: Any
    bias: Any
    biases: Any


class _Moment(NamedTuple):
    """The task of one step in one row.

    t: position of the new token. first: first position that is seen as a token. due: whether a chunk is due; then begin
    is the position of its first token, slot the slot of its first entry, and seen_at_once whether this step's query
    sees its entries. entries, tokens: how many of those in the buffers before this step are seen. first_entries:
    entries that stand before those of chunk 0; the first ``first_single`` of them stand for single tokens.
    """

    t: Any
    first: Any
    due: Any
    begin: Any
    slot: Any
    seen_at_once: Any
    entries: Any
    tokens: Any
    first_entries: Any
    first_single: Any


class _New(NamedTuple):
    """Pointers to a KV head's new key and value."""

    k: Any
    v: Any


class _Places(NamedTuple):
    """Pointers to all splits' outputs ``[rows, S, V]`` and log-sum-exps ``[rows, S]``; row: a KV head's first row."""

    part: Any
    lse: Any
    row: Any
    S: Any


@triton.jit
def _attend_keys(
    softmax, q, source, lo, hi, count, first, scale, bias, moment, PERIOD: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Add tiles ``[lo, hi)`` of the ``count`` keys of a buffer that begin in slot ``first``; no tile is empty.

    PERIOD > 0: only pooled entries get the bias: first entries from ``moment.first_single`` on, and behind them the
    last of each ``PERIOD`` entries. PERIOD < 0: ``bias`` points to each key's own, natural.
    """
    PRECISION: tl.constexpr = KIND.precision
    for tile in range(lo, hi):
        i = tile * KIND.keys + tl.arange(0, KIND.keys)
        inside = i < count
        # places beyond the last key read that key again: loads without a mask take fewer instructions
        at = first + tl.minimum(i, count - 1)
        at = tl.where(at >= source.size, at - source.size, at).to(tl.int64)
        k = load_vectors(source.k, at * source.s_k, q[0].dtype, KIND.D0, KIND.D1, KIND.entry_bits, KIND.early, True)
        s = soft_cap(key_products(q, k, PRECISION) * scale, KIND.softcap)[0]
        if PERIOD > 0:
            pooled = tl.where(
                i < moment.first_entries, i >= moment.first_single, (i - moment.first_entries) % PERIOD == PERIOD - 1
            )
            s += tl.where(pooled, bias, 0.0)[None, :]
        elif PERIOD < 0:
            s += tl.load(bias + i, mask=inside, other=0.0)[None, :] * _LOG2E
        else:
            s += bias
        s = tl.where(inside[None, :], s, float("-inf"))
        v = (k[0],)
        if not KIND.latent:
            v = load_vectors(
                source.v, at * source.s_v, q[0].dtype, KIND.V0, KIND.V1, KIND.entry_bits, KIND.early, False
            )
        softmax = add_keys(softmax, s, v, PRECISION)
    return softmax


@triton.jit
def _attend_focal(softmax, q, ring, chunk, scores, count, scale, KIND: tl.constexpr):
    """Add the focal tokens of a chunk of ``count`` tokens. Every row must have seen a key before."""
    PRECISION: tl.constexpr = KIND.precision
    for start in range(0, count, 16):
        i = start + tl.arange(0, 16)
        _, focal = focal_tokens(scores, i, i < count, KIND)
        k = chunk_keys(ring, chunk, i, KIND)
        s = soft_cap(key_products(q, k, PRECISION) * scale, KIND.softcap)[0]
        s = tl.where(focal[None, :], s, float("-inf"))
        v = (k[0],) if KIND.latent else chunk_values(ring, chunk, i, KIND)
        softmax = add_keys(softmax, s, v, PRECISION)
    return softmax


@triton.jit
def _two_rows(a, x, b, y):
    """``a x + b y`` for weights ``[n]`` and rows ``[1, P]``, float32 ``[n, P]``."""
    first = a[:, None] * x[0].to(tl.float32) + b[:, None] * y[0].to(tl.float32)
    return parts(first, a[:, None] * x[1].to(tl.float32) + b[:, None] * y[1].to(tl.float32) if len(x) == 2 else None)


@triton.jit
def _new_token(
    heads, new, entries, ring, past_queries, num_summary, moment, chunk_size, places, scores, row_tile,
    KIND: tl.constexpr,
):  # fmt: skip
    """Split 0 of a KV head: attention to the new token and the new entries. The first tile of rows stores them."""
    writes = row_tile == 0
    k = load_row(new.k, KIND.D0, KIND.D1)
    v = (k[0],) if KIND.latent else load_row(new.v, KIND.V0, KIND.V1)
    chunk = Chunk(moment.begin, chunk_size, moment.t, k, v)
    mean = mean_query(heads, KIND.D0, KIND.D1) if KIND.scored else k
    # without a due chunk, the new entry is zero and not seen
    entry_k, entry_v = [tl.zeros_like(x) for x in k], [tl.zeros_like(x) for x in v]
    ranked = tl.full([KIND.tile], float("-inf"), tl.float32)
    bias = tl.zeros([1], tl.float32) + scores.bias
    summary = [x.to(tl.float32) for x in mean]
    if moment.due:
        if KIND.scored:
            summary = summary_query(mean, past_queries, moment.t, num_summary, KIND.D0, KIND.D1)
        if KIND.focal > 0:
            ranked = all_scores(ring, chunk, summary, scores.weigh, KIND)
        key, value = make_entries(entries, ring, chunk, summary, ranked, moment.slot, writes, scores.weigh, KIND)
        entry_k, entry_v = put_entry(entries, moment.slot + KIND.focal, key, value, writes, KIND)
        if KIND.matched:
            bias = matched_bias(ring, chunk, summary, ranked, key, scores.weigh, KIND)
            if writes:
                # the focal tokens, which come first, have none
                j = tl.arange(0, KIND.tile)
                own = tl.where(j == KIND.focal, bias, 0.0)
                tl.store(scores.biases + moment.slot + j, own, mask=j <= KIND.focal)
            bias *= _LOG2E
    if writes:
        at = (moment.t % ring.size).to(tl.int64)
        store_row(ring.k + at * ring.s_k, k, KIND.D0, KIND.D1)
        if not KIND.latent:
            store_row(ring.v + at * ring.s_v, v, KIND.V0, KIND.V1)
        if KIND.scored:
            at = (moment.t % past_queries.size).to(tl.int64)
            store_row(past_queries.q + at * past_queries.s_q, mean, KIND.D0, KIND.D1)

    first_row = row_tile * KIND.rows
    for start in range(first_row, tl.minimum(first_row + KIND.rows, heads.size), 16):
        r = start + tl.arange(0, 16)
        q = load_rows(heads.q, r.to(tl.int64) * heads.s_q, r < heads.size, KIND.D0, KIND.D1)
        to_token = soft_cap(row_products(q, k) * scores.attend, KIND.softcap)[0]
        to_token = tl.where(moment.first <= moment.t, to_token, float("-inf"))
        to_entry = soft_cap(row_products(q, entry_k) * scores.attend, KIND.softcap)[0] + bias
        to_entry = tl.where(moment.seen_at_once, to_entry, float("-inf"))
        m = tl.maximum(to_token, to_entry)
        finite = tl.where(m == float("-inf"), 0.0, m)
        a, b = tl.exp2(to_token - finite), tl.exp2(to_entry - finite)
        softmax = Softmax(_two_rows(a, v, b, entry_v), m, a + b)
        if KIND.focal > 0:
            count = tl.where(moment.seen_at_once, chunk_size, 0)
            softmax = _attend_focal(softmax, q, ring, chunk, ranked, count, scores.attend, KIND)
        at = (places.row + r).to(tl.int64) * places.S
        store_part(places.part, places.lse, softmax, at, r < heads.size, KIND.V0, KIND.V1)


@triton.jit
def _share(
    heads, entries, ring, moment, places, split, scores, row_tile, KIND: tl.constexpr
):  # fmt: skip
    """A split from 1 on: attention to its share of what the buffers held before the step."""
    r = row_tile * KIND.rows + tl.arange(0, KIND.rows)
    q = load_rows(heads.q, r.to(tl.int64) * heads.s_q, r < heads.size, KIND.D0, KIND.D1)
    # limited to the ring, because a replayed graph may run more steps than the cache has room for
    tokens = tl.minimum(moment.tokens, ring.size)
    entry_tiles = tl.cdiv(moment.entries, KIND.keys)
    tiles = entry_tiles + tl.cdiv(tokens, KIND.keys)
    lo, hi = tiles * (split - 1) // (places.S - 1), tiles * split // (places.S - 1)
    softmax = empty_softmax(KIND.rows, KIND.V0, KIND.V1, KIND.keys)
    softmax = _attend_keys(
        softmax, q, entries, lo, tl.minimum(hi, entry_tiles), moment.entries, 0, scores.attend,
        scores.biases if KIND.matched else scores.bias, moment, -1 if KIND.matched else KIND.period, KIND,
    )  # fmt: skip
    softmax = _attend_keys(
        softmax, q, ring, tl.maximum(lo - entry_tiles, 0), hi - entry_tiles, tokens, moment.first % ring.size,
        scores.attend, 0.0, moment, 0, KIND,
    )  # fmt: skip
    at = (places.row + r).to(tl.int64) * places.S + split
    store_part(places.part, places.lse, whole(softmax), at, r < heads.size, KIND.V0, KIND.V1)


@triton.jit
def _join(places, sink_ptr, kvh, out_ptr, R, KIND: tl.constexpr):
    """Join all splits of a KV head and store its outputs ``[R, V]``; zeros if there are no splits."""
    V: tl.constexpr = KIND.V0 + KIND.V1
    r, column = tl.arange(0, KIND.joined_rows), tl.arange(0, KIND.joined_columns)
    row = (places.row + r).to(tl.int64)
    out = join_parts(places.part, places.lse, row, r < R, places.S, column, V, KIND.joined_parts, sink_ptr, kvh * R + r)
    there = (r < R)[:, None] & (column < V)[None, :]
    tl.store(out_ptr + row[:, None] * V + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _moment(
    t, chunk: tl.constexpr, window, max_chunks, summary_delay, M, first_entries, first_single, KIND: tl.constexpr
):
    """The `_Moment` of the step that reads token t."""
    entries_each: tl.constexpr = KIND.focal + 1
    max_chunks = tl.minimum(max_chunks, (M - first_entries) // entries_each)
    closed = tl.maximum(t + 1 - window, 0) // chunk
    first = closed * chunk
    visible = tl.minimum(closed, max_chunks)
    complete = t + 1 - summary_delay
    number = complete // chunk - 1
    due = (complete > 0) & (complete % chunk == 0) & (number < max_chunks)
    seen_at_once = due & (number < visible)
    # the new entries are the last ones
    entries = first_entries + (visible - seen_at_once.to(tl.int32)) * entries_each
    slot = first_entries + number * entries_each
    return _Moment(
        t, first, due, number * chunk, slot, seen_at_once, entries, tl.maximum(t - first, 0),
        first_entries, first_single,
    )  # fmt: skip


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, entries_k_ptr, entries_v_ptr, ring_k_ptr, ring_v_ptr, ring_q_ptr, seen_ptr, first_ptr,
    arrived_ptr, biases_ptr, real_ptr, sink_ptr, counter_ptr, part_ptr, lse_ptr, out_ptr,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_ekb, s_ekh, s_ekn, s_evb, s_evh, s_evn,
    s_rkb, s_rkh, s_rkn, s_rvb, s_rvh, s_rvn, s_rqb, s_rqh, s_rqn,
    s_seen, s_first, s_first_n, s_arrived, s_arrived_n, s_real,
    M, W, Q, window, max_chunks, summary_delay, scale, score_scale, bias, FIXED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """part float32 ``[B, H, S, V]`` and log-sum-exp ``[B, H, S]``, or out ``[B, H, 1, V]``; grid (S, row tiles, B * K).

    arrived int32 ``[B, K + 1]``: finished programs of each KV head, and finished KV heads; 0 before and after.
    biases float32 ``[B, K, M]``, contiguous, read and written if they are matched. sink float ``[H]``: logits without a
    value, None for none. counter int64 ``[]``: 1 is added to it; None for none.
    """
    K: tl.constexpr = FIXED.K
    R: tl.constexpr = FIXED.R
    num_summary: tl.constexpr = FIXED.num_summary
    chunk: tl.constexpr = FIXED.chunk
    if KIND.early:
        if KIND.joins:
            gdc_wait()
        else:
            gdc_launch_dependents()
    split, S, row_tile, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    # addresses need 64 bits
    b, kvh = (head // K).to(tl.int64), (head % K).to(tl.int64)
    seen = tl.load(seen_ptr + b * s_seen)
    t = seen.to(tl.int32)
    live = tl.load(real_ptr + b * s_real) != 0 if KIND.has_real else True
    first_entries, first_single = 0, 0
    if KIND.has_first:
        first_entries = tl.load(first_ptr + b * s_first).to(tl.int32)
        first_single = tl.load(first_ptr + b * s_first + s_first_n).to(tl.int32)
    heads = Queries(q_ptr + b * s_qb + kvh * R * s_qh, s_qh, R)
    new = _New(k_ptr + b * s_kb + kvh * s_kh, v_ptr + b * s_vb + kvh * s_vh)
    past_queries = Queries(ring_q_ptr + b * s_rqb + kvh * s_rqh, s_rqn, Q)
    entries = Buffer(entries_k_ptr + b * s_ekb + kvh * s_ekh, entries_v_ptr + b * s_evb + kvh * s_evh, s_ekn, s_evn, M)
    if KIND.entry_bits < 16:
        # contiguous rows of bytes, whose width the compiler knows: it loads whole words
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        ROW: tl.constexpr = row_width(KIND.D0 + KIND.D1, KIND.entry_bits, dtype)
        ROW_V: tl.constexpr = row_width(0 if KIND.latent else KIND.V0 + KIND.V1, KIND.entry_bits, dtype)
        first = head.to(tl.int64) * M
        entries = Buffer(entries_k_ptr + first * ROW, entries_v_ptr + first * ROW_V, ROW, ROW_V, M)
    ring = Buffer(ring_k_ptr + b * s_rkb + kvh * s_rkh, ring_v_ptr + b * s_rvb + kvh * s_rvh, s_rkn, s_rvn, W)
    places = _Places(part_ptr, lse_ptr, head * R, S)
    scores = _Scores(scale, score_scale, bias, biases_ptr + head.to(tl.int64) * M)
    moment = _moment(t, chunk, window, max_chunks, summary_delay, M, first_entries, first_single, KIND)

    if live:
        if split == 0:
            _new_token(
                heads, new, entries, ring, past_queries, num_summary, moment, chunk, places, scores, row_tile, KIND
            )
        else:
            _share(heads, entries, ring, moment, places, split, scores, row_tile, KIND)

    if KIND.joins:
        if KIND.early:
            # only now: launched earlier, programs of the next step would take multiprocessors from this one
            gdc_launch_dependents()
        # all threads of the program must have stored their part before it is counted as done
        tl.debug_barrier()
        arrived = arrived_ptr + b * s_arrived
        if tl.atomic_add(arrived + kvh * s_arrived_n, 1, sem="acq_rel") == S - 1:
            # every program of the head has read `seen`
            joined = tl.atomic_add(arrived + K * s_arrived_n, 1, sem="relaxed")
            tl.store(arrived + kvh * s_arrived_n, 0)
            joined_places = _Places(part_ptr, lse_ptr, head * R, tl.where(live, S, 0))
            _join(joined_places, sink_ptr, kvh, out_ptr, R, KIND)
            if joined == K - 1:
                tl.store(arrived + K * s_arrived_n, 0)
                tl.store(seen_ptr + b * s_seen, seen + tl.where(live, 1, 0))
                if counter_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
                    if b == 0:
                        tl.store(counter_ptr, tl.load(counter_ptr) + 1)


@triton.jit
def step_join_kernel(
    part_ptr, lse_ptr, out_ptr, seen_ptr, real_ptr, sink_ptr, counter_ptr, s_seen, s_real, H, S,
    V: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, HAS_REAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, 1, V]``, contiguous; 1 is added to ``seen``. Grid (B * H, columns).

    sink, counter: as of `step_kernel`.
    """
    if EARLY:
        gdc_wait()
    row, b = tl.program_id(0).to(tl.int64), (tl.program_id(0) // H).to(tl.int64)
    live = 1
    if HAS_REAL:
        live = (tl.load(real_ptr + b * s_real) != 0).to(tl.int32)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    one = tl.arange(0, 1)
    out = join_parts(part_ptr, lse_ptr, row + one, one < 1, live * S, column, V, BS, sink_ptr, row % H + one)
    tl.store(out_ptr + row * V + column[None, :], out.to(out_ptr.dtype.element_ty), mask=(column < V)[None, :])

    if (tl.program_id(1) == 0) & (row % H == 0):
        tl.store(seen_ptr + b * s_seen, tl.load(seen_ptr + b * s_seen) + live)
        if counter_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
            if row == 0:
                tl.store(counter_ptr, tl.load(counter_ptr) + 1)
