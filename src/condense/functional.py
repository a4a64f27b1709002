"""Condensed attention from q, k and v: plan, pool chunks into entries, attend over a list of sources, keep the state.

Shapes: B rows, H query heads, K KV heads, L new tokens, N tokens of the window, D and Dv widths, Q mean queries,
G chunks of c tokens. Positions count a row's real tokens from 0.
Rows are right-aligned: new tokens end at column L - 1, padding stands to their left.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from condense.methods import Chunks, Context, FirstEntries, Method, check_trainable, split_bias
from condense.methods.checks import attend_checked, check_entries
from condense.methods.prompt import kept_tokens
from condense.ops import EntryFormat, Source, SummarySpans, summarize
from condense.ops.api import running_sums
from condense.ops.checks import check_alike, check_scale, check_shapes
from condense.ops.coarse import merged
from condense.ops.recall.rest import GroupMeans, clamped_columns
from condense.ops.tensors.autocast import outside_autocast
from condense.ops.tensors.per_row import PerRow, as_rows, at_least, int_if_equal, max_row, min_row
from condense.ops.tensors.right_aligned import append_entries, append_window, detach_compact, newest
from condense.ops.tensors.ring import newest_columns, store_newest
from condense.plan import ChunkRange, ForwardPlan, Reading, run_planned
from condense.state import SLACK, LayerState, empty_state, fine_slots, first_needed, kept_sums


def extend(
    method: Method,
    state: LayerState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    plan: ForwardPlan | None = None,
    backend: str = "auto",
) -> tuple[Context, Callable[[], LayerState]]:
    """Read L new tokens. Returns the sources that their queries attend to, and a function that makes the new state.

    q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``; summary queries are means of q. state: kept from
    earlier tokens, None before the first ones. plan: which of the tokens are real (default: all), or where packed
    documents begin (then no state can be made); one plan serves all layers of a forward. The new state is detached.
    Raises ValueError if an input requires a gradient and the method looks ahead without ``allow_future``, and as
    `condense.Method.check_context` and `empty_state`.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        check_trainable(method)
    plan = ForwardPlan(k.shape[2]) if plan is None else plan
    k, v = plan.without_padding(k), plan.without_padding(v)
    if state is None and method.reads_prompt:  # all tokens of a prompt are read at once
        assert method.layout.entry_bits == 16, "entries of a prompt that is read at once are not rounded"
        fresh, prompt = empty_state(k, v), method.read(q, k, v, plan, scale=scale, backend=backend)
        return prompt.context, lambda: fresh._replace(entries=prompt.kept(), first=prompt.first)
    before = empty_state(k, v) if state is None else state
    reading = plan.reading(method, state, k.device)
    # new tokens follow those of the window; a chunk that is due may have tokens of both
    padding = plan.padding
    window_k, window_v = append_window(before.window_k, k, padding), append_window(before.window_v, v, padding)
    entries, form = before.entries, EntryFormat(method.layout.entry_bits)
    keys_and_values = entries[:2]
    if entries[0].dtype != k.dtype:  # entries are rows of bytes: unpack them
        pairs = zip(entries, (k, v), strict=False)
        keys_and_values = tuple(form.unpack(rows, x.shape[3], x.dtype) for rows, x in pairs)
    due, num_first, new = reading.due, before.first.num, None
    if due.num > 0:
        summary = None
        if reading.summaries is not None:
            summary = summarize(q, before.mean_q, reading.summaries, backend=backend)
            summary = summary.expand(-1, -1, due.num, -1)
        chunks = Chunks(window_k, window_v, due.columns, due.num, method.layout.rule.chunk, due.numbers)
        new = method.represent(chunks, summary, scale=scale, backend=backend)
        check_entries(method, new, k, v, due.num)
    fine: tuple[Tensor, ...] = ()
    if reading.merged is not None:
        fine = _fine_entries(before.fine, (k[:, :, :0], v[:, :, :0]) if new is None else new, due)
        keys_and_values = entries = _merge(before.entries, fine, reading.merged, method)
    elif new is not None:
        rows = tuple(map(form.pack, new[:2]))
        entries = _append(before.entries, (*rows, *new[2:]), due, num_first)
        if form.bits == 16:
            keys_and_values = entries[:2]
        else:
            rounded = tuple(map(form.rounded, new[:2], rows))
            keys_and_values = _append(keys_and_values, rounded, due, num_first)
    sums, means = before.sums, None
    if reading.whole is not None:
        values = window_v if v.shape[3] > 0 else window_k
        sums, means = _sums(before.sums, values, reading, method, backend)
    bias, extra = split_bias(method, entries, before.first)
    of_entries, window = Source(keys_and_values[0], keys_and_values[1], bias), Source(window_k, window_v)
    sources: tuple[Source, ...] = (of_entries, window)
    if method.layout.coarse is not None:
        sources = (of_entries._replace(bias=method.layout.coarse.bias), Source(fine[0], fine[1], bias), window)

    def new_state() -> LayerState:
        assert plan.documents is None, "no state is kept of packed documents"
        num_window = min(window_k.shape[2], max_row(reading.seen - first_needed(method, reading.seen - SLACK)))
        kept = tuple(_detached(x, before.window_k) for x in entries)
        newest_k, newest_v = (_detached(newest(x, num_window), before.window_k) for x in (window_k, window_v))
        mean_q = _newest_queries(method.layout.num_summary, before.mean_q, q, padding, backend)
        rings = before.fine or tuple(x.new_zeros(*x.shape[:2], fine_slots(method), x.shape[3]) for x in fine)
        rings = tuple(_written(ring, x.detach(), due.last) for ring, x in zip(rings, fine, strict=True))
        return LayerState(kept, newest_k, newest_v, mean_q, sums.detach(), reading.seen, before.first, rings)

    context = Context(sources, reading.spans, extra, means)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        method.check_context(q, context)
    return context, new_state


def keep_tokens(method: Method, prompt: LayerState, kept: Tensor, counts: Tensor) -> LayerState:
    """The state of ``method`` after a prompt of which only tokens stay where kept, bool ``[B, K, L]``, is True.

    prompt: the state that ``method.reread`` made of the prompt, with an entry for each token. counts: tokens that stay
    per row and head, int64 CPU ``[B]``.
    """
    (k, v), most = prompt.entries, max_row(counts)
    entries = kept_tokens(k, v, kept, most)
    if method.reads_prompt:  # its kept tokens remain entries
        return prompt._replace(entries=entries, first=FirstEntries.of(counts, counts))
    column = torch.arange(most, device="cpu") - (most - counts)[:, None]
    at = column.clamp(min=0).to(kept.device, non_blocking=True)[:, None, :, None]
    k, v = (x.take_along_dim(at, 2) for x in entries)
    return extend(method, None, k, k, v, scale=1.0, plan=ForwardPlan(most, counts))[1]()


def _fine_entries(rings: tuple[Tensor, ...], new: tuple[Tensor, ...], due: ChunkRange) -> tuple[Tensor, ...]:
    """Keys ``[B, K, n, D]`` and values of the fine entries in ``rings``, then of the new ones, right-aligned."""
    missing, joined = int_if_equal(due.num - (due.last - due.first)), new
    if rings:
        old = (newest_columns(ring, due.first, ring.shape[2]) for ring in rings)
        joined = tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
    if not isinstance(missing, Tensor):
        return joined
    # rows with fewer new entries end earlier: shift them to the right
    column = (torch.arange(joined[0].shape[2], device="cpu")[None] - missing[:, None]).clamp(min=0)
    at = column.to(joined[0].device, non_blocking=True)[:, None, :, None]
    return tuple(x.take_along_dim(at, 2) for x in joined)


def _merge(old: tuple[Tensor, ...], fine: tuple[Tensor, ...], due: ChunkRange, method: Method) -> tuple[Tensor, ...]:
    """The old coarse entries, then new ones, made of the runs of fine entries that are due."""
    if due.num == 0:
        return old
    assert method.layout.coarse is not None
    k, v = fine
    return _append(old, merged(Chunks(k, v, due.columns, due.num, method.layout.coarse.chunks, due.numbers)), due, 0)


def _written(ring: Tensor, columns: Tensor, count: PerRow) -> Tensor:
    """A copy of a ring with columns ``[B, K, n, D]`` written to it; the last one is number ``count - 1`` of its row."""
    ring = ring.clone()
    store_newest(ring, columns, count)
    return ring


def _sums(before: Tensor, v: Tensor, reading: Reading, method: Method, backend: str) -> tuple[Tensor, GroupMeans]:
    """The newest sums of values of whole groups, as in `condense.state.LayerState`, and the means that queries see.

    before: the sums before the new tokens; v ``[B, K, N, Dv]``: values of window and new tokens.
    """
    assert reading.whole is not None
    assert reading.counts is not None
    (first, last, num, at, numbers), g = reading.whole, method.layout.rule.chunk
    if before.shape[2] == 0:
        before = v.new_zeros(*v.shape[:2], 1, v.shape[3], dtype=torch.float64)
    groups = Chunks(v[..., :0], v, at, num, g, numbers)
    new, means = running_sums(before[:, :, -1:], groups, reading.counts, backend=backend)
    made, kept = last - first, min(kept_sums(g), before.shape[2] + num)
    sums = new if kept <= 1 + min_row(made) else torch.cat([before[:, :, :-1], new], dim=2)
    # a copy, so that the other sums are freed
    return clamped_columns(sums, sums.shape[2] - num + made - kept, kept).clone(), GroupMeans(means, first)


def _append(old: tuple[Tensor, ...], new: tuple[Tensor, ...], due: ChunkRange, num_first: PerRow) -> tuple[Tensor, ...]:
    """The old entries, then those of the new chunks. Keys and values begin with ``num_first`` first entries."""
    old = (*old, *(x[:, :, :0] for x in new[len(old) :]))
    appended = []
    for i, (kept, added) in enumerate(zip(old, new, strict=True)):
        if kept.shape[2] == 0:  # an empty state has the width of tokens, which entries may not have
            kept = added[:, :, :0]
        per_chunk = added.shape[2] // due.num
        start, stop = (n * per_chunk + (num_first if i < 2 else 0) for n in due[:2])
        appended.append(append_entries(kept, added, start, stop))
    return tuple(appended)


def _newest_queries(num_summary: int, tail: Tensor, q: Tensor, padding: PerRow, backend: str) -> Tensor:
    """Mean queries to keep: as many as later summaries need and `SLACK` more, ``[B, K, Q, D]`` in the dtype of q.

    tail ``[B, K, Q, D]``: the mean queries that were kept before the new tokens.
    """
    if num_summary <= 1:
        return detach_compact(tail)
    (B, _, Q, _), L = tail.shape, q.shape[2]
    count = min(Q + L, num_summary - 1 + SLACK)
    n = min(L, count)
    # kept means are made by `summarize` too, so that a prompt read in pieces gets the same bits as one read at once
    new = summarize(newest(q.detach(), n), tail[:, :, :0], SummarySpans(0, 0, n, n, 1, 1), backend=backend).to(q.dtype)
    # padding among these n columns, in rows with fewer than n real tokens
    padding = at_least(padding - (L - n), 0)
    if isinstance(padding, Tensor) or padding > 0:
        pad = torch.arange(n, device="cpu") < as_rows(padding, B)[:, None]
        new = new.masked_fill(pad.to(new.device)[:, None, :, None], 0)
    else:
        tail = newest(tail, count - n)
    return _detached(newest(append_window(tail, new, padding), count), tail)


def _detached(x: Tensor, before: Tensor) -> Tensor:
    """x detached for the cache. Copied if ``before`` is empty, because x may then be the caller's own k or v."""
    return x.detach().clone() if before.shape[2] == 0 else detach_compact(x)


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
    Raises ValueError for arguments that do not fit together, and for a device without float64 (MPS).
    """
    check_shapes(
        q=(q, "batch heads tokens width"), k=(k, "batch KV-heads tokens width"), v=(v, "batch KV-heads tokens Dv")
    )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k and v must have heads that divide those of q, {q.shape[1]}, got {k.shape[1]}")
    method = Method.parse(method)
    with outside_autocast(q, k, v) as (q, k, v):
        check_alike(q=q, k=k, v=v)
        scale = check_scale(scale, q)

        def run(q: Tensor, k: Tensor, v: Tensor, plan: ForwardPlan) -> tuple[Tensor, Tensor | None]:
            context, _ = extend(method, None, q, k, v, scale=scale, plan=plan, backend=backend)
            return attend_checked(method, q, context, scale=scale, backend=backend, return_lse=return_lse)

        out, lse = run_planned(method, run, (q, k, v), cu_seqlens, padding)
    return out if lse is None else (out, lse)
