"""Entries of a chunk that is due in a decode step: its focal tokens as they are, the others pooled into one.

A chunk's tokens are read from the ring, or from pages. These may not hold the new token yet, so it is read from the
step's inputs. Tiles hold 16 tokens of the chunk; rows are in parts, see `condense.ops.triton.device.parts`.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from condense.ops.triton.device.address import PageForm, token_rows
from condense.ops.triton.device.codes import put_vector
from condense.ops.triton.device.parts import load_rows, parts, store_rows, tile_width, zeros
from condense.ops.types import Pooling


class CoarseKind(namedtuple("CoarseKind", "slots chunks window bias")):
    """Coarse entries, each the mean of ``chunks`` fine ones (`condense.ops.coarse`). slots: of the ring of fine ones, a
    multiple of ``chunks``. window: newest tokens, none of which a coarse entry stands for. bias: base 2.
    """


class Kind(NamedTuple):
    """The constants that a step is compiled for. No field may be named like an attribute of ``tl.constexpr`` (value).

    D0, D1: columns of both parts of keys. V0, V1: of values. latent: values are the first D0 columns of the keys.
    scored: a summary query weighs a chunk's tokens. key_pooling, value_pooling: poolings of keys and of values.
    focal: tokens of a chunk that become entries of their own. tile: chunk rounded up to a power of two, 1 without focal
    tokens. period: entries per chunk if only its pooled entry has the bias, else 0.
    has_first: some entries may stand before those of the first chunk. has_real: rows may have no new token.
    rows: query heads per tile. keys: keys per tile. precision: of products.
    early: a kernel is launched while the one before still runs (programmatic dependent launch).
    joins: the last program of a KV head to finish joins the outputs of all splits; otherwise a second kernel does.
    joined_parts: splits per tile of that join.
    near, far, past: forms of the pages of tokens, entries and mean queries, None in contiguous buffers; a row's queries
    lie in one page. stores, attends: whether a launch stores the new token, and whether it attends.
    matched: each entry has a bias of its own. softcap: cap of attention's scores, base 2, 0.0 for none.
    entry_bits: bits per number of an entry, see `condense.ops.entries.EntryFormat`. coarse: None without such entries.
    K: KV heads. R: query heads per KV head. num_summary: mean queries in a summary query. chunk: tokens of a chunk.
    Only `condense.ops.triton.step_kernels` reads these four; they are constants so that divisions by them are fast.
    """

    D0: int
    D1: int
    V0: int
    V1: int
    latent: bool
    scored: bool
    key_pooling: Pooling | None
    value_pooling: Pooling | None
    focal: int = 0
    tile: int = 1
    period: int = 0
    has_first: bool = False
    has_real: bool = False
    rows: int = 0
    keys: int = 0
    precision: str = "ieee"
    early: bool = False
    joins: bool = False
    joined_parts: int = 1
    near: PageForm | None = None
    far: PageForm | None = None
    past: PageForm | None = None
    stores: bool = True
    attends: bool = True
    matched: bool = False
    softcap: float = 0.0
    entry_bits: int = 16
    coarse: CoarseKind | None = None
    K: int = 0
    R: int = 0
    num_summary: int = 0
    chunk: int = 0


class Buffer(namedtuple("Buffer", "k v s_k s_v size")):
    """Keys and values of one KV head.

    k, v: pointers to the first row, or to the head's first slot in page 0. s_k, s_v: strides of rows, or of slots in a
    page. size: number of rows, or pointer to the request's row of the page table.
    """


class Queries(namedtuple("Queries", "q s_q size")):
    """Query vectors in memory. q: pointer to the first. s_q: stride to the next. size: their number."""


class Chunk(namedtuple("Chunk", "first size t k v")):
    """A chunk of tokens, the last of which may be the step's new token.

    first: position of its first token. size: tokens. t, k, v: position, key and value of the new token.
    """


class _Weights(namedtuple("_Weights", "inside weight alpha chosen better")):
    """Softmax weights of one tile of tokens.

    inside: whether a token is to be pooled. weight: relative to the highest score so far. alpha: factor for earlier
    weights. chosen: the first token with the tile's highest score. better: that score exceeds those of earlier tiles.
    """


@triton.jit
def _add_rows(total, x):
    """total ``[1, P]`` plus the sum of the rows of x, in float32."""
    first = total[0] + tl.sum(x[0].to(tl.float32), 0, keep_dims=True)
    return parts(first, total[1] + tl.sum(x[1].to(tl.float32), 0, keep_dims=True) if len(total) == 2 else None)


@triton.jit
def mean_query(heads, D0: tl.constexpr, D1: tl.constexpr):
    """Mean over all of `Queries`, in their dtype."""
    total = zeros(1, D0, D1)
    for start in range(0, heads.size, 16):
        r = start + tl.arange(0, 16)
        total = _add_rows(total, load_rows(heads.q, r.to(tl.int64) * heads.s_q, r < heads.size, D0, D1))
    return [tl.div_rn(x, tl.zeros_like(x) + heads.size).to(heads.q.dtype.element_ty) for x in total]


@triton.jit
def summary_query(mean, ring, t, count, D0: tl.constexpr, D1: tl.constexpr):
    """Mean in float32 of the newest ``count`` mean queries, or of all if t + 1 < ``count``.

    mean: mean query of token t. ring: `Queries` of the tokens before it.
    """
    total = [x.to(tl.float32) for x in mean]
    for start in range(1, count, 16):
        back = start + tl.arange(0, 16)
        at = ((t - back) % ring.size).to(tl.int64) * ring.s_q
        total = _add_rows(total, load_rows(ring.q, at, (back < count) & (back <= t), D0, D1))
    return [tl.div_rn(x, tl.zeros_like(x) + tl.minimum(count, t + 1)) for x in total]


@triton.jit
def _tokens(ring, ptr, stride, new, chunk, i, D0: tl.constexpr, D1: tl.constexpr, KIND: tl.constexpr):
    """Keys or values ``[16, P]`` of tokens i of the chunk, zeros past its end; the new token's is ``new``."""
    NEAR: tl.constexpr = KIND.near
    at = token_rows(ring.size, chunk.first + i, i < chunk.size, stride, NEAR)
    position = chunk.first + i
    x = load_rows(ptr, at, (i < chunk.size) & (position < chunk.t), D0, D1)  # [16, P]
    is_new = ((i < chunk.size) & (position == chunk.t))[:, None]  # [16, 1]
    first = tl.where(is_new, new[0], x[0])
    return parts(first, tl.where(is_new, new[1], x[1]) if len(x) == 2 else None)


@triton.jit
def chunk_keys(ring, chunk, i, KIND: tl.constexpr):
    """Keys of tokens i of the chunk."""
    return _tokens(ring, ring.k, ring.s_k, chunk.k, chunk, i, KIND.D0, KIND.D1, KIND)


@triton.jit
def chunk_values(ring, chunk, i, KIND: tl.constexpr):
    """Values of tokens i of the chunk; not for latents, whose values are columns of their keys."""
    return _tokens(ring, ring.v, ring.s_v, chunk.v, chunk, i, KIND.V0, KIND.V1, KIND)


@triton.jit
def row_products(x, row):
    """The product of every row of x ``[n, P]`` with one row ``[1, P]``, in float32 ``[n]``."""
    s = tl.sum(x[0].to(tl.float32) * row[0].to(tl.float32), 1)
    if len(x) == 2:
        s += tl.sum(x[1].to(tl.float32) * row[1].to(tl.float32), 1)
    return s


@triton.jit
def _scores(x, summary, inside, scale, SCORED: tl.constexpr):
    """Scores ``[16]`` of tokens x for the summary query, all 0 unless SCORED; -inf where not inside."""
    s = row_products(x, summary) * scale if SCORED else tl.zeros([16], tl.float32)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def all_scores(ring, chunk, summary, scale, KIND: tl.constexpr):
    """Scores of all the chunk's tokens ``[KIND.tile]``, -inf past its end."""
    j = tl.arange(0, KIND.tile)
    scores = tl.full([KIND.tile], float("-inf"), tl.float32)
    for start in range(0, chunk.size, 16):
        i = start + tl.arange(0, 16)
        s = _scores(chunk_keys(ring, chunk, i, KIND), summary, i < chunk.size, scale, True)
        s = tl.sum(tl.where(j[:, None] == i[None, :], s[None, :], 0.0), 1)  # [tile]
        scores = tl.where((j >= start) & (j < start + 16), s, scores)
    return scores


@triton.jit
def focal_tokens(scores, i, inside, KIND: tl.constexpr):
    """Scores of tokens i, and which of them are focal: the chunk's best, ties to the earlier."""
    j = tl.arange(0, KIND.tile)[None, :]
    s = tl.sum(tl.where(j == i[:, None], scores[None, :], 0.0), 1)  # [16]
    better = (scores[None, :] > s[:, None]) | ((scores[None, :] == s[:, None]) & (j < i[:, None]))  # [16, tile]
    return s, inside & (tl.sum(better.to(tl.int32), 1) < KIND.focal)


@triton.jit
def _pool_part(acc, x, w, HOW: tl.constexpr):
    x = x.to(tl.float32)  # [16, P]
    if HOW == "weighted":
        return acc * w.alpha + tl.sum(w.weight[:, None] * x, 0, keep_dims=True)
    elif HOW == "mean":
        return acc + tl.sum(tl.where(w.inside[:, None], x, 0.0), 0, keep_dims=True)
    elif HOW == "max":
        return tl.maximum(acc, tl.max(tl.where(w.inside[:, None], x, float("-inf")), 0, keep_dims=True))
    else:
        return tl.where(w.better, tl.sum(tl.where(w.chosen[:, None], x, 0.0), 0, keep_dims=True), acc)


@triton.jit
def _pool(acc, x, w, HOW0: tl.constexpr, HOW1: tl.constexpr):
    """Add a tile of tokens to a pooled row, whose two parts may be pooled in different ways, HOW0 and HOW1."""
    first = _pool_part(acc[0], x[0], w, HOW0)
    return parts(first, _pool_part(acc[1], x[1], w, HOW1) if len(acc) == 2 else None)


@triton.jit
def _finish_part(acc, total, count, HOW: tl.constexpr, dtype: tl.constexpr):
    if HOW == "weighted":
        acc = tl.div_rn(acc, tl.zeros_like(acc) + total)
    elif HOW == "mean":
        acc = tl.div_rn(acc, tl.zeros_like(acc) + count)
    return acc.to(dtype)


@triton.jit
def _finish(acc, total, count, HOW0: tl.constexpr, HOW1: tl.constexpr, dtype: tl.constexpr):
    """The pooled row, rounded as it is stored."""
    first = _finish_part(acc[0], total, count, HOW0, dtype)
    return parts(first, _finish_part(acc[1], total, count, HOW1, dtype) if len(acc) == 2 else None)


@triton.jit
def _nothing_pooled(D0: tl.constexpr, D1: tl.constexpr, HOW0: tl.constexpr, HOW1: tl.constexpr):
    first = tl.full([1, tile_width(D0)], float("-inf") if HOW0 == "max" else 0.0, tl.float32)
    rest = tl.full([1, tile_width(D1)], float("-inf") if HOW1 == "max" else 0.0, tl.float32)
    return parts(first, rest if D1 > 0 else None)


@triton.jit
def make_entries(entries, ring, chunk, summary, scores, slot, writes, scale, KIND: tl.constexpr):
    """Pool a chunk; return key and value rows of the entry. Store focal tokens from ``slot`` on if ``writes``.

    summary: the query that weighs the tokens; not read unless ``KIND.scored``. scores: `all_scores`; not read without
    focal tokens. The first part of a latent is pooled as values are.
    """
    KEY: tl.constexpr = KIND.key_pooling
    VALUE: tl.constexpr = KIND.value_pooling
    HEAD: tl.constexpr = KIND.value_pooling if KIND.latent else KIND.key_pooling
    key = _nothing_pooled(KIND.D0, KIND.D1, HEAD, KEY)
    value = _nothing_pooled(KIND.V0, KIND.V1, VALUE, VALUE)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, chunk.size, 16):
        i = start + tl.arange(0, 16)
        inside = i < chunk.size
        x = chunk_keys(ring, chunk, i, KIND)  # [16, P]
        focal, place = inside, i
        if KIND.focal > 0:
            s, focal = focal_tokens(scores, i, inside, KIND)
            place = slot + tl.cumsum(focal.to(tl.int32), 0) - 1
            slot += tl.sum(focal.to(tl.int32), 0)
            inside = inside & ~focal
            s = tl.where(inside, s, float("-inf"))
            focal = focal & writes
            store_rows(entries.k, place.to(tl.int64) * entries.s_k, x, focal, KIND.D0, KIND.D1)
        else:
            s = _scores(x, summary, inside, scale, KIND.scored)
        best = tl.max(s, 0)
        m_new = tl.maximum(m, best)
        # if all tokens of the tile are focal, none is pooled and m_new may still be -inf
        finite = tl.where(m_new == float("-inf"), 0.0, m_new) if KIND.focal > 0 else m_new
        weight, alpha = tl.exp(s - finite), tl.exp(m - finite)
        # ties go to the lowest position, across tiles and within one
        w = _Weights(inside, weight, alpha, i == tl.min(tl.where(s == best, i, start + 16), 0), best > m)
        m, total = m_new, total * alpha + tl.sum(weight, 0)
        key = _pool(key, x, w, HEAD, KEY)  # [1, P]
        if not KIND.latent:
            y = chunk_values(ring, chunk, i, KIND)
            value = _pool(value, y, w, VALUE, VALUE)
            if KIND.focal > 0:
                store_rows(entries.v, place.to(tl.int64) * entries.s_v, y, focal, KIND.V0, KIND.V1)
    count = chunk.size - KIND.focal
    key = _finish(key, total, count, HEAD, KEY, chunk.k[0].dtype)
    if KIND.latent:
        return key, (key[0],)
    else:
        return key, _finish(value, total, count, VALUE, VALUE, chunk.k[0].dtype)


@triton.jit
def put_entry(entries, at, key, value, writes, KIND: tl.constexpr):
    """Store an entry in slot ``at`` if ``writes``; return key and value as they will be read from there."""
    at = at.to(tl.int64)
    key = put_vector(entries.k + at * entries.s_k, key, writes, KIND.D0, KIND.D1, KIND.entry_bits)
    if KIND.latent:
        return key, (key[0],)
    else:
        return key, put_vector(entries.v + at * entries.s_v, value, writes, KIND.V0, KIND.V1, KIND.entry_bits)


@triton.jit
def matched_bias(ring, chunk, summary, scores, entry, scale, KIND: tl.constexpr):
    """Bias ``[1]`` of ``entry`` by `condense.ops.matched_bias`, over the tokens that are pooled into it.

    summary, scores: as in `make_entries`.
    """
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, chunk.size, 16):
        i = start + tl.arange(0, 16)
        s = _scores(chunk_keys(ring, chunk, i, KIND), summary, i < chunk.size, scale, True)
        if KIND.focal > 0:
            s, focal = focal_tokens(scores, i, i < chunk.size, KIND)
            s = tl.where((i < chunk.size) & ~focal, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))  # [1]
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp(m - finite) + tl.sum(tl.exp(s - finite), 0)
        m = m_new
    return m + tl.log(total) - row_products(entry, summary) * scale
