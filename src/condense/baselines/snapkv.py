"""SnapKV (Li et al., 2024): after the prompt, keep the tokens that its last queries attend to. A baseline: it drops
tokens, and reads the prompt itself with dense attention.

Shapes: B rows, K KV heads, L tokens, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from condense.config import Positive
from condense.methods.base import Prompt, PromptPlan
from condense.methods.layout import FirstEntries
from condense.methods.prompt import PromptMethod, exact_prompt, highest, kept_tokens
from condense.ops import importance
from condense.ops.tensors.per_row import PerRow, map_rows


@dataclass(frozen=True, kw_only=True)
class SnapKV(PromptMethod):
    """Dense attention over the prompt, of which ``budget`` tokens per KV head stay; later tokens all stay.

    The last ``window`` tokens stay. Those before them are ranked by the weights that the last ``window`` queries give
    them, summed over the query heads of the KV head; a token ranks by the largest of the ``kernel_size`` (odd) sums
    around it. The whole prompt must be read in one forward.
    Raises ValueError for a field out of range, or a budget that is not above the window.
    """

    name: ClassVar[str] = "snapkv"
    instead: ClassVar[str] = "streaming_llm or recall"
    budget: Positive = 1024
    window: Positive = 32
    kernel_size: Positive = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget <= self.window:
            raise ValueError(f"budget must be above window {self.window}, got {self.budget}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """Read the prompt with dense attention, and keep the tokens that rank highest."""
        B = k.shape[0]
        tokens = plan.tokens(B)
        prompt = exact_prompt(k, v, tokens)
        if int(tokens.max()) <= self.budget:
            return prompt
        sample = plan.sample(B, self.window, 0, 0, q.device)
        with torch.no_grad():
            before = importance(q, k, sample, scale=scale, backend=backend)[..., : -self.window]
            pooled = F.max_pool1d(before, self.kernel_size, stride=1, padding=self.kernel_size // 2)
            votes = F.pad(pooled, (0, self.window), value=float("inf"))
            counts = self.num_entries(tokens)
            assert isinstance(counts, Tensor)
            kept = highest(votes, counts, tokens)
        first = FirstEntries.of(counts, counts)
        return Prompt(prompt.context, first, lambda: kept_tokens(k, v, kept, int(counts.max())))

    def num_entries(self, tokens: PerRow) -> PerRow:
        """Number of tokens of the prompt that stay."""
        return map_rows(lambda n: min(n, self.budget), tokens)
