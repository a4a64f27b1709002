"""Checking methods that read whole prompts before they are timed: scores, the choice of tokens, and the entries.

A choice is not continuous, so two precisions need not choose the same tokens. The scores are compared with float64, and
so are the entries, given the same choice. The choice must be exactly the one that its own scores determine. The
definition is `condense.testing.oracle_dga`.

Shapes: B rows, H query heads, K KV heads, L tokens, D and Dv widths.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from condense.bench import gate
from condense.bench.problems import Inputs, reads_at_once, sampled
from condense.methods import DGA, Context, Method
from condense.methods.prompt import FocalPrompt
from condense.ops import ArraySpans
from condense.testing import oracle_dga
from condense.testing.budget import Verdict, judge


def ranked(method: DGA, inputs: Inputs, backend: str) -> Tensor:
    """The scores by which tokens of rows without padding are ranked, ``[B, K|1, L]``."""
    q, k, _ = inputs
    reader = FocalPrompt(method)
    if method.focal == "random":
        return reader.random_scores(torch.full((k.shape[0],), k.shape[2]), k)
    sample = sampled(method, q.shape[0], q.shape[2], q.device)
    return reader.ranking(q, k, sample, scale=inputs.scale, backend=backend)


def check_ranking(method: DGA, inputs: Inputs, scores: Tensor) -> Verdict:
    """Check the importance ``[B, K, L]`` of every token; affordable at any length, as few queries are sampled."""
    (B, K, L, _), dtype = inputs.k.shape, inputs.q.dtype
    at = torch.tensor(oracle_dga.sampled(method, L), device=scores.device)
    asked = inputs.q[:, :, at].unflatten(1, (K, -1))
    wants, yardsticks = (
        [
            oracle_dga.importance(asked[b, head].to(wide), inputs.k[b, head].to(wide), at, inputs.scale)
            for b, head in itertools.product(range(B), range(K))
        ]
        for wide in (torch.float64, dtype)
    )
    return judge([*scores.flatten(0, 1)], wants, yardsticks)


def check_prompt(method: Method, inputs: Inputs, sources: Context, backend: str) -> Verdict:
    """Check what comes before a prompt's attention: scores, choice, grouped tokens, entries (of many the newest)."""
    L = inputs.k.shape[2]
    assert reads_at_once(method, L)
    scores, focal = ranked(method, inputs, backend), chosen(sources)
    verdict = check_ranking(method, inputs, scores) if method.focal == "top" else Verdict(0.0)
    grouped = [x[~focal].unflatten(0, (*focal.shape[:2], -1)) for x in (inputs.k, inputs.v)]
    if not _is_highest(focal, scores, oracle_dga.num_focal(method, L)):
        return Verdict(math.inf)
    if not all(map(torch.equal, grouped, sources.window[:2])):
        return Verdict(math.inf)
    newest = L if L <= gate.WHOLE else gate.TAIL
    wants = [_entries(method, inputs, focal, newest, wide) for wide in (torch.float64, torch.float32)]
    return verdict.and_also(judge([x[:, :, -newest:] for x in sources.entries[:2]], *wants))


def chosen(sources: Context) -> Tensor:
    """The focal tokens, bool ``[B, K, L]``: those at which the number of grouped tokens seen does not grow."""
    assert isinstance(sources.spans, ArraySpans)
    grouped = sources.spans.spans[1].hi
    return grouped.diff(dim=-1, prepend=torch.zeros_like(grouped[..., :1])) == 0


def _entries(method: DGA, inputs: Inputs, focal: Tensor, newest: int, wide: torch.dtype) -> list[Tensor]:
    """Keys and values of the newest entries by the definition, in float64, or in float32 and rounded."""
    q, k, v = gate.mean_queries(inputs, wide)
    made = []
    for b, head in itertools.product(*map(range, k.shape[:2])):
        tokens = focal[b, head].nonzero()[:, 0].tolist()
        row = (q[b, head], k[b, head], v[b, head])
        made.append(oracle_dga.prompt_entries(method, tokens, *row, scale=inputs.scale, newest=newest))
    narrow = wide if wide == torch.float64 else inputs.k.dtype
    return [torch.stack(x).unflatten(0, k.shape[:2]).to(focal.device, narrow) for x in zip(*made, strict=True)]


def _is_highest(focal: Tensor, scores: Tensor, num_focal: int) -> bool:
    """True if in every row and head ``num_focal`` tokens are chosen and none of the others has a higher score."""
    lowest = scores.masked_fill(~focal, torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).max)
    highest = scores.masked_fill(focal, -1)
    return bool((focal.sum(2) == num_focal).all() and (lowest.amin(2) >= highest.amax(2)).all())
