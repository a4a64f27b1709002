"""Sources, spans and choices as most tests want them: condensed entries, then the window."""

import torch

from condense.ops import ArraySpans, Source, Span, attend
from condense.ops.recall import choose_groups, index_scores, rotated_queries


def two_sources(entries_k, entries_v, window_k, window_v, bias=None):
    return Source(entries_k, entries_v, bias), Source(window_k, window_v)


def array_spans(last_entry, first, last):
    """Entries ``[0, last_entry)`` and tokens ``[first, last)`` of the window, int64 ``[B|1, K|1, L]`` each."""
    return ArraySpans((Span(torch.zeros_like(last_entry), last_entry), Span(first, last)))


def as_arrays(spans, length, device=None):
    return ArraySpans(tuple(spans.at(0, length, device or torch.device("cpu"))))


def attend_to(context, q, **options):
    """`condense.ops.attend` over a context, as all methods attend that have no way of their own."""
    return attend(q, context.sources, context.spans, **options)


class ArrayChoice:
    """A given choice among closed groups, as the torch backend asks for it: ``mask`` bool ``[B, K|1, L, G]``."""

    def __init__(self, mask):
        self.mask = mask

    def opens_all(self, closed):
        return closed == 0

    def at(self, start, stop, closed, num_groups):
        group = torch.arange(num_groups, device=closed.device)
        return self.mask[:, :, start:stop, :num_groups] & (group < closed[..., None])


def others_are_near_ties(mask, closed, quota, q, index, scale):
    """Queries, bool ``[B, K, L]``, for which ``mask`` opens groups of nearly the shares of the definition's."""
    scores, K = index_scores(q, index, scale).double(), mask.shape[1]
    others = choose_groups(scores, closed, quota, K) != mask
    if others.any():
        is_closed = torch.arange(scores.shape[-1], device=scores.device) < closed[..., None]
        # products of D numbers, accumulated in float32, and a query's two numbers that are rounded to the other side
        error = 64 * torch.finfo(torch.float32).eps * scores[is_closed.expand_as(scores)].abs().max()
        error += 2 * scale * rotated_queries(q)[1].max() * index.steps.max()
        scores = scores.masked_fill(~is_closed, -torch.inf)
        shares = (scores - scores.logsumexp(-1, keepdim=True)).unflatten(1, (K, -1)).amax(2)
        largest, least = (shares.masked_fill(~others, x) for x in (-torch.inf, torch.inf))
        assert bool(((largest.amax(-1) - least.amin(-1))[others.any(-1)] <= error).all())
    return others.any(-1)
