"""Dynamic Group attention (Zhang et al., ICML 2025): focal tokens stay exact, the others are pooled in groups.

Shapes: B rows, H query heads, K KV heads, L tokens, G chunks of c = m' tokens, p entries per chunk, D and Dv widths.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.config import Natural, Positive, Share
from condense.methods.base import Context, Method, Prompt, PromptPlan
from condense.methods.grouped import RepBias
from condense.methods.layout import ChunkPooling, FirstEntries, Layout, Lookahead
from condense.methods.prompt import chosen_columns, exact_prompt, highest, real_columns, take
from condense.ops import ArraySpans, Chunks, Source, Span, UniformRule, group_scores, importance, matched_bias, pool
from condense.ops.tensors.per_row import PerRow, broadcast_rows, map_rows
from condense.ops.tensors.sampling import scramble


@dataclass(frozen=True, kw_only=True)
class DGA(Method):
    """Important tokens exact, the others in groups of ``group_size``, one entry each.

    selection="streaming": the paper's decode rule everywhere, in training too. Chunks of m' = g + ceil(gamma * g)
    tokens; when a chunk leaves the window, its m' - g tokens with the highest scores stay exact (focal) and the
    other g become one group. selection="prompt": the paper's prefill. The focal tokens of the whole prompt are
    those with the most attention from a sample of its queries (Eq. 16 and 17), which lets earlier tokens depend on
    later ones: for inference only, unless ``allow_future``. Tokens after the prompt are read in chunks as in
    "streaming", counted from the prompt's end.

    group_size: tokens per group, >= 1. window: newest tokens that stay exact, >= 0; the paper has 1 in decode and 0 in
    training. gamma: share of focal tokens, 0 to 1. min_focal: smallest number of focal tokens in a prompt, >= 0.

    summary: the query that weighs a chunk: "last", its own last one, or "streaming", the mean of the m' newest when the
    chunk leaves the window; each group of a prompt is weighed by the query of its last token.

    focal: "top" takes the tokens with the highest scores, "random" any, for comparison. num_recent (>= 1), num_random:
    how many queries of a prompt are sampled to rank its tokens: the newest, and others drawn with ``seed``.

    complementary: True: a prompt's query sees the tokens so far of a group that is not complete yet; False: of that
    group it sees its own token only. (This and ``focal`` are the paper's ablations, Tables 5 and 7.)

    The scores that rank and weigh have attention's scale; where that is negative, the ranking is reversed.

    rep_bias: what is added to a group's score. "none": it weighs as one token; "log_size": ln(group_size), as it stands
    for that many tokens; "matched": a number for each group, by which it weighs for its summary query what its tokens
    weigh together; only with ``selection="streaming"``.
    """

    name: ClassVar[str] = "dga"
    group_size: Positive = 16
    window: Natural = 1
    gamma: Share = 0.1
    min_focal: Natural = 1024
    selection: Literal["streaming", "prompt"] = "streaming"
    summary: Literal["last", "streaming"] = "last"
    focal: Literal["top", "random"] = "top"
    complementary: bool = True
    num_recent: Positive = 64
    num_random: Natural = 64
    seed: Natural = 0
    rep_bias: RepBias = "none"
    allow_future: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rep_bias == "matched" and self.selection == "prompt":
            raise ValueError("rep_bias='matched' needs selection='streaming', got 'prompt': use rep_bias='log_size'")
        _ = self._gamma  # cached now, because torch.compile cannot trace how it is computed

    @property
    def layout(self) -> Layout:
        """Chunks of m' tokens behind the window, m' - g focal entries and one group each.

        Focal tokens come first, in order of position, then the group, so that the bias has the same pattern in every
        chunk. All entries of a chunk become visible together, and their order does not matter to a softmax.
        """
        num_focal = self.share(self.group_size)
        chunk = self.group_size + num_focal
        # kernels cannot choose at random: only `represent` makes such entries
        needs_represent = self.focal == "random" or type(self).represent is not DGA.represent
        biased = self.rep_bias == "log_size" and self.group_size > 1
        return Layout(
            rule=UniformRule(chunk=chunk, window=self.window, entries=num_focal + 1),
            summary_delay=0 if self.summary == "last" else self.window,
            num_summary=1 if self.summary == "last" else chunk,
            pooling=None if needs_represent else ChunkPooling("weighted", "weighted", num_focal),
            bias=(*[0.0] * num_focal, math.log(self.group_size)) if biased else (),
            matched=self.rep_bias == "matched",
            lookahead=Lookahead(self.allow_future, "selection='streaming'") if self.selection == "prompt" else None,
        )

    @property
    def reads_prompt(self) -> bool:
        """True, as in the paper's prefill, with ``selection="prompt"``."""
        return self.selection == "prompt"

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """The paper's decode rule: the tokens with the highest scores stay, the others become one weighted mean."""
        assert summary is not None
        k, v = chunks.tokens()
        num_focal = k.shape[3] - self.group_size
        scores = group_scores(summary, k, scale=scale, backend=backend)
        ranking = scores.detach()
        if self.focal == "random":
            # a random number per token, computed from its position and the seed alone
            numbers, c = chunks.numbers, chunks.size
            if not isinstance(numbers, Tensor):
                numbers = numbers + torch.arange(chunks.num, device=k.device)[None]
            drawn = scramble(numbers[..., None] * c + torch.arange(c, device=k.device), self.seed)
            ranking = drawn[:, None].expand_as(scores)
        order = ranking.argsort(stable=True, descending=True)
        focal, rest = (x.sort(-1).values for x in order.split([num_focal, self.group_size], dim=-1))
        weights = scores.gather(-1, rest)
        entries_k, entries_v = (
            torch.cat([take(x, focal), pool(take(x, rest), weights, how="weighted", backend=backend)[..., None, :]], 3)
            for x in (k, v)
        )
        if self.rep_bias != "matched":
            return entries_k.flatten(2, 3), entries_v.flatten(2, 3)
        bias = matched_bias(summary, entries_k[..., -1, :], weights.logsumexp(-1), scale=scale, backend=backend)
        biases = F.pad(bias[..., None], (0, 0, num_focal, 0))
        return entries_k.flatten(2, 3), entries_v.flatten(2, 3), biases.flatten(2, 3)

    def share(self, count: int) -> int:
        """ceil(gamma * count) in exact arithmetic: 0.55 of 100 is 55, in floating point 56."""
        numerator, denominator = self._gamma
        return -(-numerator * count // denominator)

    @cached_property
    def _gamma(self) -> tuple[int, int]:
        """Numerator and denominator of ``gamma`` as it is written in decimal: 0.1 is 1 / 10 exactly."""
        return Fraction(str(self.gamma)).as_integer_ratio()

    def prompt_focal(self, tokens: PerRow) -> PerRow:
        """Number of focal tokens in prompts of ``tokens`` tokens, enlarged until the others fill whole groups."""
        focal = map_rows(lambda n: min(n, max(self.share(n), self.min_focal)), tokens)
        return focal + (tokens - focal) % self.group_size

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """The paper's prefill (Algorithms 1 and 2): rank all tokens, keep the highest, group the others.

        Entries: focal tokens and groups, in order of their last token. Window: the grouped tokens. Query t sees the
        entries whose last token is at or before t, and the tokens of the window that are at or before t and in a group
        not complete at t: each token up to t once. If not ``complementary``, it sees no token of the window but t.
        """
        (B, K, L, _), g = k.shape, self.group_size
        tokens = plan.tokens(B)
        num_focal = self.prompt_focal(tokens)
        assert isinstance(num_focal, Tensor)
        if torch.equal(num_focal, tokens):
            return exact_prompt(k, v, tokens)
        if self.focal == "random":  # drawn from position and seed alone
            starts = (tokens - L).to(k.device, non_blocking=True)
            scores = scramble(torch.arange(L, device=k.device) + starts[:, None], self.seed)[:, None]
        else:
            sample = plan.sample(B, self.num_recent, self.num_random, self.seed, q.device)
            scores = importance(q, k, sample, scale=scale, backend=backend)
        focal = highest(scores, num_focal, tokens).expand(-1, K, -1)
        grouped = real_columns(tokens, L, k.device) & ~focal
        focal_seen, grouped_seen = focal.cumsum(2), grouped.cumsum(2)
        complete = grouped_seen // g
        closing = grouped & (grouped_seen % g == 0)
        first = complete * g if self.complementary else grouped_seen - (grouped & ~closing).long()
        last_entry = focal_seen + complete
        spans = ArraySpans((Span(torch.zeros_like(last_entry), last_entry), Span(first, grouped_seen)))

        members = chosen_columns(grouped, int((tokens - num_focal).max()))
        window_k, window_v = take(k, members), take(v, members)
        num_groups = (tokens - num_focal) // g
        summary = _mean_queries(q, members[:, :, g - 1 :: g], num_groups)
        members_k, members_v = (x.unflatten(2, (-1, g)) for x in (window_k, window_v))
        scores = group_scores(summary, members_k, scale=scale, backend=backend)
        groups_k, groups_v = (pool(x, scores, how="weighted", backend=backend) for x in (members_k, members_v))

        num_entries = num_focal + num_groups
        ends = chosen_columns(focal | closing, int(num_entries.max()))
        is_group = closing.gather(2, ends)
        number = (complete.gather(2, ends) - 1).clamp(min=0)
        entries_k, entries_v = (
            torch.where(is_group[..., None], take(groups, number), take(exact, ends))
            for groups, exact in ((groups_k, k), (groups_v, v))
        )
        bias = is_group.double() * math.log(g) if self.rep_bias == "log_size" else None

        def kept() -> tuple[Tensor, Tensor]:
            # Later queries see all of these entries, so their order is free: with focal tokens first, their number is
            # enough to tell them from groups (`condense.methods.FirstEntries`).
            past_end = torch.arange(is_group.shape[2], device=k.device) >= broadcast_rows(num_entries, 3, k.device)
            order = is_group.to(torch.int8).masked_fill(past_end, 2).argsort(stable=True)
            return take(entries_k.detach(), order), take(entries_v.detach(), order)

        context = Context((Source(entries_k, entries_v, bias), Source(window_k, window_v)), spans)
        return Prompt(context, FirstEntries.of(num_entries, num_focal), kept)

    def num_entries(self, tokens: PerRow) -> PerRow:
        """Number of focal tokens and groups in prompts of ``tokens`` tokens."""
        focal = self.prompt_focal(tokens)
        return focal + (tokens - focal) // self.group_size


def _mean_queries(q: Tensor, columns: Tensor, num_groups: Tensor) -> Tensor:
    """Summary queries ``[B, K, G, D]`` in the dtype of q: the query in ``columns`` ``[B, K, G]``, averaged over heads.

    num_groups: groups of each row, int64 CPU ``[B]``. Groups beyond get 0: their column may be padding, and NaN.
    """
    K, G = columns.shape[1:]
    queries = take(q.unflatten(1, (K, -1)), columns[:, :, None].expand(-1, -1, q.shape[1] // K, -1))
    mean = queries.mean(2, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    absent = torch.arange(G, device=q.device) >= broadcast_rows(num_groups, 3, q.device)
    return mean.masked_fill(absent[..., None], 0)
