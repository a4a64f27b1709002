"""Sources and spans as most tests want them: condensed entries, then the window."""

import torch

from condense.ops import ArraySpans, Source, Span, attend


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
