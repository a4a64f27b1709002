"""Latent-Condensed Attention, for the latents of MLA and for ordinary keys and values (paper, section 5.4)."""

from dataclasses import dataclass
from typing import ClassVar

from condense.methods.grouped import GroupPooling, Summary
from condense.ops import Pooling


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
