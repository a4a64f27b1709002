"""Methods that read a whole prompt at once, and the entries that are kept of it: all its tokens, or chosen ones.

Shapes: B rows, K KV heads, L tokens, D and Dv widths. Rows are right-aligned: row b is its last ``tokens[b]`` columns.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from condense.methods.base import Context, Method, Prompt, PromptPlan
from condense.methods.layout import FirstEntries, Layout, Lookahead, first_tokens
from condense.ops import RuleSpans, Source, UniformRule
from condense.ops.tensors.per_row import PerRow, broadcast_rows, int_if_equal


@dataclass(frozen=True, kw_only=True)
class PromptMethod(Method):
    """Base of methods that read a prompt at once and pool nothing after it.

    They keep all of it unless they override `read` and `num_entries`.

    instead: methods that do not look ahead, for error messages.
    """

    instead: ClassVar[str]

    @property
    def layout(self) -> Layout:
        """Tokens after the prompt stay as they are."""
        return first_tokens(window=None, kept=0, lookahead=Lookahead(None, self.instead))

    @property
    def reads_prompt(self) -> bool:
        """True, because a prompt's end decides what is kept or seen of it."""
        return True

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """Read the prompt with dense attention, and keep all its tokens."""
        return exact_prompt(k, v, plan.tokens(k.shape[0]))

    def num_entries(self, tokens: PerRow) -> PerRow:
        """The number of entries that stay of a prompt: one for each of its tokens."""
        return tokens


def take(x: Tensor, index: Tensor) -> Tensor:
    """The vectors ``[..., n, D]`` of x ``[..., L, D]`` at ``index`` ``[..., n]``."""
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def highest(scores: Tensor, num_focal: Tensor, tokens: Tensor) -> Tensor:
    """The ``num_focal[b]`` tokens of each row with the highest scores >= 0 ``[B, K, L]``, ties to the earlier."""
    is_chosen = torch.arange(scores.shape[2], device=scores.device) < broadcast_rows(num_focal, 3, scores.device)
    scores = scores.masked_fill(~real_columns(tokens, scores.shape[2], scores.device), -1)
    order = scores.argsort(stable=True, descending=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, order, is_chosen.expand_as(scores))


def exact_prompt(k: Tensor, v: Tensor, tokens: Tensor) -> Prompt:
    """A prompt whose tokens are all focal: plain causal attention, and all tokens are kept as entries."""
    L = k.shape[2]
    start = int_if_equal(tokens) - L
    spans = RuleSpans(UniformRule(chunk=1, window=None, max_chunks=0), start, start)

    def kept() -> tuple[Tensor, Tensor]:
        return kept_tokens(k, v, real_columns(tokens, L, k.device).expand(-1, k.shape[1], -1), int(tokens.max()))

    context = Context((Source(k[:, :, :0], v[:, :, :0]), Source(k, v)), spans)
    return Prompt(context, FirstEntries.of(tokens, tokens), kept)


def kept_tokens(k: Tensor, v: Tensor, kept: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens where kept ``[B, K, L]`` is True, at most ``most`` per row and head, detached."""
    columns = chosen_columns(kept, most)
    return take(k.detach(), columns), take(v.detach(), columns)


def real_columns(tokens: Tensor, L: int, device: torch.device) -> Tensor:
    """Columns that hold real tokens, bool ``[B, 1, L]``."""
    return torch.arange(L, device=device) >= L - broadcast_rows(tokens, 3, device)


def chosen_columns(mask: Tensor, size: int) -> Tensor:
    """The columns where mask ``[B, K, L]`` is True, in order: int64 ``[B, K, size]``, filled up with 0."""
    place = (mask.cumsum(2) - 1).masked_fill(~mask, size)
    column = torch.arange(mask.shape[2], device=mask.device).expand_as(place)
    return place.new_zeros(*mask.shape[:2], size + 1).scatter_(2, place, column)[..., :size]
