"""Kernels of one decode step: attention split over the keys; split 0 also makes the entries of a chunk that is due.

Programs run in any order, so none reads what another writes in this step: split 0 takes the new token from the inputs,
the new entry from its registers and focal tokens from the ring, attends to these and stores them; the other splits
share the entries and tokens that the buffers held before. The last program of a KV head to finish joins the outputs of
all splits, in their order, and the last KV head of a row adds 1 to ``seen``. With many splits or few KV heads a second
kernel does both.

In pages a row may see what another row stores in the same step: requests share pages, and one begins with the prefix
that another completes. So the kernel is launched twice: first to store tokens and entries, then to attend to all.
``seen`` counts the new token and is not changed; a row with ``seen`` 0 is an unused place of the batch: its output is 0
and its pages are not read or written.

Shapes: B rows, H query heads, K KV heads, R = H / K, M entries, W and Q slots of the rings of tokens and of queries,
S splits, V columns of values. A summary is the mean of the newest ``num_summary`` queries. Scores are base 2.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from condense.ops.triton.device import entry
from condense.ops.triton.device import softmax as online
from condense.ops.triton.device.address import form_row, part_at, tile_in_pages, token_rows
from condense.ops.triton.device.codes import entries_in_words, from_words, load_vectors, row_width, to_words
from condense.ops.triton.device.parts import load_row, load_rows, store_row

_LOG2E = tl.constexpr(1.4426950408889634)


class _Scores(namedtuple("_Scores", "weigh attend bias biases")):
    """Scales and biases of scores.

    weigh: scale of the scores that weigh a chunk's tokens. attend: scale of attention's scores, base 2. bias: of all
    entries, base 2. biases: pointer to the biases of a KV head's entries, not base 2, if each entry has its own.
    """


class _Moment(
    namedtuple(
        "_Moment",
        "t first due begin slot seen_at_once base entries tokens first_entries first_single fine_first fines merge",
    )
):
    """The task of one step in one row.

    t: position of the new token. first: first position that is seen as a token. due: whether a chunk is due; then begin
    is the position of its first token, slot the slot of its first entry, and seen_at_once whether this step's query
    sees its entries. entries, tokens: numbers of entries and tokens that are seen; on rings, without those of this
    step. base: slot of the first entry. first_entries: entries before those of chunk 0; the first ``first_single`` of
    them stand for single tokens. fine_first, fines: the first fine entry that is seen, and the number of seen ones,
    without this step's. merge: number of the coarse entry that is due, -1 for none.
    """


class _Stretch(namedtuple("_Stretch", "first count")):
    """A stretch of ``count`` slots from slot ``first`` on."""


class _Read(namedtuple("_Read", "chunk key value bias ranked")):
    """The new token and the entry that is due, rounded as their buffers store them.

    chunk: the chunk that is due, if any, and the new token. key, value, bias: of the chunk's pooled entry, the bias
    base 2. ranked: scores of the chunk's tokens, if some are focal.
    """


class _Places(namedtuple("_Places", "part lse row S")):
    """Pointers to all splits' outputs ``[rows, S, V]`` and log-sum-exps ``[rows, S]``; row: a KV head's first row."""


@triton.jit
def _number_size(ptr):
    """Bytes of a number that ``ptr`` points to."""
    return ptr.dtype.element_ty.primitive_bitwidth // 8


@triton.jit
def _attend_keys(
    softmax, q, source, stretch, lo, hi, scale, bias, moment, PERIOD: tl.constexpr, FORM: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Add tiles ``[lo, hi)`` of a `_Stretch` of keys in the `Buffer` ``source`` to a softmax; no tile is empty.

    FORM: of its pages, if any. PERIOD > 0: only pooled entries get the bias: first entries from ``moment.first_single``
    on, and then the last of each ``PERIOD`` entries. PERIOD < 0: ``bias`` points to a bias per key, not base 2.
    """
    PRECISION: tl.constexpr = KIND.precision
    KEYS: tl.constexpr = entries_in_words(source.k.dtype, q[0].dtype, KIND.D0, KIND.D1, KIND.entry_bits, KIND.early)
    VALUES: tl.constexpr = not KIND.latent and entries_in_words(
        source.v.dtype, q[0].dtype, KIND.V0, KIND.V1, KIND.entry_bits, KIND.early
    )
    if KEYS:
        q = to_words(q[0], KIND.D0)  # 4 parts [rows, D0 // 4]
    if VALUES:
        softmax = online.Softmax(to_words(softmax.acc[0], KIND.V0), softmax.m, softmax.total)
    if FORM is not None:
        # addresses are found one tile ahead, so that loads of keys need not wait for loads of the page table
        place = tile_in_pages(source.size, stretch.first, stretch.count, lo, KIND.keys, FORM)
    for tile in range(lo, hi):
        i = tile * KIND.keys + tl.arange(0, KIND.keys)
        inside = i < stretch.count
        if FORM is None:
            # places beyond the last key read that key again: loads without a mask take fewer instructions
            at = stretch.first + tl.minimum(i, stretch.count - 1)
            at = tl.where(at >= source.size, at - source.size, at).to(tl.int64)
            s_k, s_v = source.s_k, source.s_v
        else:
            at, s_k, s_v = place, 1, 1
            place = tile_in_pages(source.size, stretch.first, stretch.count, tile + 1, KIND.keys, FORM)
        k = load_vectors(source.k, at * s_k, q[0].dtype, KIND.D0, KIND.D1, KIND.entry_bits, KIND.early)  # [keys, D]
        s = online.soft_cap(online.key_products(q, k, PRECISION) * scale, KIND.softcap)[0]  # [rows, keys]
        if PERIOD > 0:
            pooled = tl.where(
                i < moment.first_entries, i >= moment.first_single, (i - moment.first_entries) % PERIOD == PERIOD - 1
            )
            s += tl.where(pooled, bias, 0.0)[None, :]
        elif PERIOD < 0:
            own = bias + (i if FORM is None else part_at(bias, at * _number_size(source.k)))
            s += tl.load(own, mask=inside, other=0.0)[None, :] * _LOG2E
        else:
            s += bias
        s = tl.where(inside[None, :], s, float("-inf"))
        v = (k[0],)
        if not KIND.latent:
            v = load_vectors(source.v, at * s_v, q[0].dtype, KIND.V0, KIND.V1, KIND.entry_bits, KIND.early)
        softmax = online.add_keys(softmax, s, v, PRECISION)
    return online.Softmax((from_words(softmax.acc, KIND.V0),), softmax.m, softmax.total) if VALUES else softmax


@triton.jit
def _attend_focal(softmax, q, ring, chunk, scores, count, scale, KIND: tl.constexpr):
    """Add the focal tokens of a chunk of ``count`` tokens to a softmax. Every row must have seen a key before."""
    PRECISION: tl.constexpr = KIND.precision
    for start in range(0, count, 16):
        i = start + tl.arange(0, 16)
        _, focal = entry.focal_tokens(scores, i, i < count, KIND)
        k = entry.chunk_keys(ring, chunk, i, KIND)
        s = online.soft_cap(online.key_products(q, k, PRECISION) * scale, KIND.softcap)[0]  # [16, 16]
        s = tl.where(focal[None, :], s, float("-inf"))
        v = (k[0],) if KIND.latent else entry.chunk_values(ring, chunk, i, KIND)
        softmax = online.add_keys(softmax, s, v, PRECISION)
    return softmax


@triton.jit
def _read_token(heads, new, entries, fine, ring, past_queries, moment, chunk_size, scores, writes, KIND: tl.constexpr):
    """Make the entry that is due and return the step's `_Read`. Store entry, token and mean query if ``writes``.

    new: pointers to a KV head's new key and value. entries, fine, ring: `Buffer`s of the head; fine is None if there
    are no coarse entries.
    """
    num_summary: tl.constexpr = KIND.num_summary
    NEAR: tl.constexpr = KIND.near
    FAR: tl.constexpr = KIND.far
    k = load_row(new[0], KIND.D0, KIND.D1)  # [1, D]
    v = (k[0],) if KIND.latent else load_row(new[1], KIND.V0, KIND.V1)  # [1, V]
    chunk = entry.Chunk(moment.begin, chunk_size, moment.t, k, v)
    mean = entry.mean_query(heads, KIND.D0, KIND.D1) if KIND.scored else k
    # without a due chunk, the new entry is zero and not seen
    entry_k, entry_v = [tl.zeros_like(x) for x in k], [tl.zeros_like(x) for x in v]
    ranked = tl.full([KIND.tile], float("-inf"), tl.float32)
    bias = tl.zeros([1], tl.float32) + scores.bias
    summary = [x.to(tl.float32) for x in mean]
    if moment.due:
        if KIND.scored:
            summary = entry.summary_query(mean, past_queries, moment.t, num_summary, KIND.D0, KIND.D1)
        if KIND.focal > 0:
            ranked = entry.all_scores(ring, chunk, summary, scores.weigh, KIND)
        to, slot, biases = entries if fine is None else fine, moment.slot, scores.biases
        if FAR is not None:
            at = form_row(entries.size, slot, None, FAR)
            if KIND.matched:
                biases += part_at(biases, at * _number_size(entries.k))
            to, slot = entry.Buffer(entries.k + at, entries.v + at, 0, 0, 1), slot * 0
        key, value = entry.make_entries(to, ring, chunk, summary, ranked, slot, writes, scores.weigh, KIND)
        entry_k, entry_v = entry.put_entry(to, slot + KIND.focal, key, value, writes, KIND)
        if KIND.matched:
            bias = entry.matched_bias(ring, chunk, summary, ranked, key, scores.weigh, KIND)
            if writes:
                # entries of focal tokens, which come first, have bias 0
                j = tl.arange(0, KIND.tile)
                own = tl.where(j == KIND.focal, bias, 0.0)
                tl.store(biases + slot + j, own, mask=j <= KIND.focal)
            bias *= _LOG2E
    if KIND.coarse is not None:  # noqa: SIM102 - known when the kernel is compiled
        if writes & (moment.merge >= 0):
            # the fine entries that are merged were stored in earlier steps
            n: tl.constexpr = KIND.coarse.chunks
            at = (moment.merge * n % fine.size).to(tl.int64)
            merged = entry.mean_query(entry.Queries(fine.k + at * fine.s_k, fine.s_k, n), KIND.D0, KIND.D1)
            value = merged
            if not KIND.latent:
                value = entry.mean_query(entry.Queries(fine.v + at * fine.s_v, fine.s_v, n), KIND.V0, KIND.V1)
            entry.put_entry(entries, moment.merge, merged, value, True, KIND)
    if writes:
        store_row(ring.k + token_rows(ring.size, moment.t, None, ring.s_k, NEAR), k, KIND.D0, KIND.D1)
        if not KIND.latent:
            store_row(ring.v + token_rows(ring.size, moment.t, None, ring.s_v, NEAR), v, KIND.V0, KIND.V1)
        # pages hold no mean queries if a summary needs only the newest one
        if KIND.scored and (FAR is None or num_summary > 1):
            at = (moment.t % past_queries.size).to(tl.int64)
            store_row(past_queries.q + at * past_queries.s_q, mean, KIND.D0, KIND.D1)
    return _Read(chunk, entry_k, entry_v, bias, ranked)


@triton.jit
def _new_token(heads, ring, read, moment, places, scores, row_tile, KIND: tl.constexpr):
    """Split 0 of a KV head: store the output and log-sum-exp of attention to the new token and entries in ``read``."""
    chunk = read.chunk
    first_row = row_tile * KIND.rows
    for start in range(first_row, tl.minimum(first_row + KIND.rows, heads.size), 16):
        r = start + tl.arange(0, 16)
        q = load_rows(heads.q, r.to(tl.int64) * heads.s_q, r < heads.size, KIND.D0, KIND.D1)  # [16, D]
        to_token = online.soft_cap(entry.row_products(q, chunk.k) * scores.attend, KIND.softcap)[0]  # [16]
        to_token = tl.where(moment.first <= moment.t, to_token, float("-inf"))
        to_entry = online.soft_cap(entry.row_products(q, read.key) * scores.attend, KIND.softcap)[0] + read.bias
        to_entry = tl.where(moment.seen_at_once, to_entry, float("-inf"))
        m = tl.maximum(to_token, to_entry)
        finite = tl.where(m == float("-inf"), 0.0, m)
        a, b, acc = tl.exp2(to_token - finite), tl.exp2(to_entry - finite), ()
        for part in tl.static_range(len(chunk.v)):
            acc += (a[:, None] * chunk.v[part].to(tl.float32) + b[:, None] * read.value[part].to(tl.float32),)
        softmax = online.Softmax(acc, m, a + b)
        if KIND.focal > 0:
            count = tl.where(moment.seen_at_once, chunk.size, 0)
            softmax = _attend_focal(softmax, q, ring, chunk, read.ranked, count, scores.attend, KIND)
        at = (places.row + r).to(tl.int64) * places.S
        online.store_part(places.part, places.lse, softmax, at, r < heads.size, KIND.V0, KIND.V1)


@triton.jit
def _attend_share(heads, entries, fine, ring, moment, places, split, scores, row_tile, KIND: tl.constexpr):
    """Attend to a split's share of the keys (on rings those stored before this step), and store its results."""
    NEAR: tl.constexpr = KIND.near
    FAR: tl.constexpr = KIND.far
    r = row_tile * KIND.rows + tl.arange(0, KIND.rows)
    q = load_rows(heads.q, r.to(tl.int64) * heads.s_q, r < heads.size, KIND.D0, KIND.D1)  # [rows, D]
    tokens = moment.tokens
    if NEAR is None:
        # limited to the ring, because a replayed graph may run more steps than the cache has room for
        tokens = tl.minimum(tokens, ring.size)
    far, near = tl.cdiv(moment.entries, KIND.keys), tl.cdiv(tokens, KIND.keys)
    old_far, old_near = far, near
    # split 0 gets no share of the older keys where it reads what this step stores
    WAITS: tl.constexpr = KIND.early and not KIND.stores
    APART: tl.constexpr = 1 if KIND.stores or KIND.early else 0
    if WAITS:
        # of what a row reads, this step stores at most the newest entry and the newest two tokens: its own, and one of
        # another row that completes a shared prefix
        old_far, old_near = tl.maximum(moment.entries - 1, 0) // KIND.keys, tl.maximum(tokens - 2, 0) // KIND.keys
        if split == 0:
            gdc_wait()
    fines = 0 if fine is None else tl.cdiv(moment.fines, KIND.keys)
    tiles = old_far + fines + old_near
    lo, hi = tiles * (split - APART) // (places.S - APART), tiles * (split - (APART - 1)) // (places.S - APART)
    begin, end = lo, tl.minimum(hi, old_far)
    if WAITS:
        begin, end = tl.where(split == 0, old_far, begin), tl.where(split == 0, far, end)
    softmax = online.empty_softmax(KIND.rows, KIND.keys, KIND.V0, KIND.V1)
    bias = scores.biases if KIND.matched else scores.bias
    softmax = _attend_keys(
        softmax, q, entries, _Stretch(moment.base, moment.entries), begin, end, scores.attend,
        bias if fine is None else KIND.coarse.bias, moment, -1 if KIND.matched else KIND.period, FAR, KIND,
    )  # fmt: skip
    lo, hi = lo - old_far, hi - old_far
    if fine is not None:
        stretch = _Stretch(moment.fine_first % fine.size, moment.fines)
        begin, end = tl.maximum(lo, 0), tl.minimum(hi, fines)
        softmax = _attend_keys(softmax, q, fine, stretch, begin, end, scores.attend, bias, moment, 0, None, KIND)
        lo, hi = lo - fines, hi - fines
    begin, end = tl.maximum(lo, 0), hi
    if WAITS:
        begin, end = tl.where(split == 0, old_near, begin), tl.where(split == 0, near, end)
    stretch = _Stretch(moment.first % ring.size if NEAR is None else moment.first, tokens)
    softmax = _attend_keys(softmax, q, ring, stretch, begin, end, scores.attend, 0.0, moment, 0, NEAR, KIND)
    if WAITS:
        # all splits wait before they end, so that the next kernel finds everything that this step stored
        gdc_wait()
    at = (places.row + r).to(tl.int64) * places.S + split
    softmax = online.Softmax(softmax.acc, softmax.m, tl.sum(softmax.total, 1))
    online.store_part(places.part, places.lse, softmax, at, r < heads.size, KIND.V0, KIND.V1)


@triton.jit
def _join(places, sink_ptr, kvh, out_ptr, R: tl.constexpr, KIND: tl.constexpr):
    """Join all splits of a KV head and store its outputs ``[R, V]``; zeros if there are no splits."""
    V: tl.constexpr = KIND.V0 + KIND.V1
    r, column = tl.arange(0, triton.next_power_of_2(R)), tl.arange(0, triton.next_power_of_2(V))
    row = (places.row + r).to(tl.int64)
    # [R, V], both rounded up to powers of two
    out = online.join_parts(
        places.part, places.lse, row, r < R, places.S, column, V, KIND.joined_parts, sink_ptr, kvh * R + r
    )
    there = (r < R)[:, None] & (column < V)[None, :]
    tl.store(out_ptr + row[:, None] * V + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _moment(
    t, chunk: tl.constexpr, window, max_chunks, summary_delay, M, first_entries, first_single, KIND: tl.constexpr
):
    """The `_Moment` of the step that reads token t."""
    entries_each: tl.constexpr = KIND.focal + 1
    if KIND.coarse is None:
        max_chunks = tl.minimum(max_chunks, (M - first_entries) // entries_each)
    closed = tl.maximum(t + 1 - window, 0) // chunk
    first = closed * chunk
    visible = tl.minimum(closed, max_chunks)
    complete = t + 1 - summary_delay
    number = complete // chunk - 1
    due = (complete > 0) & (complete % chunk == 0) & (number < max_chunks)
    seen_at_once = due & (number < visible)
    if KIND.near is not None:
        # an entry is in slot ``t // chunk`` for the token t that completes its summary (why: `condense.serving.plan`)
        base, entries = summary_delay // chunk, visible
    else:
        # without the entries that this step makes, which are the last ones
        base, entries = 0, first_entries + (visible - seen_at_once.to(tl.int32)) * entries_each
    slot = base + first_entries + number * entries_each
    tokens = tl.maximum(t - first, 0) if KIND.near is None else t + 1 - first
    fine_first, fines, merge = 0, 0, -1
    if KIND.coarse is not None:
        size: tl.constexpr = chunk * KIND.coarse.chunks
        behind = tl.maximum(t + 1 - KIND.coarse.window, 0) // size
        slot, entries, fine_first = number % KIND.coarse.slots, tl.minimum(behind, M), behind * KIND.coarse.chunks
        fines = visible - seen_at_once.to(tl.int32) - fine_first
        # a coarse entry is made a chunk of tokens before it is seen
        beyond = t + 1 + chunk - KIND.coarse.window
        merge = tl.where((beyond > 0) & (beyond % size == 0) & (beyond // size <= M), beyond // size - 1, -1)
    return _Moment(
        t, first, due, number * chunk, slot, seen_at_once, base, entries, tokens, first_entries, first_single,
        fine_first, fines, merge,
    )  # fmt: skip


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, entries_k_ptr, entries_v_ptr, ring_k_ptr, ring_v_ptr, ring_q_ptr, seen_ptr, first_ptr,
    arrived_ptr, biases_ptr, real_ptr, sink_ptr, counter_ptr, part_ptr, lse_ptr, out_ptr, near_ptr, far_ptr, past_ptr,
    fine_k_ptr, fine_v_ptr,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_ekb, s_ekh, s_ekn, s_evb, s_evh, s_evn,
    s_rkb, s_rkh, s_rkn, s_rvb, s_rvh, s_rvn, s_rqb, s_rqh, s_rqn,
    s_seen, s_first, s_first_n, s_arrived, s_arrived_n, s_real,
    M, W, Q, window, max_chunks, summary_delay, scale, score_scale, bias, KIND: tl.constexpr,
):  # fmt: skip
    """Write part float32 ``[B, H, S, V]``, lse ``[B, H, S]`` and, if KIND joins, out ``[B, H, 1, V]``; grid (S, row
    tiles, B * K).

    arrived int32 ``[B, K + 1]``: finished programs of each KV head, and finished KV heads; 0 before and after.
    biases float32 ``[B, K, M]``, contiguous, read and written if entries have biases of their own. sink float ``[H]``:
    logits without a value, None for none. counter int64 ``[]``: 1 is added to it; None for none. near, far, past: page
    tables for the page forms in `Kind`. fine: rings of fine entries, contiguous; None without coarse ones.
    """
    K: tl.constexpr = KIND.K
    R: tl.constexpr = KIND.R
    chunk: tl.constexpr = KIND.chunk
    if KIND.early:
        if not KIND.attends:
            # the kernel that attends reads older keys before it waits: they must be written before it is launched
            gdc_wait()
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
    heads = entry.Queries(q_ptr + b * s_qb + kvh * R * s_qh, s_qh, R)
    new = (k_ptr + b * s_kb + kvh * s_kh, v_ptr + b * s_vb + kvh * s_vh)
    past_queries = entry.Queries(ring_q_ptr + b * s_rqb + kvh * s_rqh, s_rqn, Q)
    fine = None
    if KIND.coarse is not None:
        width: tl.constexpr = KIND.D0 + KIND.D1
        width_v: tl.constexpr = 0 if KIND.latent else KIND.V0 + KIND.V1
        first = head.to(tl.int64) * KIND.coarse.slots
        fine = entry.Buffer(fine_k_ptr + first * width, fine_v_ptr + first * width_v, width, width_v, KIND.coarse.slots)
    if KIND.near is None:
        entries = entry.Buffer(
            entries_k_ptr + b * s_ekb + kvh * s_ekh, entries_v_ptr + b * s_evb + kvh * s_evh, s_ekn, s_evn, M
        )
        if KIND.entry_bits < 16:
            # contiguous rows of bytes, whose width the compiler knows: it loads whole words
            dtype: tl.constexpr = q_ptr.dtype.element_ty
            ROW: tl.constexpr = row_width(KIND.D0 + KIND.D1, KIND.entry_bits, dtype)
            ROW_V: tl.constexpr = row_width(0 if KIND.latent else KIND.V0 + KIND.V1, KIND.entry_bits, dtype)
            first = head.to(tl.int64) * M
            entries = entry.Buffer(entries_k_ptr + first * ROW, entries_v_ptr + first * ROW_V, ROW, ROW_V, M)
        ring = entry.Buffer(ring_k_ptr + b * s_rkb + kvh * s_rkh, ring_v_ptr + b * s_rvb + kvh * s_rvh, s_rkn, s_rvn, W)
    else:
        t -= 1
        live = t >= 0
        first, step = kvh * KIND.near.s_head, KIND.near.s_slot
        ring = entry.Buffer(ring_k_ptr + first, ring_v_ptr + first, step, step, near_ptr + b * KIND.near.s_table)
        first, step = kvh * KIND.far.s_head, KIND.far.s_slot
        entries = entry.Buffer(entries_k_ptr + first, entries_v_ptr + first, step, step, far_ptr + b * KIND.far.s_table)
        if KIND.past is not None:
            page = tl.load(past_ptr + b * KIND.past.s_table).to(tl.int64) * KIND.past.s_page
            past_queries = entry.Queries(ring_q_ptr + page + kvh * KIND.past.s_head, KIND.past.s_slot, KIND.past.slots)
    places = _Places(part_ptr, lse_ptr, head * R, S)
    if KIND.near is None:
        biases_ptr += head.to(tl.int64) * M
    elif KIND.matched:
        biases_ptr += part_at(biases_ptr, kvh * KIND.far.s_head * _number_size(entries_k_ptr))
    scores = _Scores(scale, score_scale, bias, biases_ptr)
    moment = _moment(t, chunk, window, max_chunks, summary_delay, M, first_entries, first_single, KIND)

    if live:
        if not KIND.stores:
            _attend_share(heads, entries, fine, ring, moment, places, split, scores, row_tile, KIND)
        elif split == 0:
            # every tile of rows makes the entry, only the first one stores it
            read = _read_token(
                heads, new, entries, fine, ring, past_queries, moment, chunk, scores, row_tile == 0, KIND
            )
            if KIND.attends:
                _new_token(heads, ring, read, moment, places, scores, row_tile, KIND)
        elif KIND.attends:
            _attend_share(heads, entries, fine, ring, moment, places, split, scores, row_tile, KIND)

    if KIND.joins:
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
    part_ptr, lse_ptr, out_ptr, seen_ptr, real_ptr, sink_ptr, counter_ptr, rotation_ptr, s_seen, s_real, H, S,
    V: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, ROTATED: tl.constexpr, HAS_REAL: tl.constexpr,
    EARLY: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Join all splits to out ``[B, H, 1, V]`` and add 1 to ``seen``. Grid (B * H, tiles of BC columns).

    sink, counter: as in `step_kernel`. seen: None if it must not change. OUT: first two strides of out, None if it is
    contiguous. ROTATED: D if outputs of splits are rotated by `condense.ops.recall.index.rotation` ``[D, D]``, else 0;
    then BC is the width of the rotation's blocks.
    """
    if EARLY:
        gdc_wait()
    row, b = tl.program_id(0).to(tl.int64), (tl.program_id(0) // H).to(tl.int64)
    live = 1
    if HAS_REAL:
        live = (tl.load(real_ptr + b * s_real) != 0).to(tl.int32)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    one = tl.arange(0, 1)
    out = online.join_parts(
        part_ptr, lse_ptr, row + one, one < 1, live * S, column, V, BS, sink_ptr, row % H + one
    )  # [1, BC]
    if ROTATED > 0:
        block = tl.load(rotation_ptr + column[:, None] * ROTATED + column[None, :])  # [BC, BC]
        out = tl.sum(block.to(tl.float32) * out, 1)[None, :]
    out_ptr += row * V if OUT is None else b * OUT[0] + row % H * OUT[1]
    tl.store(out_ptr + column[None, :], out.to(out_ptr.dtype.element_ty), mask=(column < V)[None, :])

    if seen_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if (tl.program_id(1) == 0) & (row % H == 0):
            tl.store(seen_ptr + b * s_seen, tl.load(seen_ptr + b * s_seen) + live)
            if counter_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
                if row == 0:
                    tl.store(counter_ptr, tl.load(counter_ptr) + 1)
