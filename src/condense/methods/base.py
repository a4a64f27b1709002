"""What a method is: a layout, and how a chunk of tokens becomes entries.

A new method is one file in this folder: a frozen dataclass derived from `Method` with a ``name``.
Training, prefill, chunked prefill, decode, caches and Hugging Face models work with it unchanged.

Shapes: B rows, H query heads, K KV heads, L new tokens, N tokens of the window, G chunks of c tokens, p entries per
chunk, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from condense.config import MethodConfig, method_from_dict
from condense.methods.layout import Layout
from condense.ops import Chunks, Source, Spans, StepSettings, attend
from condense.ops.tensors.per_row import PerRow, broadcast_rows
from condense.ops.tensors.sampling import Sample


class Context(NamedTuple):
    """All that attention reads besides the queries.

    sources: the condensed entries first, the window last; spans: one per source. extra: tensors of the method's own, as
    its `Method.represent` made them, for its `Method.attend`.
    """

    sources: tuple[Source, ...]
    spans: Spans
    extra: tuple[Tensor, ...] = ()

    @property
    def entries(self) -> Source:
        """The first source, the condensed one."""
        return self.sources[0]

    @property
    def window(self) -> Source:
        """The last source, exact tokens."""
        return self.sources[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values of all sources, source by source."""
        return tuple(x for source in self.sources for x in (source.k, source.v))


class Prompt(NamedTuple):
    """What a method makes of a whole prompt at once: what its queries attend to, and the entries that stay.

    kept: makes the keys and values that stand for the prompt afterwards, detached, left-aligned per row; those that are
    tokens of their own (`PromptReader.num_focal`) come first.
    """

    context: Context
    kept: Callable[[], tuple[Tensor, Tensor]]


class PromptReader(Protocol):
    """How a method reads a whole prompt at once, where it does. Later tokens' chunks count from the prompt's end."""

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """A prompt q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``; right-aligned, k and v 0 in padding."""
        ...

    def num_entries(self, tokens: PerRow) -> PerRow:
        """Entries that are kept of prompts of so many tokens, both an int or int64 CPU ``[B]``."""
        ...

    def num_focal(self, tokens: PerRow) -> PerRow:
        """Those of `num_entries` that are tokens of their own. Arguments as there."""
        ...


class PromptPlan(Protocol):
    """What reading a prompt asks of `condense.plan.ForwardPlan`."""

    def tokens(self, num_rows: int) -> Tensor:
        """Real tokens per row, int64 CPU ``[B]``."""
        ...

    def sample(self, num_rows: int, num_recent: int, num_random: int, seed: int, device: torch.device) -> Sample:
        """See `condense.ops.tensors.sampling.sampled_queries`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Method(MethodConfig):
    """Base of all methods: `layout`, `represent`, `prompt`, `attend` and `for_latents` are all that one can say."""

    @property
    def layout(self) -> Layout:
        """Who sees what, and when entries are made."""
        raise TypeError(f"{type(self).__name__} must define `layout`")

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """Entries of G chunks: keys ``[B, K, G * p, D]`` and values ``[B, K, G * p, Dv]`` in the dtype of k and v.

        summary ``[B, K, G, D]`` float32 or wider, None if the layout's ``num_summary`` is 0. Further tensors
        ``[B, K, G * n, ...]`` are kept beside the entries, n per chunk, for `attend`. By default each token stands for
        itself. On the latents of MLA, K is 1, k is ``[c ; k_rope]`` and Dv is 0 (`condense.latent`).
        """
        k, v = chunks.tokens()
        return k.flatten(2, 3), v.flatten(2, 3)

    @property
    def prompt(self) -> PromptReader | None:
        """How a whole prompt is read at once, None for a method that reads it as any other tokens."""
        return None

    def attend(
        self,
        q: Tensor,
        context: Context,
        *,
        scale: float,
        dropout_p: float = 0.0,
        backend: str = "auto",
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q ``[B, H, L, D]`` over the context: `condense.ops.attend`, which see."""
        return attend(
            q,
            context.sources,
            context.spans,
            scale=scale,
            dropout_p=dropout_p,
            backend=backend,
            return_lse=return_lse,
        )

    def for_latents(self, latent_width: int) -> Method:
        """The method for one KV head with keys ``[c ; k_rope]``, whose values, of width 0, are part of the keys.

        Methods that treat all channels alike are the same there: a kept token stands for itself, and a group of DGA is
        the weighted mean of its whole entries. Raises ValueError for a method that reads prompts at once, since heads
        share one summary query there.
        """
        if self.prompt is not None:
            assert self.layout.lookahead is not None
            raise ValueError(
                f"{self} chooses a prompt's tokens by each head's own queries, which latents (MLA) do not keep apart: "
                f"use {self.layout.lookahead.causal_setting}"
            )
        return self

    @classmethod
    def parse(cls, settings: Self | dict[str, object]) -> Method:
        """A method from itself or its `to_dict` form. Raises ValueError for anything else."""
        method = method_from_dict(settings) if isinstance(settings, dict) else settings
        if not isinstance(method, Method):
            raise ValueError(f"method must be a condense method such as condense.CCA(), got {method!r}")
        return method


def check_trainable(method: Method) -> None:
    """Raise ValueError if gradients may not flow through ``method``: it looks ahead, and nobody consented."""
    lookahead = method.layout.lookahead
    if lookahead is not None and not lookahead.permitted:
        raise ValueError(
            f"{method} lets tokens depend on later ones, so it is for inference under torch.no_grad(); train with "
            f"{lookahead.causal_setting} or pass allow_future=True"
        )


def entry_bias(
    method: Method, num_entries: int, device: torch.device, prompt_tokens: PerRow = 0
) -> Tensor | float | None:
    """Bias of a source's entries after prompts of so many tokens: a number, or float64 ``[B|1, 1, num_entries]``.

    The entries of a prompt that was read at once come first: its tokens of their own without bias, its groups with the
    bias of a chunk's last entry.
    """
    bias, reader = method.layout.bias, method.prompt
    if not any(bias):
        return None
    has_prompt = reader is not None and (isinstance(prompt_tokens, Tensor) or prompt_tokens > 0)
    if len(set(bias)) == 1 and not has_prompt:
        return bias[0]
    entry, period = torch.arange(num_entries, device=device)[None], len(bias)
    # from pageable memory: staged before the call returns, and no wait for the GPU
    values = torch.tensor(bias, dtype=torch.float64).to(device, non_blocking=True)
    if not has_prompt:
        return values[entry % period][:, None]
    assert reader is not None
    num_focal, num_prompt = (
        broadcast_rows(x, 2, device) for x in (reader.num_focal(prompt_tokens), reader.num_entries(prompt_tokens))
    )
    of_prompt = torch.where(entry >= num_focal, values[-1], 0.0)
    return torch.where(entry < num_prompt, of_prompt, values[(entry - num_prompt) % period])[:, None]


def step_settings(method: Method) -> StepSettings:
    """The method as `condense.ops.decode_step` wants it."""
    layout = method.layout
    fixed = (layout.rule, layout.summary_delay, layout.num_summary)
    if layout.pooling is None:
        return StepSettings(*fixed, None, None, 0.0, reads_prompt=method.prompt is not None)
    bias = layout.bias[-1] if layout.bias else 0.0
    key, value, num_focal, weight_scale = layout.pooling
    return StepSettings(*fixed, key, value, bias, num_focal, weight_scale, reads_prompt=method.prompt is not None)
