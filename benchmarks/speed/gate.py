"""Checking results before they are timed: a row whose result is wrong gets no time.

Attention is compared with plain operations in float64 over the keys that the spans, and Recall's index, let each query
see; entries with those of the backend "reference" in float64. Both within the error budget of `speed.budget`.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, S checked queries, n keys of all sources side by side,
G groups of g tokens, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.methods import Context, Method, step_settings
from condense.ops.recall import (
    Askers,
    GroupIndex,
    IndexChoice,
    Quota,
    RecallSources,
    choose_groups,
    index_scores,
    rotated_queries,
    rotation,
)
from condense.ops.recall.index import QUERY_LEVELS
from condense.ops.recall.rest import rest_weights, with_rest
from condense.ops.spans import RuleSpans, joined_bias
from speed.budget import Verdict, judge
from speed.problems import Inputs, pooled

# up to this length every query is checked
WHOLE = 2048
# of a longer problem, this many of the newest queries, and as many spread over the others
PART = 64


def checked_queries(length: int, device: torch.device) -> Tensor:
    """Positions of the queries that are checked, ascending, int64 ``[S]``."""
    if length <= WHOLE:
        return torch.arange(length, device=device)
    first = length - PART
    spread = torch.linspace(0, first - 1, PART, dtype=torch.float64, device=device).long()
    return torch.cat([spread, torch.arange(first, length, device=device)])


class Seen(NamedTuple):
    """The checked queries and the keys that they see.

    at int64 ``[S]``: positions of the queries. q ``[B, H, S, D]``. tensors: keys and values, source by source: entries,
    or the tokens in Recall's store, and window. mask ``[B|1, K|1, S, n]``, bias float64 ``[B|1, K|1, 1, n]``. clear
    bool ``[B|1, H|1, S, 1]``: False where rounding decides which groups Recall opens. rest: weights ``[B, H, S]``, by
    the dtype of the queries, and values ``[B, K, S, Dv]`` of the token that stands for all others, as of
    `condense.ops.recall.rest.with_rest`.
    """

    at: Tensor
    q: Tensor
    tensors: tuple[Tensor, ...]
    mask: Tensor
    bias: Tensor
    clear: Tensor
    rest: tuple[dict[torch.dtype, Tensor], Tensor] | None = None

    @property
    def near_ties(self) -> int:
        """Number of queries whose choice of groups is not clear."""
        return int((~self.clear).sum())

    def to(self, dtype: torch.dtype) -> Seen:
        """The same in another dtype."""
        return self._replace(q=self.q.to(dtype), tensors=tuple(x.to(dtype) for x in self.tensors))

    def output(self, scale: float) -> Tensor:
        """``[B, H, S, Dv]`` by plain operations in the dtype of q, one KV head at a time; 0 where it is not clear."""
        K = self.tensors[0].shape[1]
        outs = []
        for head, q in enumerate(self.q.chunk(K, dim=1)):
            k, v = (torch.cat([x[:, head, None] for x in self.tensors[i::2]], dim=2) for i in (0, 1))
            mask, bias = (x[:, min(head, x.shape[1] - 1), None] for x in (self.mask, self.bias.to(q.dtype)))
            if q.dtype == torch.float32:  # PyTorch's fused attention, to have the error of its exp and order of sums
                k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
                added = bias.expand(mask.shape).masked_fill(~mask, -math.inf)
                outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale))
            else:
                outs.append((q @ k.mT * scale + bias).masked_fill(~mask, -math.inf).softmax(-1) @ v)
            if self.rest is not None:
                lse = (q @ k.mT * scale + bias).masked_fill(~mask, -math.inf).logsumexp(-1)
                weight = self.rest[0][q.dtype].chunk(K, dim=1)[head].to(lse.dtype)
                outs[-1], _ = with_rest(outs[-1], lse, weight, self.rest[1][:, head, None])
        return torch.cat(outs, dim=1) * self.clear

    def gradients(self, upstream: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Gradients of q and of ``tensors`` for an output gradient ``[B, H, S, Dv]``."""
        with torch.enable_grad():
            q, *tensors = [x.detach().requires_grad_() for x in (self.q, *self.tensors)]
            out = self._replace(q=q, tensors=tuple(tensors)).output(scale)
            return torch.autograd.grad(out, (q, *tensors), upstream.to(out.dtype))


def seen(q: Tensor, context: Context, *, scale: float, method: Method) -> Seen:
    """The keys of a context that the checked ones of q ``[B, H, L, D]`` see under a method."""
    L, (entries, window) = q.shape[2], context.sources
    at = checked_queries(L, q.device)
    spans = [[x[..., at, None] for x in span] for span in context.spans.at(0, L, q.device)]
    columns = [torch.arange(source.k.shape[2], device=q.device) for source in context.sources]
    masks = [(x >= lo) & (x < hi) for x, (lo, hi) in zip(columns, spans, strict=True)]
    tensors, bias, rest = [*entries[:2]], entries.bias, None
    clear = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    choice = method.layout.choice
    if choice is not None and context.extra:
        signs, steps, store = context.extra
        closed, asked = spans[0][1][..., 0], q[:, :, at]
        newer, shared = torch.full_like(closed, -1), 0
        if choice.prompt == "shared" and L > 1:
            assert isinstance(context.spans, RuleSpans)
            askers = Askers.of_call(RecallSources(window, window, context.spans), L)
            number, _, newer = askers.queries[:, :, at].long()
            column, newer = askers.columns.take_along_dim(number, 1), newer[:, None]
            asked, shared = q.take_along_dim(column[:, None, :, None], 2), int((at < askers.first_own).sum())
        queries, seen_closed = (x.tensor_split([shared], dim=2) for x in (asked, closed - (newer >= 0).long()))
        found = [
            _opened(x, n, quota, GroupIndex(signs, steps), scale)
            for x, n, quota in zip(queries, seen_closed, (choice.quota.shared, choice.quota), strict=True)
            if x.shape[2] > 0
        ]
        opened, is_clear = (torch.cat(x, dim=2) for x in zip(*found, strict=True))
        opened |= torch.arange(opened.shape[3], device=q.device) == newer[..., None]
        if choice.prompt == "exact" and L > 1:
            opened, is_clear = masks[0].expand_as(opened), torch.ones_like(is_clear)
        clear = is_clear.repeat_interleave(q.shape[1] // signs.shape[1], 1)[..., None]
        index, g = GroupIndex(signs, steps), method.layout.rule.chunk
        if choice.mean and not (choice.prompt == "exact" and L > 1):
            weights = {
                x.dtype: rest_weights(IndexChoice(x, index, scale, choice.quota), 0, len(at), opened, closed, 0.0)
                for x in (q[:, :, at].double(), q[:, :, at])
            }
            assert context.means is not None
            assert isinstance(context.spans, RuleSpans)
            rest = weights, context.means.at(0, L, context.spans, g)[:, :, at]
        masks[0] = opened.repeat_interleave(g, -1)
        form = step_settings(method).store_format
        tensors = [*form.unpack(store, window.k.shape[3], window.v.shape[3], window.k.dtype, index)]
    rows, heads = (max(x.shape[dim] for x in masks) for dim in (0, 1))
    mask = torch.cat([x.expand(rows, heads, -1, -1) for x in masks], dim=-1)
    bias = joined_bias([bias, *[None] * (len(masks) - 1)], [x.shape[3] for x in masks], q.device)
    bias = torch.zeros(1, 1, mask.shape[3], dtype=torch.float64, device=q.device) if bias is None else bias
    return Seen(at, q[:, :, at], (*tensors, *window[:2]), mask, bias[:, :, None], clear, rest)


def _opened(q: Tensor, closed: Tensor, quota: Quota, index: GroupIndex, scale: float) -> tuple[Tensor, Tensor]:
    """The groups that queries open, bool ``[B, K, S, G]``, and whose choice is clear, bool ``[B, K, S]``.

    q ``[B, H, S, D]``; closed int64 ``[B|1, 1, S]``: groups that each query may open. A choice is clear if the scores
    on both sides of it differ by more than the error of scores computed in float32: of sums of D products, and of the
    numbers of a query so near to a half that float32 may round them to the other side.
    """
    (D, K, G), wide = (q.shape[3], *index.signs.shape[1:3]), q.double()
    scores = index_scores(wide, index, scale)
    opened = choose_groups(scores, closed, quota, K)
    is_closed = torch.arange(G, device=q.device) < closed[..., None]
    eps = torch.finfo(torch.float32).eps
    error = 64 * eps * float(scores.masked_fill(~is_closed, 0.0).abs().max())
    unit = rotated_queries(wide)[1]
    numbers = wide @ rotation(D, q.device).double() / unit
    near_half = ((numbers - numbers.floor() - 0.5).abs() < QUERY_LEVELS * D * eps).sum(-1, keepdim=True)
    of_rounding = (near_half * unit).unflatten(1, (K, -1)).amax((2, 4)) * scale * float(index.steps.max())
    scores = scores.masked_fill(~is_closed, -math.inf)
    best = (scores - scores.logsumexp(-1, keepdim=True)).unflatten(1, (K, -1)).amax(2)
    lowest = best.masked_fill(~opened, math.inf).amin(-1)
    highest = best.masked_fill(opened | ~is_closed, -math.inf).amax(-1)
    return opened, lowest - highest > error + 2 * of_rounding


def check_output(out: Tensor, q: Tensor, context: Context, *, scale: float, method: Method) -> Verdict:
    """Check attention output ``[B, H, L, Dv]`` at the checked queries."""
    part = seen(q, context, scale=scale, method=method)
    exact, yardstick = (part.to(dtype).output(scale) for dtype in (torch.float64, out.dtype))
    return judge([out[:, :, part.at] * part.clear], [exact], [yardstick], near_ties=part.near_ties)


def check_gradients(
    gradients: Callable[[Tensor], Sequence[Tensor]], q: Tensor, context: Context, *, scale: float, method: Method
) -> Verdict:
    """Check gradients of q and of keys and values, source by source, that flow from the checked queries.

    gradients: from an output gradient ``[B, H, L, Dv]``, which is 0 at all other queries, those of q, keys and values
    of the entries, of Recall's store, and of the window. The value of the token that stands for others gets none.
    """
    part, Dv = seen(q, context, scale=scale, method=method), context.window.v.shape[3]
    generator = torch.Generator(q.device).manual_seed(1)
    upstream = torch.randn(*part.q.shape[:3], Dv, generator=generator, dtype=q.dtype, device=q.device) * part.clear
    whole = upstream.new_zeros(*q.shape[:3], Dv).index_copy(2, part.at, upstream)
    of_q, *of_sources = gradients(whole)
    if len(of_sources) == 5:
        # Recall has no entries, but a store
        _, _, store, *of_window = of_sources
        of_sources = [store[..., : q.shape[3]], store[..., q.shape[3] :], *of_window]
    exact = [list(part.to(dtype).gradients(upstream, scale)) for dtype in (torch.float64, q.dtype)]
    return judge([of_q[:, :, part.at], *of_sources], *exact, near_ties=part.near_ties)


def check_entries(method: Method, inputs: Inputs, context: Context) -> Verdict:
    """Check the entries that were pooled, and what `condense.Recall` keeps beside them, which must be equal to the bit.

    Of a long problem the newest, as some of many choices of tokens are near ties, which rounding decides. The reference
    computes in float64, or in float32 and rounds once. It gets the mean of each KV head's queries, which
    the definition rounds to the dtype of q.
    """
    q, k, v = inputs
    mean = q.unflatten(1, (k.shape[1], -1)).mean(2, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    plain = pooled(method, Inputs(mean, k, v), "reference")
    exact = pooled(method, Inputs(mean.double(), k.double(), v.double()), "reference")
    if not all(map(torch.equal, context.extra, plain.extra)):
        return Verdict(math.inf)
    newest = slice(0 if q.shape[2] <= WHOLE else -PART * method.layout.rule.entries, None)
    made = []
    for entries in (context.entries, exact.entries, plain.entries):
        bias = [entries.bias[..., newest]] if isinstance(entries.bias, Tensor) else []
        made.append([entries.k[:, :, newest], entries.v[:, :, newest], *bias])
    return judge(*made)
