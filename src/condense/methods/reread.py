"""Reread: a prompt is read twice, and the tokens that the second reading looked at stay (KVzip, arXiv:2505.23416).

Shapes: B rows, K KV heads, L tokens of a prompt, N layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

import torch
from torch import Tensor

from condense.config import Natural, Positive, Share
from condense.methods.prompt import PromptMethod
from condense.ops.tensors.per_row import PerRow, map_rows


@dataclass(frozen=True, kw_only=True)
class Reread(PromptMethod):
    """The ``share`` of a prompt's tokens that the model needs to repeat it, exact; what follows the prompt all stays.

    The prompt is read with dense attention. Then the model reads it again, in pieces of ``piece`` tokens, as if each
    were repeated behind the prompt: a repeated token sees the first ``sink`` tokens of the prompt, the piece where it
    stands in the prompt, and the repeated tokens up to itself. A token scores by the largest weight that any of these
    queries gives it, for each KV head. The first ``sink`` and the last ``window`` tokens stay, and those with the
    largest scores: equally many for each head of a layer; one ranking over all layers decides how many each keeps.

    For models as they are, and for inference alone: what is kept depends on the whole prompt, which must be read in one
    forward, with a cache; without one nothing is dropped. Until it has been read again, all of it lies in the cache.
    """

    name: ClassVar[str] = "reread"
    instead: ClassVar[str] = "recall"
    share: Share = 0.1
    piece: Positive = 1024
    sink: Natural = 4
    window: Natural = 32

    @property
    def reread(self) -> Self:
        """The method itself."""
        return self

    def for_latents(self, latent_width: int) -> Self:
        """The method itself: latents are one KV head, which scores by all query heads."""
        return self

    def num_kept(self, tokens: int) -> int:
        """Number of tokens that a layer keeps of a prompt of ``tokens`` tokens, on average over the layers."""
        return max(min(tokens, self.sink + self.window), math.ceil(Fraction(str(self.share)) * tokens))

    def num_pairs(self, tokens: int) -> int:
        """Number of keys that queries of the second reading see, summed over these queries; 0 if all tokens stay."""
        if self.num_kept(tokens) == tokens:
            return 0
        pieces = ((start, min(self.piece, tokens - start)) for start in range(0, tokens, self.piece))
        return sum(c * (min(self.sink, start) + c) + c * (c + 1) // 2 for start, c in pieces)

    def chosen(self, scores: Sequence[Tensor], tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tokens that stay, bool ``[B, K, L]`` for each layer, and their number for each head, int64 ``[N, B]``.

        scores: >= 0, ``[B, K, L]`` for each layer, of rows whose first ``tokens`` (int64 CPU ``[B]``) columns are real.
        Each head of a layer ranks its tokens. Place i of a layer is worth the mean, over heads, of the i-th best score;
        the best ``N * num_kept`` places of all layers stay. Ties go to the lower layer and the earlier token.
        """
        device, L = scores[0].device, scores[0].shape[2]
        column, ends = torch.arange(L, device="cpu"), tokens[:, None]
        always = ((column < self.sink) | (column >= ends - self.window))[:, None]
        padding = (column >= ends)[:, None]
        ranked = [
            x.masked_fill(always.to(x.device, non_blocking=True), math.inf)
            .masked_fill(padding.to(x.device, non_blocking=True), -1)
            .sort(dim=2, descending=True, stable=True)
            for x in scores
        ]
        worth = torch.stack([values.mean(1).to(device) for values, _ in ranked], 1)
        order = worth.flatten(1).argsort(descending=True, stable=True)
        numbers = torch.tensor([len(scores) * self.num_kept(n) for n in tokens.tolist()], device=device)
        best = (torch.arange(order.shape[1], device=device) < numbers[:, None]).expand_as(order)
        counts = torch.zeros_like(best).scatter(1, order, best).view_as(worth).sum(2).T.cpu()
        kept = [
            torch.zeros_like(places, dtype=torch.bool).scatter_(
                2, places, (column < count[:, None, None]).to(places.device, non_blocking=True).expand_as(places)
            )
            for (_, places), count in zip(ranked, counts, strict=True)
        ]
        return kept, counts

    def num_entries(self, tokens: PerRow) -> PerRow:
        """Number of tokens that stay in the end, on average over the layers."""
        return map_rows(self.num_kept, tokens)
