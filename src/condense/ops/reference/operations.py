"""The definition of every operation, made for float64 on the CPU: attention under the whole mask at once; summaries,
pooling and importance one row, span, group or sampled query at a time.

Shapes: B rows, H query heads, K KV heads, L queries, N entries of one source, S of all sources, D and Dv widths; of
Recall G groups of g tokens, N tokens of the window; of pooling G groups of c tokens, Q mean queries kept.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.recall.rest import GroupMeans, rest_weights, with_rest
from condense.ops.spans import Source, Spans, joined_bias
from condense.ops.tensors.sampling import Sample
from condense.ops.types import AttendOptions, SummaryColumns, SummarySpans, soft_cap


def visible(spans: Spans, start: int, stop: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Mask bool ``[B|1, K|1, L, S]`` of queries ``[start, stop)`` over all sources, of ``sizes`` entries each."""
    masks = []
    for (lo, hi), size in zip(spans.at(start, stop, device), sizes, strict=True):
        entry = torch.arange(size, device=device)
        masks.append((entry >= lo[..., None]) & (entry < hi[..., None]))
    rows, heads = (max(mask.shape[dim] for mask in masks) for dim in (0, 1))
    return torch.cat([mask.expand(rows, heads, -1, -1) for mask in masks], dim=-1)


def attend(q: Tensor, sources: Sequence[Source], spans: Spans, options: AttendOptions) -> tuple[Tensor, Tensor]:
    """Attention over sources under one softmax (`condense.ops.attend`), with all scores ``[B, H, L, S]`` at once."""
    sizes = [source.k.shape[2] for source in sources]
    k, v = torch.cat([source.k for source in sources], dim=2), torch.cat([source.v for source in sources], dim=2)
    mask = visible(spans, 0, q.shape[2], sizes, q.device)[:, :, None]
    bias = joined_bias([source.bias for source in sources], sizes, q.device)
    return attend_masked(q, k, v, mask, bias, options)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | None, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries over keys and values of all sources, mask ``[B|1, K|1, 1, L, S]`` True if seen.

    bias: ``[B|1, K|1, S]``, None for none. A query that sees nothing gives 0 and -inf.
    """
    K, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    empty = ~mask.any(-1, keepdim=True)
    # a query that sees nothing, which may hold NaN, is set to 0 and sees all keys here; its output is zeroed below
    q_BKRLD = q.to(wide).unflatten(1, (K, -1)).masked_fill(empty, 0.0)
    scores = soft_cap(torch.einsum("bkrld,bksd->bkrls", q_BKRLD, k.to(wide)) * options.scale, options.softcap)
    if bias is not None:
        scores = scores + bias.to(wide)[:, :, None, None, :]
    scores = scores.masked_fill(~(mask | empty), float("-inf"))
    weights = F.dropout(scores.softmax(-1), options.dropout_p)
    out = torch.einsum("bkrls,bksd->bkrld", weights, v.to(wide)).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def attend_recall(
    q: Tensor, sources: RecallSources, choice: IndexChoice, options: AttendOptions, means: GroupMeans | None
) -> tuple[Tensor, Tensor]:
    """Attention to open groups, the window and one token for the rest (`condense.ops.attend_recall`)."""
    (store, window, spans), L, g = sources, q.shape[2], sources.group_size
    of_groups, of_window = spans.at(0, L, q.device)
    column = torch.arange(window.k.shape[2], device=q.device)
    chosen = choice.at(0, L, of_groups.hi, sources.num_groups)
    near = (column >= of_window.lo[..., None]) & (column < of_window.hi[..., None])
    mask = torch.cat([chosen.repeat_interleave(g, -1), near.expand(*chosen.shape[:3], -1)], dim=-1)[:, :, None]
    k, v = torch.cat([store.k, window.k], dim=2), torch.cat([store.v, window.v], dim=2)
    out, lse = attend_masked(q, k, v, mask, None, options)
    if means is None:
        return out, lse
    weight = rest_weights(choice, 0, L, chosen, of_groups.hi, options.softcap)
    return with_rest(out, lse, weight, means.at(0, L, spans, g))


def summarize(q: Tensor, tail: Tensor, spans: SummarySpans | SummaryColumns) -> Tensor:
    """Summary queries of all spans (`condense.ops.summarize`), one row and span at a time."""
    K, Q, L = tail.shape[1], tail.shape[2], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    means = q.to(wide).unflatten(1, (K, -1)).mean(2).to(q.dtype)
    if isinstance(spans, SummaryColumns):
        ends = zip(spans.lo.tolist(), spans.hi.tolist(), strict=True)
        return torch.stack([means[:, :, lo:hi].to(wide).mean(2) for lo, hi in ends], dim=2)
    rows = []
    for b, (start, before, after) in enumerate(zip(*(x.tolist() for x in spans.rows(q.shape[0])), strict=True)):
        # the columns of `known` are positions `oldest` to `after - 1`
        known = torch.cat([tail[b], means[b, :, L - (after - before) :]], dim=1).to(wide)
        oldest = before - Q
        for j in range(spans.num):
            begin = start + spans.stride * j
            positions = [p for p in range(max(0, begin, oldest), begin + spans.size) if p < after]
            total = sum((known[:, p - oldest] for p in positions), torch.zeros_like(known[:, :1].sum(1)))
            rows.append(total / max(1, min(spans.size, begin + spans.size)))
    return torch.stack(rows).unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def group_scores(summary: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Scores of the tokens of every group (`condense.ops.group_scores`), one group at a time."""
    wide = torch.promote_types(k.dtype, torch.float32)
    groups = [(summary[:, :, j, None].to(wide) * k[:, :, j].to(wide)).sum(-1) * scale for j in range(k.shape[2])]
    return torch.stack(groups, dim=2) if groups else k.new_zeros(k.shape[:4], dtype=wide)


def pool(x: Tensor, scores: Tensor, *, how: str) -> Tensor:
    """Groups pooled to one vector each (`condense.ops.pool`), one group at a time."""
    pooled = [_pool_one(x[:, :, j].to(scores.dtype), scores[:, :, j], how) for j in range(x.shape[2])]
    return torch.stack(pooled, dim=2).to(x.dtype) if pooled else x.new_zeros(*x.shape[:3], x.shape[4])


def _pool_one(x: Tensor, scores: Tensor, how: str) -> Tensor:
    if how == "weighted":
        return torch.einsum("bkc,bkcd->bkd", scores.softmax(-1), x)
    if how == "mean":
        return x.mean(2)
    if how == "max":
        return x.amax(2)
    anchor = F.one_hot(scores.argmax(-1), x.shape[2]).to(x.dtype)
    return torch.einsum("bkc,bkcd->bkd", anchor, x)


def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float) -> Tensor:
    """Attention that tokens get from sampled queries (`condense.ops.importance`), one query of all rows at a time."""
    B, H, L, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    total, column = q.new_zeros(B, H, L, dtype=wide), torch.arange(L, device=q.device)
    keys = k.to(wide).repeat_interleave(H // k.shape[1], dim=1)
    for at in sample.columns.mT:
        # -1: this row has fewer sampled queries; its scores are masked
        query = torch.stack([q[b, :, int(at[b])].to(wide) for b in range(B)])
        visible = ((column <= at[:, None]) & (column >= sample.start))[:, None]
        scores = torch.einsum("bhd,bhld->bhl", query, keys) * scale
        total += scores.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return total.unflatten(1, (k.shape[1], -1)).sum(2)


def largest_weights(q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float) -> Tensor:
    """Largest weight that a query gives each key (`condense.ops.largest_weights`), one query of all rows at a time."""
    wide, K = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    keys, best = k.to(wide).repeat_interleave(q.shape[1] // K, dim=1), q.new_zeros(k.shape[:3], dtype=wide)
    for i in range(q.shape[2]):
        scores = soft_cap(torch.einsum("bhd,bhnd->bhn", q[:, :, i].to(wide), keys) * scale, softcap)
        best = torch.maximum(best, (scores - lse[:, :, i, None]).exp().unflatten(1, (K, -1)).amax(2))
    return best
