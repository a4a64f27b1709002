"""Methods on MLA's latents: how a cache entry ``[c ; k_rope]`` is pooled in its two parts.

Shapes: B rows, G groups of g tokens, d_c latent width, d_r rope width, D = d_c + d_r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from condense.methods.base import Method, PoolsInPlace
from condense.methods.grouped import GroupPooling
from condense.ops import UniformRule, pool_groups
from condense.ops.tensors.per_row import PerRow


def for_latents(method: Method, latent_width: int) -> Method:
    """The method for one KV head whose keys are ``[c ; k_rope]`` and whose values, of width 0, are part of the keys.

    Methods that treat all channels alike are the same there: a kept token stands for itself, and a group of DGA is
    the weighted mean of its whole entries. Raises ValueError for a method that reads prompts at once, since heads
    share one summary query there.
    """
    if method.reads_prompt:
        raise ValueError(
            f"{method} chooses a prompt's tokens by each head's own queries, which latents (MLA) do not keep apart: "
            f"use {method.causal_setting}"
        )
    return LatentGroups(groups=method, latent_width=latent_width) if isinstance(method, GroupPooling) else method


@dataclass(frozen=True, kw_only=True)
class LatentGroups(PoolsInPlace):
    """`GroupPooling` that pools the first ``latent_width`` channels by value_pooling, the others by key_pooling.

    A view, made by `for_latents` where a model's latents are known: no setting of the user's, so without a name.
    """

    groups: GroupPooling
    latent_width: int

    @property
    def rule(self) -> UniformRule:
        """As for ordinary keys."""
        return self.groups.rule

    @property
    def summary_delay(self) -> int:
        """As for ordinary keys."""
        return self.groups.summary_delay

    @property
    def num_summary(self) -> int:
        """As for ordinary keys."""
        return self.groups.num_summary

    @property
    def looks_ahead(self) -> bool:
        """As for ordinary keys."""
        return self.groups.looks_ahead

    @property
    def permits_future(self) -> bool:
        """As for ordinary keys."""
        return self.groups.permits_future

    def prefix_bias(self, num_entries: int, device: torch.device, origin: PerRow = 0) -> Tensor | float | None:
        """As for ordinary keys."""
        return self.groups.prefix_bias(num_entries, device, origin)

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
        """LCA Eq. 6 to 8: one set of scores, from latent and rope key together, for both parts and all heads.

        window_k ``[B, 1, N, D]``, window_v ``[B, 1, N, 0]``, summary ``[B, 1, G, D]``: the mean over heads of the
        absorbed queries. Latents are pooled as the values of their own keys: ``[B, 1, G, D]`` and ``[B, 1, G, 0]``.
        """
        d_c = self.latent_width
        positional, semantic = pool_groups(
            window_k,
            window_k[..., :d_c],
            summary,
            start=start,
            num_groups=num_chunks,
            group_size=self.groups.group_size,
            scale=scale,
            key_pooling=self.groups.key_pooling,
            value_pooling=self.groups.value_pooling,
            backend=backend,
        )
        return torch.cat([semantic, positional[..., d_c:]], dim=-1), window_v[:, :, :num_chunks]

    def __str__(self) -> str:
        return str(self.groups)
