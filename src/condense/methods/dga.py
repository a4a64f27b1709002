"""Dynamic Group attention (Zhang et al., ICML 2025): focal tokens stay exact, the others are pooled in groups.

Shapes: B rows, H query heads, K KV heads, L tokens, G chunks of c = m' tokens, p entries per chunk, D and Dv widths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from condense.config import check_bool, check_choice, check_int, check_number, check_positive
from condense.methods.base import ChunkPooling, Method, Prompt
from condense.methods.dga_prompt import exact_prompt, focal_prompt, highest, take
from condense.ops import UniformRule, group_scores, importance, pool
from condense.ops.tensors.per_row import PerRow, broadcast_rows, map_rows
from condense.ops.tensors.sampling import scramble


@dataclass(frozen=True, kw_only=True)
class DGA(Method):
    """Important tokens exact, the others in groups of ``group_size``, one representative each.

    selection="streaming": the paper's decode rule everywhere, in training too. Chunks of m' = g + ceil(gamma * g)
    tokens; when a chunk leaves the window, its m' - g tokens with the highest scores stay exact (focal) and the
    other g become one group. selection="prompt": the paper's prefill. The focal tokens of the whole prompt are
    those with the most attention from a sample of its queries (Eq. 16 and 17), which lets earlier tokens depend on
    later ones: for inference only, unless ``allow_future``. What follows the prompt goes on with chunks, counted
    from its end.

    group_size: tokens per group, >= 1. window: exact tokens behind which chunks close, >= 0; 1 is the paper's in
    decode, 0 in training. gamma: share of focal tokens, 0 to 1. min_focal: at least so many in a prompt, >= 0.
    summary: whose query weighs a chunk: "last", its own last, or "streaming", the mean of the m' queries that end
    when it leaves the window; a prompt's groups go by their last member. focal: "top" by scores, or "random" for
    comparison. complementary: a prompt's queries see the members of a group that is not complete yet; without,
    only themselves. weight_scale: scale of the scores that rank the tokens of a chunk and weigh a group, > 0, default
    the attention's own, whose sign then decides which tokens rank first; the paper prints 1. num_recent
    (>= 1), num_random: sampled queries, the newest and others drawn with ``seed``.
    rep_bias: "log_size" adds ln(group_size) to a group's score, as it stands for that many tokens.
    Raises ValueError for a field out of range.
    """

    name: ClassVar[str] = "dga"
    group_size: int = 16
    window: int = 1
    gamma: float = 0.1
    min_focal: int = 1024
    selection: Literal["streaming", "prompt"] = "streaming"
    summary: Literal["last", "streaming"] = "last"
    focal: Literal["top", "random"] = "top"
    complementary: bool = True
    weight_scale: float | None = None
    num_recent: int = 64
    num_random: int = 64
    seed: int = 0
    rep_bias: Literal["none", "log_size"] = "none"
    allow_future: bool = False

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 1)
        check_int("window", self.window, 0)
        check_number("gamma", self.gamma, 0, 1)
        check_int("min_focal", self.min_focal, 0)
        check_choice("selection", self.selection, ("streaming", "prompt"))
        check_choice("summary", self.summary, ("last", "streaming"))
        check_choice("focal", self.focal, ("top", "random"))
        check_bool("complementary", self.complementary)
        if self.weight_scale is not None:
            check_positive("weight_scale", self.weight_scale)
        check_int("num_recent", self.num_recent, 1)
        check_int("num_random", self.num_random, 0)
        check_int("seed", self.seed, 0)
        check_choice("rep_bias", self.rep_bias, ("none", "log_size"))
        check_bool("allow_future", self.allow_future)
        _ = self._gamma  # made now: torch.compile can read it, but not follow how it is made

    @property
    def rule(self) -> UniformRule:
        """Chunks of m' tokens behind the window, m' - g focal entries and one group each."""
        num_focal = self._share(self.group_size)
        return UniformRule(chunk=self.group_size + num_focal, window=self.window, entries=num_focal + 1)

    @property
    def summary_delay(self) -> int:
        """A chunk's last query is at hand at once; the others come when the chunk leaves the window."""
        return 0 if self.summary == "last" else self.window

    @property
    def num_summary(self) -> int:
        """Queries whose mean ranks and weighs a chunk."""
        return 1 if self.summary == "last" else self.rule.chunk

    @property
    def looks_ahead(self) -> bool:
        """The prompt's selection uses queries of the prompt's end."""
        return self.selection == "prompt"

    @property
    def permits_future(self) -> bool:
        """``allow_future``."""
        return self.allow_future

    @property
    def reads_prompt(self) -> bool:
        """With ``selection="prompt"``."""
        return self.selection == "prompt"

    @property
    def causal_setting(self) -> str:
        """Chunks are causal."""
        return "selection='streaming'"

    @property
    def pooling(self) -> ChunkPooling | None:
        """The best tokens as they are, the weighted mean of the others; lots are drawn by `represent` alone."""
        if self.focal == "random" or type(self).represent is not DGA.represent:
            return None
        return ChunkPooling("weighted", "weighted", self.rule.entries - 1, self.weight_scale)

    def represent(
        self, k: Tensor, v: Tensor, summary: Tensor | None, *, first_chunk: PerRow, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        """The paper's decode rule; see `Method.represent` for shapes.

        All entries of a chunk become visible together, and a softmax does not see their order: focal tokens come
        first, in order of position, then the group, so that the bias is the same pattern in every chunk.
        """
        assert summary is not None
        num_focal = k.shape[3] - self.group_size
        scores = group_scores(summary, k, scale=self._weight_scale(scale), backend=backend)
        ranking = scores.detach()
        if self.focal == "random":
            ranking = self._lots(first_chunk, k.shape[2], k.shape[3], k.device).expand_as(scores)
        order = ranking.argsort(stable=True, descending=True)
        focal, rest = (x.sort(-1).values for x in order.split([num_focal, self.group_size], dim=-1))
        weights = scores.gather(-1, rest)
        entries_k, entries_v = (
            torch.cat([take(x, focal), pool(take(x, rest), weights, how="weighted", backend=backend)[..., None, :]], 3)
            for x in (k, v)
        )
        return entries_k.flatten(2, 3), entries_v.flatten(2, 3)

    def prefix_bias(self, num_entries: int, device: torch.device, origin: PerRow = 0) -> Tensor | None:
        """ln(g) on groups with ``rep_bias="log_size"``, 0 on focal entries, which come first in what a prompt left."""
        if self.rep_bias == "none" or self.group_size == 1:
            return None
        entry, period = torch.arange(num_entries, device=device)[None], self.rule.entries
        is_group = entry % period == period - 1
        if isinstance(origin, Tensor) or origin > 0:
            num_focal, ahead = (
                broadcast_rows(x, 2, device) for x in (self.num_focal_of_prompt(origin), self.prompt_entries(origin))
            )
            is_group = torch.where(entry < ahead, entry >= num_focal, (entry - ahead) % period == period - 1)
        return (is_group.double() * math.log(self.group_size))[:, None]

    def read_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, *, scale: float, backend: str
    ) -> Prompt:
        """The paper's prefill (Algorithm 1); see `Method.read_prompt` for shapes."""
        L = k.shape[2]
        tokens = torch.full((k.shape[0],), L) if counts is None else counts
        num_focal = self.num_focal_of_prompt(tokens)
        assert isinstance(num_focal, Tensor)
        if torch.equal(num_focal, tokens):
            return exact_prompt(k, v, tokens)
        scores = self.ranking(q, k, tokens, scale=scale, backend=backend)
        focal = highest(scores, num_focal, tokens).expand(-1, k.shape[1], -1)
        return self.grouped_around(focal, q, k, v, tokens, scale=scale, backend=backend)

    def ranking(self, q: Tensor, k: Tensor, tokens: Tensor, *, scale: float, backend: str) -> Tensor:
        """What ranks the tokens of whole prompts: the highest `num_focal` of each row are focal, ``[B, K|1, L]``.

        q ``[B, H, L, D]`` and k ``[B, K, L, D]`` are right-aligned rows of ``tokens`` (int64 CPU ``[B]``) real tokens.
        """
        if self.focal == "random":
            starts = (tokens - k.shape[2]).to(k.device, non_blocking=True)
            return scramble(torch.arange(k.shape[2], device=k.device) + starts[:, None], self.seed)[:, None]
        return importance(
            q,
            k,
            tokens,
            scale=scale,
            num_recent=self.num_recent,
            num_random=self.num_random,
            seed=self.seed,
            backend=backend,
        )

    def grouped_around(
        self, focal: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *, scale: float, backend: str
    ) -> Prompt:
        """Whole prompts whose focal tokens are chosen, bool ``[B, K, L]``: the others in groups. Else as `ranking`."""
        num_focal = self.num_focal_of_prompt(tokens)
        assert isinstance(num_focal, Tensor)
        return focal_prompt(
            q,
            k,
            v,
            focal,
            num_focal,
            tokens,
            group_size=self.group_size,
            weight_scale=self._weight_scale(scale),
            complementary=self.complementary,
            group_bias=math.log(self.group_size) if self.rep_bias == "log_size" else 0.0,
            backend=backend,
        )

    def num_focal_of_prompt(self, tokens: PerRow) -> PerRow:
        """Focal tokens of prompts of so many tokens: with them the rest fills its groups; none as `prompt_entries`."""
        if self.selection == "streaming":
            return super().num_focal_of_prompt(tokens)
        focal = map_rows(lambda n: min(n, max(self._share(n), self.min_focal)), tokens)
        return focal + (tokens - focal) % self.group_size

    def prompt_entries(self, tokens: PerRow) -> PerRow:
        """Focal tokens and groups; none with ``selection="streaming"``."""
        if self.selection == "streaming":
            return super().prompt_entries(tokens)
        focal = self.num_focal_of_prompt(tokens)
        return focal + (tokens - focal) // self.group_size

    @cached_property
    def _gamma(self) -> tuple[int, int]:
        """``gamma`` as it is written, numerator and denominator."""
        return Fraction(str(self.gamma)).as_integer_ratio()

    def _share(self, count: int) -> int:
        """ceil(gamma * count): 0.55 of 100 is 55, not the 56 of floating point."""
        numerator, denominator = self._gamma
        return -(-numerator * count // denominator)

    def _weight_scale(self, scale: float) -> float:
        return scale if self.weight_scale is None else self.weight_scale

    def _lots(self, first_chunk: PerRow, G: int, c: int, device: torch.device) -> Tensor:
        """A lot per token, int64 ``[B|1, 1, G, c]``, drawn from its chunk's number and the seed alone."""
        number = torch.arange(G, device=device)[None] + broadcast_rows(first_chunk, 2, device)
        return scramble(number[..., None] * c + torch.arange(c, device=device), self.seed)[:, None]
