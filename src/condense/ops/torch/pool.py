"""The `torch` backend of summaries, pooling, stores and tokens' weights; any device, the first two differentiable.

Shapes: B rows, H query heads, K KV heads, L new queries, Q mean queries kept from earlier calls, D width,
G spans of S queries or groups of c tokens.
"""

import math

import torch
from torch import Tensor

from condense.ops.recall.index import GroupIndex, split_keys
from condense.ops.recall.store import StoreFormat
from condense.ops.step.pages import Places, copied
from condense.ops.tensors.right_aligned import head_mean
from condense.ops.tensors.sampling import Sample
from condense.ops.types import SummaryColumns, SummarySpans, soft_cap

# most scores that are computed at a time, over all rows, heads and keys
_BLOCK = 1 << 24


def summarize(q: Tensor, tail: Tensor, spans: SummarySpans | SummaryColumns) -> Tensor:
    """Summary queries of all spans (`condense.ops.summarize`)."""
    if isinstance(spans, SummaryColumns):
        return _of_columns(head_mean(q, tail.shape[1]), spans)
    K, Q, L = tail.shape[1], tail.shape[2], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    G, S, stride = spans.num, spans.size, spans.stride
    numbers = spans.int_if_equal()
    if numbers is None:
        return _ragged(q, tail, spans)
    start, before, after = numbers
    if start < max(0, before - Q) or start + stride * (G - 1) + S > after:
        return _ragged(q, tail, spans)
    # columns [lo, hi) of the queries that any span holds, counted from the first new query
    lo, hi = start - before, start - before + stride * (G - 1) + S
    first = L - (after - before)
    new = q[:, :, first + max(lo, 0) : first + max(hi, 0)]
    # the first queries of all spans, then their second ones, and so on, as a step adds them: entries are bit-equal
    if lo >= 0 and stride > S:  # queries between spans have no part in any mean
        queries = [head_mean(new[:, :, s::stride][:, :, :G], K) for s in range(S)]
    else:
        means = head_mean(new, K)
        if lo < 0:
            means = torch.cat([tail[:, :, Q + lo : Q + min(hi, 0)], means], dim=2)
        queries = list(means.unfold(2, S, stride).unbind(-1))
    total = queries[0].to(wide)
    for query in queries[1:]:
        total = total + query
    return total / S


def _of_columns(means: Tensor, spans: SummaryColumns) -> Tensor:
    """`summarize` for spans of columns; means ``[1, K, L, D]``: the mean queries of each KV head."""
    wide = torch.promote_types(means.dtype, torch.float32)
    total = means.new_zeros(*means.shape[:2], spans.num, means.shape[3], dtype=wide)
    for s in range(spans.size):
        column = spans.lo + s
        query = means.index_select(2, torch.minimum(column, spans.hi - 1)).to(wide)
        total = total + query.masked_fill((column >= spans.hi)[:, None], 0.0)
    return total / (spans.hi - spans.lo)[:, None]


def _ragged(q: Tensor, tail: Tensor, spans: SummarySpans) -> Tensor:
    """`summarize` for rows whose spans begin at different columns, or reach beyond the queries that there are."""
    (B, K, Q, D), L = tail.shape, q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    start, before, after = (x[:, None] for x in spans.rows(B))
    first = L - (after - before)
    # new queries before column lo are in no span of any row
    lo = min(L, max(0, int((first + start - before).min())))
    known = torch.cat([tail, head_mean(q[:, :, lo:], K)], dim=2)
    total = known.new_zeros(B, K, spans.num, D, dtype=wide)
    begin = start + spans.stride * torch.arange(spans.num, device="cpu")
    for s in range(spans.size):
        position = begin + s
        inside = (position >= 0) & (position >= before - Q) & (position < after)
        column = Q + position - before + torch.where(position < before, 0, first - lo)
        index = torch.where(inside, column, 0).to(q.device, non_blocking=True)[:, None, :, None]
        counts = inside.to(q.device, non_blocking=True)[:, None, :, None]
        total = total + known.gather(2, index.expand(B, K, -1, D)).to(wide).masked_fill(~counts, 0.0)
    count = (begin + spans.size).clamp(1, spans.size)
    return total / count.to(q.device, non_blocking=True)[:, None, :, None]


def group_scores(summary: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Scores of the tokens of every group (`condense.ops.group_scores`)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    # not a matrix product: it may sum keys of one group in different orders, and equal keys must get equal scores
    return (k.to(wide) * summary.to(wide)[..., None, :]).sum(-1) * scale


def pool(x: Tensor, scores: Tensor, *, how: str) -> Tensor:
    """Groups pooled to one vector each (`condense.ops.pool`)."""
    if how == "weighted":
        return (scores.softmax(-1)[..., None, :] @ x.to(scores.dtype))[..., 0, :].to(x.dtype)
    if how == "mean":
        return x.to(scores.dtype).mean(3).to(x.dtype)
    if how == "max":
        return x.amax(3)
    anchor = scores.argmax(-1)[..., None, None].expand(*x.shape[:3], 1, x.shape[4])
    return x.gather(3, anchor)[..., 0, :]


def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float) -> Tensor:
    """Attention that tokens get from sampled queries (`condense.ops.importance`), by blocks: memory is linear in L."""
    (B, H, L, D), K = q.shape, k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).mT
    column = torch.arange(L, device=q.device)
    total = keys.new_zeros(B, K, L)
    size = max(1, _BLOCK // (B * H * L))
    for at in sample.columns.split(size, 1):
        queries = q.gather(2, at.clamp(min=0)[:, None, :, None].expand(B, H, -1, D)).unflatten(1, (K, -1)).to(wide)
        scores = queries.flatten(2, 3) @ keys * scale
        visible = (column <= at[..., None]) & (column >= sample.start[..., None])
        hidden = ~visible[:, None, None].expand(-1, -1, H // K, -1, -1).flatten(2, 3)
        # rows without a query (-1) see no key: their softmax is NaN and is set to 0
        total += scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(hidden, 0.0).sum(2)
    return total


def largest_weights(q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float) -> Tensor:
    """Largest weight that a query gives each key (`condense.ops.largest_weights`), by blocks of queries."""
    (B, H), (K, N) = q.shape[:2], k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).mT
    best = keys.new_full((B, K, N), -math.inf)
    size = max(1, _BLOCK // (B * H * N))
    for part, of_part in zip(q.split(size, 2), lse.split(size, 2), strict=True):
        queries, seen = (x.unflatten(1, (K, -1)).flatten(2, 3) for x in (part.to(wide) * scale, of_part))
        best = torch.maximum(best, (soft_cap(queries @ keys, softcap) - seen[..., None]).amax(2))
    return best.exp()


def store_groups(form: StoreFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index (signs and steps) and packed rows of groups; shapes in `condense.ops.backends.Operations`."""
    index, rest = split_keys(k)
    return *index, form.pack(k, v, rest)


def unpack_store(
    form: StoreFormat, pieces: Tensor, index: GroupIndex, widths: tuple[int, int], dtype: torch.dtype,
    places: Places | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values of stored groups, decoded (`condense.ops.unpack_store`)."""
    if places is not None:
        pieces = copied(pieces, places)
    return form.unpack(pieces.unflatten(3, (form.group_size, -1)).flatten(2, 3), *widths, dtype, index)
