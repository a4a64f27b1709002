"""Checking results before they are timed: a row whose result is wrong gets no time.

Results are compared with the definition in float64, within the error budget of the tests, see `condense.testing`.

Shapes: B rows, H query heads, K KV heads, L queries, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.bench.problems import Inputs
from condense.methods import Context, Method, Recall
from condense.methods.sparse_prefill import chosen_keys
from condense.ops import BLOCK
from condense.testing import oracle, oracle_recall
from condense.testing.budget import Verdict, judge
from condense.testing.checked import checked

# of a long problem, this many of the newest queries are checked, because they see all entries
TAIL = 64
# up to this length every query is checked
WHOLE = 2048


def first_checked(length: int) -> int:
    """The first query that is checked: 0 in a short problem, one near the end in a long one."""
    return 0 if length <= WHOLE else length - TAIL


def check_output(out: Tensor, q: Tensor, sources: Context, *, scale: float, method: Method | None = None) -> Verdict:
    """Attention output ``[B, H, L, Dv]`` at the checked queries. method: needed for `condense.Recall`."""
    part = checked(q, sources, first_checked(q.shape[2]), scale=scale, method=method)
    got = out[:, :, -part.q.shape[2] :] * part.clear
    exact, yardstick = (part.to(dtype).output(scale) for dtype in (torch.float64, out.dtype))
    return judge([got], [exact], [yardstick], near_ties=int((~part.clear).sum()))


def check_chosen(out: Tensor, inputs: Inputs, sources: Context) -> Verdict:
    """Output ``[B, H, L, Dv]`` of a `condense.methods.SparsePrefill` at the checked queries, over the keys it chose."""
    q, start, L = inputs.q, first_checked(inputs.q.shape[2]), inputs.q.shape[2]
    query, key = torch.arange(start, L, device=q.device)[:, None], torch.arange(L, device=q.device)
    seen = []
    for blocks, columns in chosen_keys(sources):
        is_column = torch.zeros(len(columns), L + 1, dtype=torch.bool, device=q.device).scatter_(1, columns, True)
        seen.append((blocks[:, query // BLOCK, key // BLOCK] | is_column[:, None, :L]) & (key <= query))
    mask = torch.stack(seen)

    def plain(dtype: torch.dtype) -> Tensor:
        q, k, v = (x.to(dtype) for x in inputs)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = (inputs.scale * q[:, :, start:] @ k.mT).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    return judge([out[:, :, start:]], [plain(torch.float64)], [plain(q.dtype)])


def check_gradients(
    gradients: Callable[[Tensor], Sequence[Tensor]],
    q: Tensor,
    sources: Context,
    *,
    scale: float,
    method: Method | None = None,
) -> Verdict:
    """Gradients of q and of keys and values, source by source, that flow from the checked queries.

    gradients: from an output gradient ``[B, H, L, Dv]``, which is 0 at all other queries, those of q, keys and values
    of the entries, of Recall's store, and of the window.
    """
    start, L = first_checked(q.shape[2]), q.shape[2]
    part = checked(q, sources, start, scale=scale, method=method)
    generator = torch.Generator(q.device).manual_seed(1)
    size = (*q.shape[:2], L - start, sources.window.v.shape[3])
    upstream = torch.randn(size, generator=generator, dtype=q.dtype, device=q.device) * part.clear
    of_q, of_k, of_v, *store, window_k, window_v = gradients(F.pad(upstream, (0, 0, start, 0)))
    of_store = [part for x in store for part in (x[..., : q.shape[3]], x[..., q.shape[3] :])]
    of_sources = (of_k, of_v, *of_store, window_k, window_v)
    columns = [pair for pair in part.columns for _ in ("k", "v")]
    results = [of_q[:, :, start:], *(x[:, :, lo:hi] for x, (lo, hi) in zip(of_sources, columns, strict=True))]
    exact = (part.to(dtype).gradients(upstream, scale) for dtype in (torch.float64, q.dtype))
    # entries that are left out have no columns
    kept = [x for x in zip(results, *exact, strict=True) if x[0].shape[3] > 0]
    return judge(*map(list, zip(*kept, strict=True)), near_ties=int((~part.clear).sum()))


def check_entries(method: Method, inputs: Inputs, sources: Context) -> Verdict:
    """Check pooled entries: all of a short problem, the newest of a long one; and Recall's index and store."""
    rule, entries = method.layout.rule, sources.entries
    assert rule.max_chunks is None, "methods that pool have entries for all chunks"
    if entries.k.shape[3] == 0:
        return Verdict(0.0 if _keeps_its_groups(method, inputs, sources) else math.inf)
    groups = entries.k.shape[2] // rule.entries
    first = 0 if inputs.q.shape[2] <= WHOLE else max(0, groups - TAIL)
    want, plain = (_entries(method, inputs, range(first, groups), wide) for wide in (torch.float64, torch.float32))
    if not _keeps_its_groups(method, inputs, sources):
        return Verdict(math.inf)
    return judge([x[:, :, first * rule.entries :] for x in (entries.k, entries.v)], want, plain)


def mean_queries(inputs: Inputs, wide: torch.dtype) -> Inputs:
    """The inputs in another dtype on the host, where loops of small operations are faster, q the mean of a KV head's.

    The definition rounds the mean to the dtype of q, also for float64.
    """
    q, k, v = inputs
    mean = q.unflatten(1, (k.shape[1], -1)).mean(2, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return Inputs(*(x.cpu().to(wide) for x in (mean, k, v)))


def _keeps_its_groups(method: Method, inputs: Inputs, sources: Context) -> bool:
    """True unless the method is Recall, and its index or store is not that of the inputs' groups."""
    if not isinstance(method, Recall) or not sources.extra:
        return True
    return oracle_recall.holds(method, inputs.k, inputs.v, sources.extra)


def _entries(method: Method, inputs: Inputs, groups: range, wide: torch.dtype) -> list[Tensor]:
    """Keys and values of these groups by the definition, in float64, or in float32 and rounded to the inputs' dtype."""
    narrow = wide if wide == torch.float64 else inputs.k.dtype
    made = oracle.entries(method, *mean_queries(inputs, wide), groups, scale=inputs.scale)
    return [x.to(inputs.k.device, narrow) for x in made]
