"""Latent-Condensed attention on ordinary keys and values: the GQA variant (paper, section 5.4)."""

from dataclasses import dataclass
from typing import ClassVar

from condense.methods.grouped import GroupPooling, Summary
from condense.ops import Pooling


@dataclass(frozen=True, kw_only=True)
class LCA(GroupPooling):
    """Latent-Condensed attention: keys (positional) anchored at one token, values (semantic) weighted.

    Weights come from the mean of the newest g queries at the moment a group leaves the window, which is the
    paper's decode rule, used everywhere. See `GroupPooling` for the settings.
    """

    name: ClassVar[str] = "lca"
    summary: Summary = "streaming"
    key_pooling: Pooling = "select"
