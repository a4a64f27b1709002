"""Forward kernel of attention over a list of sources: one online softmax, one source after the other.

A program owns a tile of rows, see `condense.ops.triton.device.rule`. Blocks of keys that all its rows see whole are
not masked. Keys and values are read through tensor descriptors ``[B, K, N, D]``, which give zeros past the end.

Shapes: B rows of the batch, K KV heads, R query heads per KV head, L queries, N entries of a source,
D0 + D1 width of queries and keys, V0 + V1 of values: parts, see `condense.ops.triton.device.parts`. Descriptors k0 to
k3 and v0 to v3 read the first parts of up to four sources, k0_rest and so on the second parts; None if not there.
BM rows and BN keys per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from condense.ops.triton.device.parts import add_weighted, load_block, load_rows, parts, products, store_rows, zeros
from condense.ops.triton.device.records import Row, RowSource, RowSpans, Rule, Start
from condense.ops.triton.device.rule import begins_at_0, cut, start_of_row, tile_rows, visible
from condense.ops.triton.device.scores import soft_cap
from condense.ops.triton.device.softmax import Softmax

# not specialised: these numbers change from call to call, and a new value must not compile a new kernel
VARYING = ("L", "query_start", "window_start", "padding", "first_entries", "chunk", "window", "max_chunks")


@triton.jit
def forward_keys(
    softmax,
    q,
    source,
    bias,
    lo,
    hi,
    first,
    last,
    scale,
    MASKED: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over keys ``[lo, hi)`` of one source; each row sees ``[first, last)``. Scores are base 2.

    bias: pointer to the biases of all rows, None for none. CAP: soft cap, base 2, 0.0 for none.
    """
    acc, m, total = softmax.acc, softmax.m, softmax.total
    BIASED: tl.constexpr = bias is not None
    BN: tl.constexpr = source.k[0].block_shape[2]
    for start in range(lo, hi, BN):
        n = start + tl.arange(0, BN)
        k = load_block(source.k, [source.b, source.head, start, 0], BN)
        s = products(q, k, PRECISION)
        if CAP > 0:
            s = soft_cap(s * scale, CAP)[0] + source.level
        if BIASED:
            at_bias = tl.load(bias + source.bias_at + n, mask=n < source.k[0].shape[2], other=0.0)[None, :]
            s = s + at_bias if CAP > 0 else s * scale + at_bias
        if MASKED:
            s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] < last[:, None]), s, float("-inf"))
        # scale > 0, so the maximum can be taken before scaling: one fused multiply-add per score remains
        m_new = tl.maximum(m, tl.max(s, 1) if BIASED or CAP > 0 else tl.max(s, 1) * scale + source.level)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s - m_safe[:, None] if BIASED or CAP > 0 else s * scale - (m_safe - source.level)[:, None])
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.sum(p, 1)
        v = load_block(source.v, [source.b, source.head, start, 0], BN)
        acc = add_weighted([x * alpha[:, None] for x in acc], p, v, PRECISION)
        m = m_new
    return Softmax(acc, m, total)


@triton.jit
def over_source(
    KEYS: tl.constexpr, state, queries, source, bias, seen, scale,
    FROM_0: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with all keys of a source that queries see. KEYS: adds a stretch of keys to it, `forward_keys` or
    `condense.ops.triton.attend_backward.dq_keys`. seen: the span ``[first, last)`` of each row. FROM_0: as of `cut`.
    """
    first, last = seen
    lo, left, right, hi = cut(first, last, FROM_0, source.k[0].block_shape[2])
    if not FROM_0:
        state = KEYS(state, queries, source, bias, lo, left, first, last, scale, True, CAP, PRECISION)
    state = KEYS(state, queries, source, bias, left, right, first, last, scale, False, CAP, PRECISION)
    return KEYS(state, queries, source, bias, right, hi, first, last, scale, True, CAP, PRECISION)


@triton.jit
def store_output(out_ptr, lse_ptr, softmax, at, real, V0: tl.constexpr, V1: tl.constexpr):
    """Store outputs and natural log-sum-exps of rows ``at``; 0 and -inf for those that saw no key."""
    safe = tl.where(softmax.total > 0, softmax.total, 1.0)
    store_rows(out_ptr, at * (V0 + V1), [x / safe[:, None] for x in softmax.acc], real, V0, V1)
    lse = tl.where(softmax.total > 0, (softmax.m + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + at, lse, mask=real)


@triton.jit(do_not_specialize=VARYING)
def attend_fwd_kernel(
    q_ptr,
    k0, k1, k2, k3, k0_rest, k1_rest, k2_rest, k3_rest, v0, v1, v2, v3, v0_rest, v1_rest, v2_rest, v3_rest,
    biases, spans_ptr, out_ptr, lse_ptr, s_q, s_bias, s_spans, levels, K, R, L,
    chunk, window, entries, max_chunks, query_start, window_start, padding, first_entries, scale,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, L, Dv]`` and natural log-sum-exp ``[B, H, L]``, both contiguous. scale > 0, base 2."""
    k, k_rest = (k0, k1, k2, k3)[:N], (k0_rest, k1_rest, k2_rest, k3_rest)[: N if D1 > 0 else 0]
    v, v_rest = (v0, v1, v2, v3)[:N], (v0_rest, v1_rest, v2_rest, v3_rest)[: N if V1 > 0 else 0]
    rule, start = Rule(chunk, window, entries, max_chunks), Start(query_start, window_start, padding, first_entries)
    row = Row(tl.program_id(1) // K, tl.program_id(1) % K)
    b, kvh = row.b.to(tl.int64), row.head.to(tl.int64)
    spans = RowSpans(rule, start_of_row(b, start, spans_ptr, KIND), spans_ptr, s_spans)
    # the last queries see the most keys and take longest: start them first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i, r, real = tile_rows(tile * (BM // R), L, R, BM)
    head = kvh * R + r
    q = load_rows(q_ptr, b * s_q[0] + head * s_q[1] + i.to(tl.int64) * s_q[2], real, D0, D1)
    m = tl.full([BM], float("-inf"), tl.float32)
    softmax = Softmax(zeros(BM, V0, V1), m, tl.zeros([BM], tl.float32))
    for n in tl.static_range(N):
        bias_at = b * s_bias[n][0] + kvh * s_bias[n][1]
        k_parts = parts(k[n], k_rest[n] if D1 > 0 else None)
        v_parts = parts(v[n], v_rest[n] if V1 > 0 else None)
        source = RowSource(k_parts, v_parts, row.b, row.head, levels[n], bias_at)
        seen = visible(n, i, row, spans, KIND)
        softmax = over_source(
            forward_keys, softmax, q, source, biases[n], seen, scale, begins_at_0(n, KIND), CAP, PRECISION
        )
    store_output(out_ptr, lse_ptr, softmax, (b * K * R + head) * L + i, real, V0, V1)
