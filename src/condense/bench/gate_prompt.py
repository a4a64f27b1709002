"""The gate of methods that read whole prompts: scores, the choice by them, and the entries made around the choice.

A choice is not continuous, so no two precisions need agree on it. What can be held to float64 is held to it: the
scores, and the entries given the choice. The choice itself has to be exactly what its own scores say.

Shapes: B rows, H query heads, K KV heads, R = H / K, L tokens, S sampled queries, D and Dv widths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from condense.bench import gate
from condense.bench.gate import mean_queries
from condense.bench.problems import Inputs, reads_at_once, sampled
from condense.methods import DGA, Context, Method
from condense.methods.prompt import FocalPrompt
from condense.ops import ArraySpans
from condense.testing.budget import Verdict, judge


def ranked(method: DGA, inputs: Inputs, backend: str) -> Tensor:
    """What ranks the tokens of rows without padding, ``[B, K|1, L]``."""
    q, k, _ = inputs
    reader = FocalPrompt(method)
    if method.focal == "random":
        return reader.random_scores(_tokens(inputs), k)
    sample = sampled(method, q.shape[0], q.shape[2], q.device)
    return reader.ranking(q, k, sample, scale=inputs.scale, backend=backend)


def check_ranking(method: DGA, inputs: Inputs, scores: Tensor) -> Verdict:
    """Importance ``[B, K, L]`` of every token, at any length: few queries are asked."""
    q, k, _ = inputs
    K = k.shape[1]
    at = sampled(method, 1, q.shape[2], q.device).columns[0]
    asked = q[:, :, at].unflatten(1, (K, -1))
    wants, yardsticks = (
        [_importance(asked[:, head].to(dtype), k[:, head].to(dtype), at, inputs.scale) for head in range(K)]
        for dtype in (torch.float64, q.dtype)
    )
    return judge(list(scores.unbind(1)), wants, yardsticks)


def check_prompt(method: Method, inputs: Inputs, sources: Context, backend: str) -> Verdict:
    """All that comes before the attention of a prompt, at any length: scores, choice, entries and grouped tokens."""
    assert reads_at_once(method, inputs.k.shape[2])
    scores = ranked(method, inputs, backend)
    verdict = check_ranking(method, inputs, scores) if method.focal == "top" else Verdict(0.0)
    focal = chosen(sources)
    if not _is_highest(focal, scores, int(FocalPrompt(method).num_focal(focal.shape[2]))):
        return Verdict(math.inf)
    shares, mean = [verdict.share], mean_queries(inputs)
    for head in range(inputs.k.shape[1]):  # one at a time: float64 of long prompts is large
        only = slice(head, head + 1)
        want, yardstick = around(method, Inputs(*(x[:, only] for x in mean)), focal[:, only])
        shares.append(judge(*([x[:, only] for x in sources.tensors], want.tensors, yardstick.tensors)).share)
    return Verdict(max(shares))


def around(method: DGA, inputs: Inputs, focal: Tensor) -> tuple[Context, Context]:
    """Sources given the choice, in float64 and in plain operations; q: the mean queries, ``[B, K, L, D]``."""

    def made(x: Inputs, backend: str) -> Context:
        q, k, v = x
        prompt = FocalPrompt(method).grouped_around(focal, q, k, v, _tokens(x), scale=x.scale, backend=backend)
        return prompt.context

    # the definition goes group by group: too slow for the many of a long prompt, which has a short one beside it
    exact = "reference" if focal.shape[2] <= gate.WHOLE else "torch"
    return made(Inputs(*(x.double() for x in inputs)), exact), made(inputs, "torch")


def chosen(sources: Context) -> Tensor:
    """The focal tokens, bool ``[B, K, L]``: those with which the tokens in groups that a query may see do not grow."""
    assert isinstance(sources.spans, ArraySpans)
    grouped = sources.spans.spans[1].hi
    return grouped.diff(dim=-1, prepend=torch.zeros_like(grouped[..., :1])) == 0


def _is_highest(focal: Tensor, scores: Tensor, num_focal: int) -> bool:
    """True if in every row and head ``num_focal`` tokens are chosen and none of the others has a higher score."""
    lowest = scores.masked_fill(~focal, torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).max)
    highest = scores.masked_fill(focal, -1)
    return bool((focal.sum(2) == num_focal).all() and (lowest.amin(2) >= highest.amax(2)).all())


def _importance(q: Tensor, k: Tensor, at: Tensor, scale: float) -> Tensor:
    """The mean attention that each token gets from the sampled queries that see it, summed over heads, ``[B, L]``.

    q ``[B, R, S, D]``, k ``[B, L, D]``, at ``[S]``: plain operations in their dtype.
    """
    hidden = torch.arange(k.shape[1], device=k.device) > at[:, None]
    total = k.new_zeros(k.shape[:2])
    for head in q.unbind(1):
        total += (head @ k.mT * scale).masked_fill_(hidden, -math.inf).softmax(-1).sum(1)
    return total / (~hidden).sum(0).clamp(min=1)


def _tokens(inputs: Inputs) -> Tensor:
    return torch.full((inputs.k.shape[0],), inputs.k.shape[2])
