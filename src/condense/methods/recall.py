"""Recall: exact tokens of closed groups stay in a store, and each query opens the few groups that matter to it.

After Quest, ArkVale, InfLLM and NSA; no training needed. Defined in `docs/methods.md`.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, D and Dv widths.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from condense.config import Bits, Natural, Positive, Share
from condense.methods.base import Context, Method
from condense.methods.layout import MEANS, Layout, Lookahead
from condense.methods.reread import Reread
from condense.ops import NO_EXTRAS, ChoiceSettings, Chunks, Extras, RuleSpans, Source, Spans, StoreSettings, UniformRule
from condense.ops.api import attend, attend_recall, keep_groups, unpack_store
from condense.ops.recall import Askers, GroupIndex, IndexChoice, Quota, RecallSources, StoreFormat
from condense.ops.tensors.per_row import max_row


@dataclass(frozen=True, kw_only=True)
class Recall(Method):
    """The last ``window`` tokens exact; of the groups behind them, each query opens the ``num_recall`` that matter.

    Open groups are seen token by token, all others together as one token more: it weighs as much as their tokens would
    if each had the centre of its group's keys, and its value is the mean of the values so far. So every past token is
    seen once. While no more than ``num_recall`` groups are closed this is dense attention.

    group_size: tokens per group, >= 1. window: newest tokens that stay exact, >= 0. num_recall: groups that a query
    opens: a number >= 2, or a share of the closed groups, above 0 and at most 1.0 (all), rounded up, which grows with
    the text; 1 is refused, because programs that write JSON make it of 1.0. min_recall: the least groups that a share
    opens, where as many are closed, >= 0. Query heads that share a KV head open the same groups. Where one method is
    given for all layers of a model, its first layer opens all groups and those that cache latents twice as many
    (`of_layer`).

    A group's score for a query is the largest of its tokens' scores, which are estimated from an index. The index holds
    the centre of the group's keys after a fixed rotation, in 4 bits per number, and for each key the signs of its
    difference from the centre and a step (`condense.ops.recall.index`).

    unchosen: what queries see of groups that are not open: "mean", that one token, or "drop", nothing (as in Quest).
    Gradients flow through the token's value, not through its weight.

    prompt: how a call reads several tokens (a prompt, a piece of one, a later turn). "recall": as it reads single ones.
    "exact": with dense attention, so a prompt loses only what ``store_bits`` rounds and takes as long as with dense
    attention. "shared": one query chooses, with ``min_recall`` halved, for itself and all that follow until two more
    groups have closed; the last 64 choose for themselves. Given for all layers of a model, it means "exact" in layers
    that cache latents. With "exact" and "shared" prompts and decode steps are not the same function: not for training,
    nor for assisted decoding. `as_steps` is the method that reads several tokens as steps do.

    store: where caches keep the exact tokens of closed groups: "device", or "host", in pinned host memory. slots: for
    "host", how many groups per KV head and row that were open lately are kept on the device too, >= 0; a cache with
    room for fewer groups has as many slots. store_bits: 16 keeps these tokens as they are, 8 or 4 quantise a group when
    it closes; not for training.

    keep: the share of a prompt's tokens that stay, those that the model needs to repeat it (`Reread`, whose ``share``
    it is; the last ``window`` tokens are among them). Groups are made of the tokens that stay. Below 1 the prompt comes
    in one forward, with a cache, and is read with dense attention (``prompt="exact"``). Not for training.
    """

    name: ClassVar[str] = "recall"
    group_size: Positive = 16
    window: Natural = 1024
    num_recall: int | float = 0.125
    min_recall: Natural = 1024
    unchosen: Literal["mean", "drop"] = "mean"
    prompt: Literal["recall", "exact", "shared"] = "recall"
    store: Literal["device", "host"] = "device"
    slots: Natural = 64
    store_bits: Bits = 16
    keep: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1 and self.prompt != "exact":
            raise ValueError(
                f"keep below 1 is for prompts that are read densely: use prompt='exact', or keep=1, got {self}"
            )
        is_number = isinstance(self.num_recall, int) and self.num_recall >= 2
        if not is_number and not (isinstance(self.num_recall, float) and 0 < self.num_recall <= 1):
            raise ValueError(
                "num_recall must be an integer >= 2, or a share of the groups above 0 and at most 1.0 (all), got "
                f"{self.num_recall!r}"
            )
        _ = self._choice  # cached now, for torch.compile

    @property
    def layout(self) -> Layout:
        """Groups of g behind the window, stored when they close."""
        rule = UniformRule(chunk=self.group_size, window=self.window)
        pooling = None if type(self).represent is not Recall.represent else MEANS
        ahead = None if self.keep == 1 else Lookahead(None, "keep=1")
        return Layout(rule, summary_delay=self.window, pooling=pooling, choice=self._choice, lookahead=ahead)

    @cached_property
    def _choice(self) -> ChoiceSettings:
        store = StoreSettings(self.store_bits, self.store == "host", self.slots if self.store == "host" else 0)
        return ChoiceSettings(self.quota, store, self.unchosen == "mean", self.prompt)

    @cached_property
    def quota(self) -> Quota:
        """The number of closed groups that a query opens."""
        if isinstance(self.num_recall, int):
            return Quota(self.num_recall)
        return Quota.of_share(self.num_recall, self.min_recall)

    @property
    def store_format(self) -> StoreFormat:
        """The settings of the store of closed groups' tokens."""
        return StoreFormat(self.store_bits, self.group_size)

    @property
    def reread(self) -> Reread | None:
        """The second reading of a prompt, None for ``keep=1``."""
        return None if self.keep == 1 else Reread(share=self.keep, window=self.window)

    @property
    def as_steps(self) -> Method:
        """The same settings with ``prompt="recall"``, and all tokens kept."""
        return self if self.prompt == "recall" else self.replace(prompt="recall", keep=1.0)

    def of_layer(self, *, is_first: bool, has_latents: bool) -> Method:
        """The same settings, but the first layer opens all groups, with its store on the device, and other layers that
        cache latents open twice as many (with twice the slots), because all query heads of latents open the same ones.

        Layers that cache latents get ``prompt="exact"`` in place of "shared", because dense attention is faster there.
        A first layer's attention is spread over many tokens; what both rules save: `docs/studies/transfer.md`.
        """
        method = self.replace(prompt="exact") if has_latents and self.prompt == "shared" else self
        if is_first:
            return method.replace(num_recall=1.0, store="device")
        if not has_latents:
            return method
        opened = self.num_recall * 2 if isinstance(self.num_recall, int) else min(1.0, self.num_recall * 2)
        slots = self.slots * 2 if self.store == "host" else self.slots
        return method.replace(num_recall=opened, min_recall=self.min_recall * 2, slots=slots)

    @property
    def has_step(self) -> bool:
        """True: `condense.ops.decode_step` computes `attend`."""
        return type(self).attend is Recall.attend

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """Entries of width 0, the index of G groups (``signs``, ``steps``), and tokens packed by `StoreFormat.pack`."""
        return keep_groups(chunks, self.store_format, backend=backend)

    def check_attention(self, *, scale: float, dropout_p: float, extras: Extras = NO_EXTRAS) -> None:
        """Raise ValueError for attention dropout and for a scale that is not positive."""
        if dropout_p > 0:
            # errors name the class alone: the first layer, where they are raised, has other settings than the user gave
            raise ValueError(f"{type(self).__name__} has no attention dropout (set the model's to 0), got {dropout_p}")
        if scale <= 0:
            raise ValueError(f"scale must be > 0 for Recall, whose index ranks groups by their scores, got {scale}")

    def check_context(self, q: Tensor, context: Context) -> None:
        """Raise ValueError for gradients as `check_gradients`, once there are groups to choose from."""
        if context.extra and (self.store_bits < 16 or (self.prompt != "recall" and q.shape[2] > 1)):
            self.check_gradients()

    def check_gradients(self) -> None:
        """Raise ValueError for ``store_bits`` below 16 and any ``prompt`` but "recall"."""
        bits = self.store_bits
        wrong = [f"keeps no gradients of stored tokens: train with store_bits=16, got {bits}"] if bits < 16 else []
        instead = "prompt='recall'" + (" and keep=1" if self.keep < 1 else "")
        if self.prompt != "recall":
            wrong.append(f"reads prompts as its steps do not: train with {instead}, got prompt={self.prompt!r}")
        if wrong:
            said = f"{type(self).__name__} {'; '.join(wrong)}"
            raise ValueError(f"{said}. It needs no training: without gradients (torch.no_grad()) it runs as it is")

    def attend(
        self, q: Tensor, context: Context, *, scale: float, dropout_p: float = 0.0, backend: str = "auto", **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """One softmax over the tokens of open groups, the window, and one token for all groups that are not open.

        q ``[B, H, L, D]``; backend and others as in `condense.ops.attend_recall`. Raises ValueError as
        `check_attention`, and once there are groups to choose from, for a backend that cannot run.
        """
        self.check_attention(scale=scale, dropout_p=dropout_p)
        options: dict[str, Any] = {"scale": scale, "backend": backend, **others}
        if not context.extra:
            return super().attend(q, context, **options)
        if self.prompt == "exact" and q.shape[2] > 1:
            return attend(q, *self._all_tokens(q, context, backend), **options)
        signs, steps, _ = context.extra
        asked, tokens = self._asked_and_tokens(q, context, backend)
        means, window, spans = context.means, context.window, context.spans
        if means is not None:
            means = means.as_values(q.dtype, window.v.shape[3], context.projection)
        assert isinstance(spans, RuleSpans)
        sources = RecallSources(tokens, window, spans)
        askers = Askers.of_call(sources, q.shape[2]) if self.prompt == "shared" and q.shape[2] > 1 else None
        choice = IndexChoice(asked, GroupIndex(signs, steps), scale, self.quota, askers, context.ranks)
        return attend_recall(q, sources, choice, means=means, **options)

    def _asked_and_tokens(self, q: Tensor, context: Context, backend: str) -> tuple[Tensor, Source]:
        """The queries that score the index, and the stored tokens (with latents: absorbed queries, expanded tokens)."""
        (*index, store), projection, (window_k, window_v, _) = context.extra, context.projection, context.window
        asked, D, Dv = q.detach(), window_k.shape[3], window_v.shape[3]
        if projection is not None:
            with torch.no_grad():
                asked = projection.absorb(q)
            D = asked.shape[3]
        # latents are stored as keys alone, because their values are the first columns of these
        widths, pieces = (D, 0 if context.is_latent else Dv), store.unflatten(2, (-1, self.group_size)).flatten(3)
        k, v = unpack_store(self.store_format, pieces, GroupIndex(*index), widths, q.dtype, backend=backend)
        if projection is not None:
            return asked, Source(*projection.expand(k))
        return asked, Source(k, k[..., :Dv] if context.is_latent else v)

    def _all_tokens(self, q: Tensor, context: Context, backend: str) -> tuple[tuple[Source, Source], Spans]:
        """Store and window for dense attention, and their spans: a query sees all stored tokens of closed groups.

        If every row begins in this call and the store holds the same numbers (16 bits), the window alone is seen. Its
        first columns, as many as a row has padding, hold no tokens.
        """
        spans, (k, v, _) = context.spans, context.window
        assert isinstance(spans, RuleSpans)
        window_alone = self.store_bits == 16 and max_row(spans.query_start + spans.padding) <= 0
        tokens = Source(k[:, :, :0], v[:, :, :0]) if window_alone else self._asked_and_tokens(q, context, backend)[1]
        return (tokens, context.window), spans.of_tokens(window_alone=window_alone)
