"""What a method is: the rule of who sees what, and how a chunk of tokens becomes prefix entries.

A new method is one file in this folder: a frozen dataclass derived from `Method` with a ``name``.
Training, prefill, chunked prefill, decode, caches and Hugging Face models work with it unchanged.

Shapes: B rows, K KV heads, N band tokens, G chunks of c tokens, p entries per chunk, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from condense.config import MethodConfig, method_from_dict
from condense.ops import Pooling, Source, Spans, UniformRule
from condense.ops.tensors.per_row import PerRow
from condense.ops.tensors.right_aligned import chunks


class Prompt(NamedTuple):
    """What a method makes of a whole prompt at once: all that its queries attend to, and the entries that stay.

    entries_k ``[B, K, E, D]``, entries_v ``[B, K, E, Dv]``, window_k ``[B, K, N, D]``, window_v ``[B, K, N, Dv]``,
    bounds and prefix_bias (``[B|1, K|1, E]`` or None) are those of `condense.ops.attend`. kept: makes the keys and
    values that stand for the prompt afterwards, detached, left-aligned per row, in the order of `Method.prefix_bias`.
    """

    sources: tuple[Source, Source]
    spans: Spans
    kept: Callable[[], tuple[Tensor, Tensor]]


class ChunkPooling(NamedTuple):
    """A method's `Method.represent` as data, for kernels.

    key, value: how a chunk's tokens become its last entry. num_focal: those with the highest scores, ties to the
    earlier, are not pooled but entries of their own, ahead of it and in order of position. weight_scale: scale of the
    scores, None: attention's.
    """

    key: Pooling
    value: Pooling
    num_focal: int = 0
    weight_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Method(MethodConfig):
    """Base of all methods. The defaults describe a method that keeps no representatives."""

    @property
    def rule(self) -> UniformRule:
        """The three numbers that say who sees what."""
        raise TypeError(f"{type(self).__name__} must define `rule`")

    @property
    def summary_delay(self) -> int:
        """Tokens after a chunk's last one until its entries can be made; at most the rule's window."""
        return 0

    @property
    def num_summary(self) -> int:
        """Queries, ending ``summary_delay`` tokens after a chunk's last, whose mean weighs it; 0: none needed."""
        return 0

    @property
    def looks_ahead(self) -> bool:
        """True if entries of a prompt depend on queries after the tokens that see them (inference only)."""
        return False

    @property
    def permits_future(self) -> bool:
        """True if the user consents to gradients through a method that looks ahead."""
        return False

    @property
    def causal_setting(self) -> str:
        """For a method that looks ahead: the setting with which it does not, as errors name it."""
        return "summary='streaming'"

    @property
    def pooling(self) -> ChunkPooling | None:
        """How a chunk becomes its entries, if that says all of `represent`, else None.

        `prefix_bias` is then 0 for entries that are tokens of their own and one number for the pooled ones.
        """
        stands_for_itself = self.rule.chunk == self.rule.entries == 1 and type(self).represent is Method.represent
        return ChunkPooling("mean", "mean") if stands_for_itself else None

    def represent(
        self, k: Tensor, v: Tensor, summary: Tensor | None, *, first_chunk: PerRow, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Prefix entries of G chunks: ``[B, K, G * p, D]`` and ``[B, K, G * p, Dv]`` in the dtype of k and v.

        k ``[B, K, G, c, D]``, v ``[B, K, G, c, Dv]``; summary ``[B, K, G, D]`` float32 or wider, None if
        `num_summary` is 0; first_chunk: the number of each row's first chunk, an int or, where they differ, int64
        ``[B]``. By default each token stands for itself. On the latents of MLA, K is 1, k is ``[c ; k_rope]`` and Dv
        is 0 (`condense.latent`).
        """
        return k.flatten(2, 3), v.flatten(2, 3)

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
        """`represent` of the chunks that stand one after another in the band from column ``start`` on.

        window_k ``[B, K, N, D]``, window_v ``[B, K, N, Dv]``, start an int or int64 CPU ``[B]``. This is what
        `condense.functional` calls; a method whose kernels find the chunks themselves overrides it and saves the
        copy that rows of different lengths need.
        """
        k, v = (chunks(x, start, num_chunks, self.rule.chunk) for x in (window_k, window_v))
        return self.represent(k, v, summary, first_chunk=first_chunk, scale=scale, backend=backend)

    def prefix_bias(self, num_entries: int, device: torch.device, origin: PerRow = 0) -> Tensor | float | None:
        """Additive bias on the scaled scores of prefix entries: one for all, float64 ``[B|1, 1, num_entries]`` or None.

        origin: tokens per row that `read_prompt` took, whose entries come first, an int or int64 CPU ``[B]``.
        """
        return None

    @property
    def reads_prompt(self) -> bool:
        """True if a row's first tokens are a prompt that is read all at once, by `read_prompt`."""
        return False

    def read_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, *, scale: float, backend: str
    ) -> Prompt:
        """All of a prompt at once, where `reads_prompt`. Later tokens' chunks count from the prompt's end.

        q ``[B, H, L, D]``, k ``[B, K, L, D]`` and v ``[B, K, L, Dv]`` are right-aligned, k and v zero in the padding;
        counts int64 CPU ``[B]``: real tokens per row (None: all).
        """
        raise TypeError(f"{type(self).__name__} must define `read_prompt`")

    def prompt_entries(self, tokens: PerRow) -> PerRow:
        """Entries that `read_prompt` keeps of prompts of so many tokens, both an int or int64 CPU ``[B]``."""
        return tokens * 0

    def num_focal_of_prompt(self, tokens: PerRow) -> PerRow:
        """Those of `prompt_entries` that are tokens of their own; they come first. Arguments as there."""
        return tokens * 0

    @classmethod
    def parse(cls, settings: Self | dict[str, object]) -> Method:
        """A method from itself or its `to_dict` form. Raises ValueError for anything else."""
        method = method_from_dict(settings) if isinstance(settings, dict) else settings
        if not isinstance(method, Method):
            raise ValueError(f"method must be a condense method such as condense.CCA(), got {method!r}")
        return method


class PoolsInPlace(Method):
    """Base of methods whose `represent_band` makes entries from the band itself; `represent` takes it from there."""

    def represent(
        self, k: Tensor, v: Tensor, summary: Tensor | None, *, first_chunk: PerRow, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Chunks laid one after another are a band; see `Method.represent` for shapes."""
        return self.represent_band(
            k.flatten(2, 3),
            v.flatten(2, 3),
            0,
            k.shape[2],
            summary,
            first_chunk=first_chunk,
            scale=scale,
            backend=backend,
        )


def check_trainable(method: Method) -> None:
    """Raise ValueError if gradients may not flow through ``method``: it looks ahead, and nobody consented."""
    if method.looks_ahead and not method.permits_future:
        raise ValueError(
            f"{method} lets tokens depend on later ones, so it is for inference under torch.no_grad(); train with "
            f"{method.causal_setting} or pass allow_future=True"
        )
