"""The base class of methods: a layout, and how a chunk of tokens becomes entries.

A new method is one file in this folder: a frozen dataclass derived from `Method` with a ``name``.

Shapes: B rows, H query heads, K KV heads, L new tokens, N tokens of the window, G chunks of c tokens, p entries per
chunk, D and Dv widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from condense import config
from condense.methods.layout import NO_FIRST, FirstEntries, Layout, check_layout
from condense.ops import NO_EXTRAS, Chunks, Extras, Source, Spans, StepSettings, attend
from condense.ops.latents import Ranks, UpProjection
from condense.ops.recall import GroupMeans
from condense.ops.spans import entry_bias
from condense.ops.tensors.per_row import PerRow, broadcast_rows
from condense.ops.tensors.sampling import Sample

if TYPE_CHECKING:
    from condense.methods.reread import Reread

_OWN = ("condense.methods.", "condense.baselines.")  # packages whose methods keep their names


class Context(NamedTuple):
    """The sources that queries attend to, and their spans.

    sources: the condensed entries first, the window last; spans: one per source. extra: the method's own tensors, which
    its `Method.represent` made for its `Method.attend`; empty until the first chunk has closed. means: means of values
    (with latents, of whole keys), which stand for groups that `condense.Recall` does not open; None in other methods.
    is_latent: the tokens are latents (MLA), and ``extra`` holds latents. projection: the up-projections of latents, if
    the sources are keys and values that were expanded from them; else None. ranks: the processes over which heads of
    latents are spread, None for one process.
    """

    sources: tuple[Source, ...]
    spans: Spans
    extra: tuple[Tensor, ...] = ()
    means: GroupMeans | None = None
    is_latent: bool = False
    projection: UpProjection | None = None
    ranks: Ranks | None = None

    @property
    def entries(self) -> Source:
        """The first source, the condensed one."""
        return self.sources[0]

    @property
    def window(self) -> Source:
        """The last source, exact tokens."""
        return self.sources[-1]


class Prompt(NamedTuple):
    """A prompt that a method has read at once: the context of the prompt's queries, and the entries for later tokens.

    first: how many entries stand for the prompt from then on. kept: returns the keys and values of these entries, and
    tensors of the method's own, as `Method.represent` does, detached and left-aligned per row.
    """

    context: Context
    first: FirstEntries
    kept: Callable[[], tuple[Tensor, ...]]


class PromptPlan(Protocol):
    """The part of `condense.plan.ForwardPlan` that `Method.read` uses."""

    def tokens(self, num_rows: int) -> Tensor:
        """Real tokens per row, int64 CPU ``[B]``."""

    def sample(self, num_rows: int, num_recent: int, num_random: int, seed: int, device: torch.device) -> Sample:
        """Queries sampled from the prompt, by `condense.ops.tensors.sampling.sample_queries`."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods, which may override `layout`, `represent`, `attend` and `for_latents`; `read` and
    `num_entries` if it `reads_prompt`.

    Its fields are settings; a value that its field's type does not allow raises ValueError (`condense.config`). A
    subclass with a ``name`` is saved and loaded by that name.
    A subclass with its own `attend` also overrides `check_attention` and `check_context` if this refuses arguments, and
    `check_gradients` if it cannot be trained.
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not vars(cls).get("name"):
            return
        known = config.REGISTRY.get(cls.name)
        if known is not None and known.__module__ != cls.__module__ and known.__module__.startswith(_OWN):
            raise ValueError(f"name must differ from those of the library's methods, got {cls.name!r} of {cls}")
        config.REGISTRY[cls.name] = cls

    def __post_init__(self) -> None:
        config.check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``{"method": name, **fields}``."""
        return {"method": self.name, **dataclasses.asdict(self)}

    def replace(self, **changes: Any) -> Self:
        """The same method with some fields changed; all fields are checked again."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def layout(self) -> Layout:
        """The tokens that a query sees one by one, those that it sees as entries, and when entries are made."""
        raise TypeError(f"{type(self).__name__} must define `layout`")

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """Entries of G chunks: keys ``[B, K, G * p, D]`` and values ``[B, K, G * p, Dv]`` in the dtype of the tokens.

        summary ``[B, K, G, D]`` float32 or wider, None if the layout's ``num_summary`` is 0. Further tensors
        ``[B, K, G * n, ...]`` are kept beside the entries, n per chunk, for `attend`; if the layout is ``matched``,
        the first of these holds the entries' biases, float32 or wider ``[B, K, G * p, 1]``. By default every token is
        its own entry. On the latents of MLA, K is 1, a token's key is ``[c ; k_rope]`` and Dv is 0 (`condense.latent`).
        The caller rounds the keys and values as the layout's ``entry_bits`` say.
        """
        k, v = chunks.tokens()
        return k.flatten(2, 3), v.flatten(2, 3)

    @property
    def reads_prompt(self) -> bool:
        """True if `read` reads a whole prompt at once, False if prompts are read like other tokens."""
        return False

    def read(self, q: Tensor, k: Tensor, v: Tensor, plan: PromptPlan, *, scale: float, backend: str) -> Prompt:
        """Read a whole prompt: q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``, right-aligned, k and v 0 in
        padding. Chunks of later tokens are counted from the prompt's end.
        """
        raise TypeError(f"{type(self).__name__} must define `read`")

    def num_entries(self, tokens: PerRow) -> PerRow:
        """Number of entries that `read` keeps of prompts of ``tokens`` tokens, both an int or int64 CPU ``[B]``."""
        raise TypeError(f"{type(self).__name__} must define `num_entries`")

    @property
    def reread(self) -> Reread | None:
        """The second reading of prompts, which decides the tokens that stay; None: all stay after one reading."""
        return None

    @property
    def as_steps(self) -> Method:
        """The method that reads a prompt as this one's decode steps read single tokens; itself if both are the same.

        With it one forward measures what decoding token by token loses.
        """
        return self

    def of_layer(self, *, is_first: bool, has_latents: bool) -> Method:
        """The method of one layer if this one is given for a whole model. is_first: the first layer that can be
        condensed. has_latents: a layer that caches latents (MLA). Errors of a layer name the class of its method alone,
        because its settings may not be those that the user gave.
        """
        return self

    @property
    def reads_packed(self) -> bool:
        """True if one call reads all documents packed into a row, False if each document needs a call of its own.

        Methods that read a prompt at once, override `attend`, or have coarse entries take a row as one document.
        """
        return not self.reads_prompt and type(self).attend is Method.attend and self.layout.coarse is None

    @property
    def has_step(self) -> bool:
        """True if the decode step of kernels and static caches computes `attend`.

        That step attends as `condense.ops.attend` does, so a method that overrides `attend` has none unless it says so:
        its single tokens go to `attend`, over a cache that grows.
        """
        return type(self).attend is Method.attend

    def attend(
        self,
        q: Tensor,
        context: Context,
        *,
        scale: float,
        dropout_p: float = 0.0,
        backend: str = "auto",
        return_lse: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q ``[B, H, L, D]`` over the context; arguments and results as in `condense.ops.attend`."""
        sources, spans, *_ = context
        return attend(
            q, sources, spans, scale=scale, dropout_p=dropout_p, backend=backend, return_lse=return_lse, extras=extras
        )

    def check_attention(self, *, scale: float, dropout_p: float, extras: Extras = NO_EXTRAS) -> None:
        """Raise ValueError if `attend` does not support these arguments; models ask before they store any token."""

    def check_context(self, q: Tensor, context: Context) -> None:
        """Raise ValueError if `attend` has no gradients of queries ``[B, H, L, D]`` and of what they attend to.

        Called if one of these requires a gradient, before any token is kept.
        """

    def check_gradients(self) -> None:
        """Raise ValueError if `attend` gives no gradients with these settings; training asks before its first step."""

    def for_latents(self, latent_width: int) -> Method:
        """The method for MLA: one KV head with keys ``[c ; k_rope]``, values (of width 0) being part of the keys.

        By default the method itself, which is right if it treats all channels of a key alike. Raises ValueError for a
        method that reads prompts at once: it needs a summary query per head, and latents have one for all heads.
        """
        if self.reads_prompt:
            assert self.layout.lookahead is not None
            raise ValueError(
                f"{self} chooses a prompt's tokens by each head's own queries, which latents (MLA) do not keep apart: "
                f"use {self.layout.lookahead.causal_setting}"
            )
        return self

    @classmethod
    def parse(cls, settings: Self | dict[str, object] | str) -> Method:
        """A method from itself, its `to_dict` form or text: ``"recall-host"`` (`condense.named`), ``"cca:window=512"``.

        Raises ValueError for anything else, and for a `layout` that no method can have; TypeError without one.
        """
        method: object = settings
        if isinstance(settings, dict):
            method = config.method_from_dict(settings)
        elif isinstance(settings, str):
            method = config.method_from_text(settings)
        if not isinstance(method, Method):
            raise ValueError(f"method must be a condense method such as condense.Recall(), got {method!r}")
        check_layout(method.layout)
        if method.reads_prompt and (method.layout.lookahead is None or method.layout.entry_bits < 16):
            raise ValueError(
                f"layout: a method that reads a prompt at once must have a lookahead, as its entries depend on the "
                f"prompt's end, and entry_bits=16, got {method.layout} of {method}"
            )
        return method


def check_trainable(method: Method) -> None:
    """Raise ValueError if ``method`` looks ahead and ``allow_future`` is not set: it must not be trained then."""
    lookahead = method.layout.lookahead
    if lookahead is not None and not lookahead.permitted:
        instead = lookahead.causal_setting + ("" if lookahead.permitted is None else " or pass allow_future=True")
        name = str(method).partition("(")[0]  # a method made for latents prints as the one that the user gave
        raise ValueError(
            f"{name} lets tokens depend on later ones, so it is for inference under torch.no_grad(); train with "
            f"{instead}"
        )


def split_bias(
    method: Method, entries: tuple[Tensor, ...], first: FirstEntries = NO_FIRST
) -> tuple[Tensor | float | None, tuple[Tensor, ...]]:
    """The bias of all entries, as in `condense.ops.Source`, and the method's own tensors except for matched biases.

    entries, first: as in `condense.state.LayerState`.
    """
    k, _, *extra = entries
    if method.layout.matched and extra:
        return extra[0][..., 0], tuple(extra[1:])
    if not any(method.layout.bias):
        return None, tuple(extra)
    count, single = (broadcast_rows(x, 2, k.device) for x in first)
    numbers = (count, single) if first.exist else None
    return entry_bias(method.layout.bias, k.shape[2], k.device, numbers), tuple(extra)


def step_settings(method: Method) -> StepSettings:
    """The method's settings as `condense.ops.decode_step` takes them."""
    layout = method.layout
    key, value, num_focal = layout.pooling or (None, None, 0)
    return StepSettings(
        layout.rule, layout.summary_delay, layout.num_summary, key, value, layout.bias, num_focal,
        has_first=method.reads_prompt, matched=layout.matched, entry_bits=layout.entry_bits,
        choice=layout.choice, coarse=layout.coarse,
    )  # fmt: skip
