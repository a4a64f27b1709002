"""The corridor: q, k, v -> plan -> representatives -> prefix-band attention -> output and what stays.

Training, prefill, chunked prefill and decode are `extend` with different amounts of past.

Shapes: B rows, H query heads, K KV heads, L new tokens, M prefix entries, N band tokens, D and Dv widths,
Q summary queries, S queries per summary, G chunks of c tokens. Positions count a row's real tokens from 0.
Rows are right-aligned: new tokens end at column L - 1, padding stands to their left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from condense.methods.base import ChunkPooling, Method, check_trainable
from condense.ops import RuleSpans, Source, Spans, StepSettings, SummarySpans, attend, summarize
from condense.ops.checks import check_cu_seqlens, check_padding, check_qkv, check_scale, check_tensors
from condense.ops.tensors.autocast import outside_autocast
from condense.ops.tensors.per_row import PerRow, as_rows, at_least, int_if_equal, max_row
from condense.ops.tensors.right_aligned import append_entries, append_window, detach_compact, detach_copy, newest

# raw tokens and summary queries kept beyond what the next token needs, so that as many can be taken back: what
# assisted decoding proposes at once by default
SLACK = 20


class Past(NamedTuple):
    """What one layer keeps between calls. ``seen`` and ``origin`` are known on the host: no step waits for a GPU.

    entries_k ``[B, K, M, D]``, entries_v ``[B, K, M, Dv]``: entries, left-aligned, `Method` order.
    window_k ``[B, K, N, D]``, window_v ``[B, K, N, Dv]``: exact tokens, right-aligned.
    summary_q ``[B, K, Q, D]``: the newest summary queries, right-aligned. origin: a prompt's tokens that
    `Method.read_prompt` took, whose entries come first in the prefix. seen: real tokens per row since. Both are an int
    where the rows agree, else int64 CPU ``[B]``.
    """

    entries_k: Tensor
    entries_v: Tensor
    window_k: Tensor
    window_v: Tensor
    summary_q: Tensor
    seen: PerRow
    origin: PerRow

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All but the numbers."""
        return self[:5]


class Context(NamedTuple):
    """All that attention reads besides the queries."""

    sources: tuple[Source, ...]
    spans: Spans

    @property
    def entries(self) -> Source:
        """The first source, the condensed one."""
        return self.sources[0]

    @property
    def window(self) -> Source:
        """The last source, exact tokens."""
        return self.sources[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values of all sources, source by source."""
        return tuple(x for source in self.sources for x in (source.k, source.v))


def empty_past(k: Tensor, v: Tensor) -> Past:
    """The past of rows that have seen nothing; k ``[B, K, L, D]`` and v give shapes, dtype and device."""
    none_k, none_v = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (k, v))
    return Past(none_k, none_v, none_k, none_v, none_k, 0, 0)


def extend(
    method: Method,
    past: Past | None,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    *,
    scale: float,
    counts: Tensor | None = None,
    backend: str = "auto",
    keep: bool = True,
) -> tuple[Context, Past | None]:
    """Read L new tokens: what their queries attend to, and the new past (None unless ``keep``).

    k ``[B, K, L, D]``, v ``[B, K, L, Dv]``, q ``[B, H, L, D]``, of which summaries are made;
    counts int64 CPU ``[B]``: real tokens per row, the rest is padding on the left (None: all real).
    Sources carry gradients of k, v and q; the past is detached.
    Raises ValueError if gradients would flow through a method that looks ahead without consent.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, q)):
        check_trainable(method)
    L = k.shape[2]
    fresh = past is None
    past = empty_past(k, v) if past is None else past
    pads = 0 if counts is None else int_if_equal(L - counts)
    if counts is not None and (isinstance(pads, Tensor) or pads > 0):
        pad = (torch.arange(L) < (L - counts)[:, None]).to(k.device)[:, None, :, None]
        k, v = k.masked_fill(pad, 0), v.masked_fill(pad, 0)
    seen = int_if_equal(past.seen + (L - pads))
    if fresh and method.reads_prompt:
        prompt = method.read_prompt(q, k, v, counts, scale=scale, backend=backend)
        kept = Past(*prompt.kept(), *past.tensors[2:], past.seen, origin=seen) if keep else None
        return Context(prompt.sources, prompt.spans), kept
    rule, num_summary = method.rule, method.num_summary
    window_k, window_v = append_window(past.window_k, k, pads), append_window(past.window_v, v, pads)
    band_start = seen - window_k.shape[2]

    offset = method.prompt_entries(past.origin)
    before, after = rule.pooled(past.seen, method.summary_delay), rule.pooled(seen, method.summary_delay)
    num_new = max_row(after - before)
    entries_k, entries_v = past.entries_k, past.entries_v
    if num_new > 0:
        c, p = rule.chunk, rule.entries
        summary = None
        if num_summary > 0:
            # the end of a prompt sums up all of it, else every chunk has a window of its own
            whole = method.looks_ahead and fresh
            first, num = (seen, 1) if whole else ((before + 1) * c + method.summary_delay, num_new)
            windows = SummarySpans(first - num_summary, past.seen, seen, num, num_summary, c)
            summary = summarize(q, past.summary_q, windows, backend=backend).expand(-1, -1, num_new, -1)
        new_k, new_v = method.represent_band(
            window_k,
            window_v,
            before * c - band_start,
            num_new,
            summary,
            first_chunk=before,
            scale=scale,
            backend=backend,
        )
        start, stop = before * p + offset, after * p + offset
        entries_k, entries_v = (
            append_entries(entries_k, new_k, start, stop),
            append_entries(entries_v, new_v, start, stop),
        )

    spans = RuleSpans(rule, seen - L, band_start, pads, offset)
    bias = method.prefix_bias(entries_k.shape[2], k.device, past.origin)
    context = Context((Source(entries_k, entries_v, bias), Source(window_k, window_v)), spans)
    if not keep:
        return context, None
    num_band = min(window_k.shape[2], max_row(seen - first_needed(method, seen - SLACK)))
    keep_only = _keeper(past.window_k)
    return context, Past(
        keep_only(entries_k),
        keep_only(entries_v),
        keep_only(newest(window_k, num_band)),
        keep_only(newest(window_v, num_band)),
        _newest_queries(num_summary, past.summary_q, q, pads, backend),
        seen,
        past.origin,
    )


def _newest_queries(num_summary: int, tail: Tensor, q: Tensor, pads: PerRow, backend: str) -> Tensor:
    """The mean queries that later summaries and `SLACK` need, ``[B, K, Q, D]`` in the dtype of q."""
    if num_summary <= 1:
        return detach_compact(tail)
    (B, _, Q, _), L = tail.shape, q.shape[2]
    count = min(Q + L, num_summary - 1 + SLACK)
    n = min(L, count)
    # the backend's own means: chunked or not, summaries are the same to the bit
    new = summarize(newest(q.detach(), n), tail[:, :, :0], SummarySpans(0, 0, n, n, 1, 1), backend=backend).to(q.dtype)
    # the padding that is left of it, which stays in rows that have not seen enough
    pads = at_least(pads - (L - n), 0)
    if isinstance(pads, Tensor) or pads > 0:
        pad = torch.arange(n) < as_rows(pads, B)[:, None]
        new = new.masked_fill(pad.to(new.device)[:, None, :, None], 0)
    else:
        tail = newest(tail, count - n)
    return _keeper(tail)(newest(append_window(tail, new, pads), count))


def _keeper(before: Tensor) -> Callable[[Tensor], Tensor]:
    """How to keep what was appended to columns ``before``: where there were none it may still be the caller's own."""
    return detach_copy if before.shape[2] == 0 else detach_compact


def first_needed(method: Method, seen: PerRow) -> PerRow:
    """Position of the earliest token that must still be at hand, exact, once ``seen`` tokens have been read."""
    return method.rule.closed(at_least(seen, 0)) * method.rule.chunk


def num_entries(method: Method, seen: PerRow, origin: PerRow = 0) -> PerRow:
    """Prefix entries made once ``seen`` tokens have been read after prompts of ``origin`` tokens.

    All three are an int or int64 CPU ``[B]``.
    """
    return method.rule.pooled(seen, method.summary_delay) * method.rule.entries + method.prompt_entries(origin)


def most_entries(method: Method, tokens: int) -> int:
    """The most prefix entries that a row of up to ``tokens`` tokens has, whatever part of them is its prompt."""
    return _most_after_prompts(method, tokens) if method.reads_prompt else max_row(num_entries(method, tokens))


@lru_cache(maxsize=64)  # once for all layers of a model
def _most_after_prompts(method: Method, tokens: int) -> int:
    prompts = torch.arange(tokens + 1)
    return max_row(num_entries(method, tokens - prompts, prompts))


def step_settings(method: Method) -> StepSettings:
    """The method as `condense.ops.decode_step` wants it."""
    fixed = (method.rule, method.summary_delay, method.num_summary)
    if method.pooling is None:
        return StepSettings(*fixed, None, None, 0.0, reads_prompt=method.reads_prompt)
    if not isinstance(method.pooling, ChunkPooling):
        raise ValueError(f"{method}: pooling must be a condense.methods.ChunkPooling, got {method.pooling!r}")
    key_pooling, value_pooling, num_focal, weight_scale = method.pooling
    bias = method.prefix_bias(method.rule.entries, torch.device("cpu"))
    if isinstance(bias, Tensor):
        bias = float(bias[..., -1])
    return StepSettings(
        *fixed, key_pooling, value_pooling, bias or 0.0, num_focal, weight_scale, reads_prompt=method.reads_prompt
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Method,
    scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Condensed causal attention of whole sequences: plan, represent, attend.

    q ``[B, H, L, D]``, k ``[B, Hkv, L, D]``, v ``[B, Hkv, L, Dv]``, rotated already; Hkv divides H; float64,
    float32, bfloat16 or float16. scale: softmax scale, default ``D ** -0.5``.
    backend: "reference" (the definition), "torch", "triton", "hopper" (the last two where they can run) or "auto".
    cu_seqlens: packed documents, int ``[n + 1]`` from 0 to L, B = 1; groups and windows restart at each.
    padding: left pads per row, int ``[B]``.
    Returns out ``[B, H, L, Dv]`` and, with return_lse, the log-sum-exp ``[B, H, L]`` in float32 or wider;
    padded queries give 0 and -inf. Differentiable in q, k and v.
    Raises ValueError for arguments that do not fit together.
    """
    check_tensors(q=q, k=k, v=v)
    method = Method.parse(method)
    with outside_autocast(q, k, v) as (q, k, v):
        check_qkv(q, k, v)
        scale = check_scale(scale, q)

        def run(q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
            context, _ = extend(method, None, k, v, q, scale=scale, counts=counts, backend=backend, keep=False)
            return attend_to(context, q, scale=scale, backend=backend, return_lse=return_lse)

        out, lse = each_document(run, (q, k, v), cu_seqlens, padding)
    return out if lse is None else (out, lse)


def each_document(
    run: Callable[..., tuple[Tensor, Tensor | None]],
    tensors: tuple[Tensor, ...],
    cu_seqlens: Tensor | None,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """``run(*tensors, counts)`` on padded rows, or on each packed document alone and joined.

    tensors: queries first, ``[B, heads, L, width]`` each. run returns out ``[B, H, L, Dv]`` and lse or None.
    Raises ValueError for marks or padding that do not fit, and for both.
    """
    if cu_seqlens is None:
        return run(*tensors, None if padding is None else tensors[0].shape[2] - check_padding(padding, tensors[0]))
    if padding is not None:
        raise ValueError("cu_seqlens and padding exclude each other, got both")
    lengths = check_cu_seqlens(cu_seqlens, tensors[0])
    documents = zip(*(x.split(lengths, dim=2) for x in tensors), strict=True)
    results = [run(*document, None) for document in documents if document[0].shape[2]]
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([out for out, _ in results], dim=2), torch.cat(lses, dim=2) if lses else None


def attend_to(
    context: Context,
    q: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`condense.ops.attend` on what `extend` returned."""
    return attend(
        q,
        context.sources,
        context.spans,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
        return_lse=return_lse,
    )
