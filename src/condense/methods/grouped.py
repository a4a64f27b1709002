"""Groups of g tokens, one entry each: CCA (Chen et al., ICML 2025) and LCA, which differ in defaults only.

Shapes: B rows, K KV heads, N tokens of the window, G groups, D and Dv widths, d_c latent width.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from condense.config import Bits, Natural, Positive
from condense.methods.base import Method
from condense.methods.layout import ChunkPooling, Layout, Lookahead
from condense.ops import Chunks, Pooling, UniformRule, make_entries

Summary = Literal["last", "streaming", "prompt"]
RepBias = Literal["none", "log_size", "matched"]


@dataclass(frozen=True, kw_only=True)
class GroupPooling(Method):
    """Far tokens pooled in groups of ``group_size``; the last ``window`` tokens and groups not closed yet stay exact.

    group_size: tokens per group, >= 1. window: newest tokens that stay exact, >= 0.

    summary: the query that weighs a group. "last": the group's own last one. "streaming": the mean of the newest
    ``num_summary_queries`` when the group leaves the window. "prompt": the mean of the prompt's last
    ``num_summary_queries``, for every group in it; that lets earlier tokens depend on later ones, so it is for
    inference only unless ``allow_future``. num_summary_queries: None stands for ``group_size``.

    key_pooling, value_pooling: "weighted" by the softmax of the group's scores, "mean", "max" per channel or
    "select" the token with the highest score.

    rep_bias: what is added to an entry's score. "none": it weighs as one token, each of its g tokens as 1/g of one;
    "log_size": ln(group_size), as it stands for that many tokens;
    "matched": a number for each entry, by which it weighs for the summary query what the group's tokens weigh together.

    entry_bits: bits per number of an entry: 16 keeps the dtype of the tokens, 8 or 4 round it once, when it is made
    (`condense.ops.EntryFormat`). All queries see the rounded entry; gradients flow as if it had not been rounded.
    """

    group_size: Positive = 16
    window: Natural = 1024
    summary: Summary = "last"
    num_summary_queries: Positive | None = None
    key_pooling: Pooling = "weighted"
    value_pooling: Pooling = "weighted"
    rep_bias: RepBias = "none"
    entry_bits: Bits = 16
    allow_future: bool = False

    @property
    def layout(self) -> Layout:
        """Groups of g behind the window, one entry each.

        With ``summary="last"`` a group is pooled as soon as it is complete, otherwise when it leaves the window,
        because it needs later queries. ``rep_bias="log_size"`` is the version of LCA that the paper's Theorem 1 bounds.
        """
        matched = self.rep_bias == "matched"
        scored = matched or bool({"weighted", "select"} & {self.key_pooling, self.value_pooling})
        num_summary = 1 if self.summary == "last" else self.num_summary_queries or self.group_size
        is_overridden = type(self).represent is not GroupPooling.represent
        looks_ahead = self.summary == "prompt" and scored
        return Layout(
            rule=UniformRule(chunk=self.group_size, window=self.window),
            summary_delay=0 if self.summary == "last" else self.window,
            num_summary=num_summary if scored else 0,
            pooling=None if is_overridden else ChunkPooling(self.key_pooling, self.value_pooling),
            bias=(math.log(self.group_size),) if self.rep_bias == "log_size" else (),
            matched=matched,
            entry_bits=self.entry_bits,
            lookahead=Lookahead(self.allow_future, "summary='streaming'") if looks_ahead else None,
        )

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """One entry per group (CCA Eq. 2 and 3, LCA Eq. 6 to 8): scores, key and value in one pass over the window."""
        pooling, matched = (self.key_pooling, self.value_pooling), self.rep_bias == "matched"
        return make_entries(chunks, summary, pooling, scale=scale, matched=matched, backend=backend)

    def for_latents(self, latent_width: int) -> Method:
        """The method that pools rope keys by ``key_pooling`` and latents by ``value_pooling``.

        A subclass with a `represent` of its own is used as it is, on whole entries.
        """
        if type(self).represent is not GroupPooling.represent:
            return super().for_latents(latent_width)
        return LatentGroups(groups=self, latent_width=latent_width)


@dataclass(frozen=True, kw_only=True)
class LatentGroups(Method):
    """`GroupPooling` on MLA's latents: the first ``latent_width`` channels of an entry ``[c ; k_rope]`` are pooled by
    ``value_pooling``, the others by ``key_pooling``.

    Made by `GroupPooling.for_latents`, never by users, and so without a ``name``.
    """  # fmt: skip

    groups: GroupPooling
    latent_width: int

    def __post_init__(self) -> None:
        """Check no settings: compiled forwards make such methods, and torch.compile cannot trace the checks."""

    @property
    def layout(self) -> Layout:
        """The layout of ``groups``, as for ordinary keys."""
        return self.groups.layout

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """LCA Eq. 6 to 8: one set of scores, from latent and rope key together, for both parts and all heads.

        Chunks of window_k ``[B, 1, N, D]`` and window_v ``[B, 1, N, 0]``; summary ``[B, 1, G, D]``: the mean over heads
        of the absorbed queries. Returns ``[B, 1, G, D]``, ``[B, 1, G, 0]`` and matched biases, if any.
        """
        pooling, matched = (self.groups.key_pooling, self.groups.value_pooling), self.groups.rep_bias == "matched"
        return make_entries(
            chunks, summary, pooling, scale=scale, matched=matched, backend=backend, latent=self.latent_width
        )

    def __str__(self) -> str:
        return str(self.groups)


@dataclass(frozen=True, kw_only=True)
class CCA(GroupPooling):
    """Core Context Aware attention: a group becomes one core token by the weights of its last query.

    The defaults are the paper's (group 16, window 1024, keys and values weighted); see `GroupPooling` for
    the settings. Entries are made per KV head, of keys that the model has rotated already.
    """

    name: ClassVar[str] = "cca"


@dataclass(frozen=True, kw_only=True)
class LCA(GroupPooling):
    """Latent-Condensed attention: keys (positional) anchored at one token, values (semantic) weighted.

    On the latents of MLA, the positional part is the rope key and the semantic part the latent; one set of weights
    and one anchor serve all heads.
    Weights come from the mean of the newest g queries at the moment a group leaves the window, which is the
    paper's decode rule, used everywhere. See `GroupPooling` for the settings.
    """

    name: ClassVar[str] = "lca"
    summary: Summary = "streaming"
    key_pooling: Pooling = "select"
