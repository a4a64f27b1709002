"""Groups of g tokens, one representative each: what CCA and LCA share. They differ in defaults only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from condense.config import check_bool, check_choice, check_int
from condense.methods.base import ChunkPooling, PoolsInPlace
from condense.ops import POOLINGS, Pooling, UniformRule, pool_groups
from condense.ops.tensors.per_row import PerRow

Summary = Literal["last", "streaming", "prompt"]
RepBias = Literal["none", "log_size"]


@dataclass(frozen=True, kw_only=True)
class GroupPooling(PoolsInPlace):
    """Far tokens pooled in groups of ``group_size``, the last ``window`` tokens and the open group exact.

    group_size: tokens per group, >= 1. window: exact local tokens, >= 0.
    summary: whose query weighs a group. "last": the group's own last. "streaming": the mean of the last
    ``num_summary_queries`` when the group leaves the window. "prompt": the mean of the last ones of the whole
    prompt, for every group in it; that lets earlier tokens depend on later ones, so it is for inference only
    unless ``allow_future``.
    num_summary_queries: for "streaming" and "prompt"; None stands for ``group_size``.
    key_pooling, value_pooling: "weighted" by the softmax of the group's scores, "mean", "max" per channel or
    "select" the token with the highest score.
    rep_bias: "log_size" adds ln(group_size) to a representative's score, as it stands for that many tokens.
    Raises ValueError for a field out of range.
    """

    group_size: int = 16
    window: int = 1024
    summary: Summary = "last"
    num_summary_queries: int | None = None
    key_pooling: Pooling = "weighted"
    value_pooling: Pooling = "weighted"
    rep_bias: RepBias = "none"
    allow_future: bool = False

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 1)
        check_int("window", self.window, 0)
        check_choice("summary", self.summary, ("last", "streaming", "prompt"))
        if self.num_summary_queries is not None:
            check_int("num_summary_queries", self.num_summary_queries, 1)
        check_choice("key_pooling", self.key_pooling, POOLINGS)
        check_choice("value_pooling", self.value_pooling, POOLINGS)
        check_choice("rep_bias", self.rep_bias, ("none", "log_size"))
        check_bool("allow_future", self.allow_future)

    @property
    def rule(self) -> UniformRule:
        """Groups of g behind the window, one entry each."""
        return UniformRule(chunk=self.group_size, window=self.window)

    @property
    def summary_delay(self) -> int:
        """A group's last query is at hand at once; the others come when the group leaves the window."""
        return 0 if self.summary == "last" else self.window

    @property
    def num_summary(self) -> int:
        """Queries in the summary, 0 if neither pooling looks at scores."""
        if not self._needs_scores:
            return 0
        return 1 if self.summary == "last" else self.num_summary_queries or self.group_size

    @property
    def looks_ahead(self) -> bool:
        """The prompt summary uses queries of the prompt's end."""
        return self.summary == "prompt" and self._needs_scores

    @property
    def permits_future(self) -> bool:
        """``allow_future``."""
        return self.allow_future

    @property
    def pooling(self) -> ChunkPooling | None:
        """``key_pooling`` and ``value_pooling``, unless a subclass has a `represent` of its own."""
        if type(self).represent is not GroupPooling.represent:
            return None
        return ChunkPooling(self.key_pooling, self.value_pooling)

    @property
    def _needs_scores(self) -> bool:
        return bool({"weighted", "select"} & {self.key_pooling, self.value_pooling})

    def represent_band(
        self,
        window_k: Tensor,
        window_v: Tensor,
        start: PerRow,
        num_chunks: int,
        summary: Tensor | None,
        *,
        first_chunk: PerRow,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        """One entry per group (CCA Eq. 2 and 3, LCA Eq. 6 to 8): scores, key and value in one pass over the band."""
        return pool_groups(
            window_k,
            window_v,
            summary,
            start=start,
            num_groups=num_chunks,
            group_size=self.group_size,
            scale=scale,
            key_pooling=self.key_pooling,
            value_pooling=self.value_pooling,
            backend=backend,
        )

    def prefix_bias(self, num_entries: int, device: torch.device, origin: PerRow = 0) -> Tensor | float | None:
        """ln(g) on every representative with ``rep_bias="log_size"`` (LCA, the version Theorem 1 bounds)."""
        if self.rep_bias == "none" or self.group_size == 1:
            return None
        return math.log(self.group_size)
