"""The operations that all methods share: each checks its arguments, chooses a backend and calls it.

All raise ValueError for an unknown backend, and for an explicit one that has kernels for the operation but cannot run
them here; for stored groups of 16 bits that need no kernels the backend is not looked at.

Shapes: B rows, H query heads, K KV heads, L queries, N entries of a source, D key width,
Dv value width, G groups of c tokens or spans of queries, Q mean queries kept from earlier calls.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from condense.ops.backends import BACKENDS, plain, resolve_backend, resolve_pooling, resolve_recall, resolve_weights
from condense.ops.checks import check_poolings, check_sources
from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.recall.index import GroupIndex
from condense.ops.recall.rest import GroupMeans
from condense.ops.recall.store import StoreFormat
from condense.ops.spans import Source, Spans
from condense.ops.step.call import StepCall
from condense.ops.step.pages import Places
from condense.ops.tensors.sampling import Sample
from condense.ops.torch import step as torch_step
from condense.ops.triton import limits as triton_limits
from condense.ops.types import NO_EXTRAS, AttendOptions, Chunks, Extras, Pooling, Problem, SummaryColumns, SummarySpans


def attend(
    q: Tensor,
    sources: Sequence[Source],
    spans: Spans,
    *,
    scale: float,
    dropout_p: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor | None]:
    """Attention over a list of sources: one softmax over the span of every source that a query sees.

    q ``[B, H, L, D]``; each source k ``[B, K, N, D]`` and v ``[B, K, N, Dv]`` with a bias (`Source`), the window last;
    K divides H; float64, float32, bfloat16 or float16, one dtype and device. spans: one per source. ``dropout_p`` is
    attention dropout. extras: soft caps and sinks of a model, see `condense.ops.Extras`.

    Returns out ``[B, H, L, Dv]`` in the dtype of q and, with ``return_lse``, the log-sum-exp (natural, biases included,
    sink logits not) ``[B, H, L]`` in float32 or wider, else None. A query that sees nothing gives 0 and -inf, even if
    it holds NaN; keys and values must be finite, also those that no query sees.
    Raises ValueError also for heads that K does not divide, and for sources, biases or spans that do not fit.
    """
    check_sources(q, sources, spans)
    window = sources[-1]
    if q.shape[1] % window.k.shape[1]:
        raise ValueError(f"sources must have heads that divide those of q, {q.shape[1]}, got {window.k.shape[1]}")
    L, N = q.shape[2], window.k.shape[2]
    problem = Problem(
        q.device, q.dtype, (q.shape[3], window.v.shape[3]), L, dropout_p, q.shape[0], q.shape[1], window.k.shape[1],
        len(sources), extras.softcap,
    )  # fmt: skip
    chosen = resolve_backend(backend, problem)
    options = AttendOptions(scale, extras.softcap, dropout_p, return_lse or extras.needs_lse)
    is_plain = not (options.return_lse or options.softcap)
    if backend == "auto" and chosen in ("triton", "hopper") and L == N and is_plain and spans.is_causal(L, N):
        chosen = "torch"  # ordinary causal attention of whole sequences: PyTorch's own kernel is the fastest
    out, lse = BACKENDS[chosen].load().attend(q, sources, spans, options)
    return extras.finish(out, lse), lse if return_lse else None


def attend_recall(
    q: Tensor,
    sources: RecallSources,
    choice: IndexChoice,
    *,
    scale: float,
    means: GroupMeans | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor | None]:
    """One softmax over the tokens of open groups, the window, and one token for all other closed groups.

    q ``[B, H, L, D]`` in the dtype of the sources. choice: the groups that each query opens; its tensors get no
    gradient. means: the values of that one token (`condense.ops.recall.rest`); None to leave it out (Quest). backend,
    extras: as in `attend`; groups are chosen without extras. If every query opens all of its groups, this is `attend`.

    Returns out ``[B, H, L, Dv]`` in the dtype of q and, with ``return_lse``, the log-sum-exp ``[B, H, L]`` in float32
    or wider, else None. A query that sees nothing gives 0 and -inf.
    Raises ValueError also for a store of other than whole groups.
    """
    if (tokens := sources.store.k.shape[2]) % sources.group_size:
        raise ValueError(f"store must hold whole groups of {sources.group_size} tokens, got {tokens} tokens")
    chosen = resolve_recall(backend, q, sources, choice, softcap=extras.softcap)
    store, window, spans = sources
    if choice.opens_all(spans.hulls([(0, q.shape[2])])[0][0].hi):
        seen = spans.of_tokens(window_alone=False)
        return attend(q, (store, window), seen, scale=scale, backend=backend, return_lse=return_lse, extras=extras)
    options = AttendOptions(scale, extras.softcap, return_lse=return_lse or extras.needs_lse or means is not None)
    out, lse = BACKENDS[chosen].load().attend_recall(q, sources, choice, options, means)
    return extras.finish(out, lse), lse if return_lse else None


def unpack_store(
    form: StoreFormat, pieces: Tensor, index: GroupIndex, widths: tuple[int, int], dtype: torch.dtype, *,
    places: Places | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode stored groups to keys ``[B, K, n * g, D]`` and values ``[B, K, n * g, Dv]`` in ``dtype``.

    pieces ``[B, K, n, g * C]``: the groups in the format ``form``; or pages of pieces, ``[P, K, N, g * C]``, also in
    pinned host memory, of which those at ``places`` are decoded. index: of the n groups, for each KV head. widths: D
    and Dv (0 for latents). With 16 bits, and without places, the results are views, whatever the backend.
    Else raises ValueError for a backend that is unknown, or was asked for and cannot run.
    """
    are_views = form.bits == 16 and places is None
    chosen = "torch" if are_views else resolve_pooling(backend, index.steps.device, dtype, widths)
    return BACKENDS[chosen].load().unpack_store(form, pieces, index, widths, dtype, places)


def summarize(q: Tensor, tail: Tensor, spans: SummarySpans | SummaryColumns, *, backend: str = "auto") -> Tensor:
    """Summary queries: per KV head the mean of the queries in each span, float32 or wider ``[B, K, G, D]``.

    q ``[B, H, L, D]``, right-aligned: a row's new queries are its last columns, the columns before them are not read.
    tail ``[B, K, Q, D]``, right-aligned: mean queries kept from earlier calls, detached, in the dtype of q.
    A query is averaged over the H / K heads that share a KV head in float32 or wider and rounded to the dtype of q,
    then over its span. Positions that neither q nor tail holds count as zero. With `SummaryColumns` B is 1 and Q is 0.
    """
    chosen = resolve_pooling(backend, q.device, q.dtype, (q.shape[3],))
    return BACKENDS[chosen].load().summarize(q, tail, spans)


def pool_groups(
    groups: Chunks,
    summary: Tensor | None,
    *,
    scale: float,
    key_pooling: Pooling,
    value_pooling: Pooling,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Pool G groups of c tokens to one entry each: keys ``[B, K, G, D]`` and values ``[B, K, G, Dv]``.

    With ``return_lse`` also the log-sum-exp of each group's scores ``[B, K, G]`` (natural, float32 or wider).

    groups: their tokens and where they stand, Dv may be 0; no token is in two groups. summary ``[B, K, G, D]`` float32
    or wider: the query that scores the tokens of each group, as in `group_scores`; None if neither pooling uses scores
    ("mean" and "max" do not, see `pool`) and no log-sum-exp is wanted. The entry of a group that reaches past the
    window is finite but undefined.
    Raises ValueError for another pooling, and for one that needs a summary without any.
    """
    check_poolings("key_pooling, value_pooling", key_pooling, value_pooling, scored=summary is not None)
    k, v = groups.window_k, groups.window_v
    operations = BACKENDS[resolve_pooling(backend, k.device, k.dtype, (k.shape[3], v.shape[3]))].load()
    if operations.pool_groups is not None:
        return operations.pool_groups(
            groups, summary, scale=scale, key_pooling=key_pooling, value_pooling=value_pooling, return_lse=return_lse
        )
    groups_k, groups_v = groups.tokens()
    if summary is None:
        scores = k.new_zeros(groups_k.shape[:4], dtype=torch.promote_types(k.dtype, torch.float32))
    else:
        scores = operations.group_scores(summary, groups_k, scale=scale)
    pooled = operations.pool(groups_k, scores, how=key_pooling), operations.pool(groups_v, scores, how=value_pooling)
    return (*pooled, scores.logsumexp(-1)) if return_lse else pooled


def make_entries(
    groups: Chunks,
    summary: Tensor | None,
    pooling: tuple[Pooling, Pooling],
    *,
    scale: float,
    matched: bool,
    backend: str,
    latent: int = 0,
) -> tuple[Tensor, ...]:
    """Keys and values of entries from `pool_groups` and, if ``matched``, their `matched_bias` as a third tensor.

    pooling: of keys and of values. latent: if > 0, the first ``latent`` columns of keys are pooled as values are.
    """
    if latent:
        # one call pools both parts: the latents as values, and the whole keys, of which the other columns are kept
        groups = groups._replace(window_v=groups.window_k[..., :latent])
    k, v, *lse = pool_groups(
        groups, summary, scale=scale, key_pooling=pooling[0], value_pooling=pooling[1], return_lse=matched,
        backend=backend,
    )  # fmt: skip
    if latent:
        k, v = torch.cat([v, k[..., latent:]], dim=-1), v[..., :0]
    if not matched:
        return k, v
    assert summary is not None
    return k, v, matched_bias(summary, k, lse[0], scale=scale, backend=backend)


def keep_groups(groups: Chunks, store: StoreFormat, *, backend: str) -> tuple[Tensor, ...]:
    """Entries of G stored groups (keys and values ``[B, K, G, 0]``), the fields of their `GroupIndex`, and their tokens
    as `StoreFormat.pack` returns them, ``[B, K, G * c, columns]``.
    """
    k, v = groups.tokens()
    widths = k.shape[4], v.shape[4]
    chosen = "torch" if store.bits == 16 else resolve_pooling(backend, k.device, k.dtype, widths)
    return k[:, :, :, 0, :0], v[:, :, :, 0, :0], *BACKENDS[chosen].load().store_groups(store, k, v)


def running_sums(before: Tensor, groups: Chunks, counts: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Sums of values after each of n whole groups, float64 ``[B, K, 1 + n, Dv]``, and means, float32 or wider.

    before: sum 0, float64 ``[B, K, 1, Dv]``, of earlier groups. groups: the next ones, values window_v. counts: tokens
    in each sum, at least 1, int64 ``[B|1, 1, 1 + n, 1]``. A sum does not depend on how many groups come at a time where
    float64 rounds nothing, as with most numbers of 16 bits. Gradients flow to values and before.
    """
    chosen = resolve_pooling(backend, before.device, groups.window_v.dtype, (before.shape[3],))
    return BACKENDS[chosen].load().running_sums(before, groups, counts)


def decode_step(call: StepCall, represent: Callable[..., tuple[Tensor, ...]], *, backend: str) -> Tensor:
    """Read one token per row into the state, in place, and attend; `condense.ops.step.call` defines the step.

    represent: `condense.Method.represent`, called by "torch". backend: "triton" or "torch", from `step_backend`.
    Returns ``[B, H, 1, Dv]``, or ``[B, H, 1, latent]``; no gradient flows through a step.
    Raises ValueError for another backend, "triton" where it cannot run, "torch" with a store in host memory of a GPU.
    """
    if backend == "triton":
        from condense.ops.triton import step as triton_step

        return triton_step.step(call)
    if backend != "torch":
        raise ValueError(f"backend of a step must be 'torch' or 'triton', got {backend!r}")
    if call.state.is_apart:
        (q, k, v, *_), M = call.token, call.state.entries_k.shape[2]
        widths, options = (k.shape[3], v.shape[3]), {"latent": call.latent, "entries": M}
        obstacle = triton_limits.step_obstacle(q.device, q.dtype, widths, call.settings, **options)
        raise ValueError(
            f"a store in host memory needs the Triton step, which {obstacle or 'was not asked for'}; use store='device'"
        )
    return torch_step.step(call, represent)


def group_scores(summary: Tensor, k: Tensor, *, scale: float, backend: str = "auto") -> Tensor:
    """Scores ``scale * summary . k`` of every group's tokens, float32 or wider ``[B, K, G, c]``.

    summary ``[B, K, G, D]`` is one query per group, k ``[B, K, G, c, D]`` the groups' keys.
    """
    return plain(backend).group_scores(summary, k, scale=scale)


def matched_bias(summary: Tensor, k: Tensor, lse: Tensor, *, scale: float, backend: str) -> Tensor:
    """Biases that make entries weigh for their summary query what their tokens weigh together, ``[B, K, G, 1]``.

    ``ln sum_i exp(scale * summary . k_i) - scale * summary . k``: lse ``[B, K, G]`` is the first term and k
    ``[B, K, G, D]`` the entries' keys in the dtype of the tokens, before they are rounded to fewer bits; summary
    ``[B, K, G, D]``. For weighted keys this is the entropy of the weights: ln(g) for equal scores, 0 where one token
    has all the weight. float32 or wider.
    """
    return (lse - group_scores(summary, k[..., None, :], scale=scale, backend=backend)[..., 0])[..., None]


def pool(x: Tensor, scores: Tensor, *, how: Pooling, backend: str = "auto") -> Tensor:
    """Pool each group to one vector.

    x ``[B, K, G, c, D]``, scores ``[B, K, G, c]`` float32 or wider. ``how``: "weighted" by the softmax of the
    scores, "mean", "max" per channel, or "select" the vector with the highest score (ties to the lowest
    position). Computed in the dtype of the scores, returned ``[B, K, G, D]`` in the dtype of x.
    Gradients flow through the weights, but not through the choice of "select". Raises ValueError for another ``how``.
    """
    check_poolings("how", how, scored=True)
    return plain(backend).pool(x, scores, how=how)


@torch.no_grad()
def importance(q: Tensor, k: Tensor, sample: Sample, *, scale: float, backend: str = "auto") -> Tensor:
    """Attention that each token gets, on average, from the sampled queries that may see it (DGA, Eq. 16 and 17).

    q ``[B, H, L, D]``, k ``[B, K, L, D]``: right-aligned rows; sample: the sampled queries. Returns
    ``sum_j softmax_i(scale * q_j . k_i) / #{sampled j >= i}``, summed over the query heads of each KV head,
    ``[B, K, L]`` float32 or wider; padding gets 0. No gradients.
    """
    return plain(backend).importance(q, k, sample, scale=scale) / sample.num_later.clamp(min=1)[:, None]


@torch.no_grad()
def largest_weights(
    q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float = 0.0, backend: str = "auto"
) -> Tensor:
    """The largest weight that any query gives each key of a KV head, float32 or wider ``[B, K, N]``. No gradients.

    q ``[B, H, L, D]``, k ``[B, K, N, D]``, one dtype, K divides H: every query sees every key. lse ``[B, H, L]``: the
    log-sum-exp of all that a query sees, which may be more than these keys; inf (not -inf, as `attend` returns for a
    query that sees nothing) for a query that does not count.
    softcap: as in `Extras`.
    Raises ValueError also for heads that K does not divide, and for another number of log-sum-exps.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k must have heads that divide those of q, {q.shape[1]}, got {k.shape[1]}")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have one number for each query, {[*q.shape[:3]]}, got {[*lse.shape]}")
    run = BACKENDS[resolve_weights(backend, Problem(q.device, q.dtype, (q.shape[3],)))].load().largest_weights
    return run(q, k, lse, scale=scale, softcap=softcap)
