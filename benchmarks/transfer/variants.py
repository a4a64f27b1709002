"""Attention of the study that the library does not have: dense caches and stores in few bits, prompts before answers.

Built from the library's operations, so that its kernels attend. Shapes: G groups of g tokens, D key width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from condense import Method, Recall
from condense.functional import extend
from condense.ops import Chunks, RuleSpans, Source, UniformRule, attend
from condense.ops.recall import GroupIndex, block_width, rotation
from condense.ops.tensors.codes import dequantise, quantise

Attention = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass(frozen=True)
class Cache:
    """Dense attention over tokens in 4 bits but for the newest: an ``attention(module, q, k, v, scale) -> out``.

    After KIVI (arXiv:2402.02750): keys have a step and a zero per channel of 64 tokens, values per token, both in the
    dtype of the tokens; the newest 128 tokens stay exact. turned: keys are turned by the index's rotation and have a
    step and a zero per token, too.
    """

    turned: bool = False
    bits: int = 4
    group: int = 64
    window: int = 128

    def __call__(self, module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        G = max(0, k.shape[2] - self.window) // self.group
        if G == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        groups = (x[:, :, : G * self.group].contiguous().unflatten(2, (G, self.group)) for x in (k, v))
        store = Source(*(x.flatten(2, 3) for x in self._rounded(*groups)))
        spans = RuleSpans(UniformRule(self.group, self.window, entries=self.group), 0, 0)
        return attend(q, [store, Source(k, v)], spans, scale=q.shape[3] ** -0.5 if scale is None else scale)[0]

    def costs(self, length: int, width: int) -> dict[str, float]:
        """Bytes as a share of a dense cache of 16 bits; a step reads all of them."""
        tokens, exact = (length - self.window) // self.group * self.group, 4.0 * self.window * width
        of_key = width * self.bits / 8 + (4 if self.turned else 4 * width / self.group)
        kept = (tokens * (of_key + width * self.bits / 8 + 4) + exact) / (4.0 * length * width)
        return {"device": kept, "host_store": kept, "read": kept}

    def _rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read, ``[1, K, G, g, D]``."""
        if not self.turned:
            return self._on_grid(k, 3), self._on_grid(v, 4)
        wide, D = torch.promote_types(k.dtype, torch.float32), k.shape[4]
        turn = rotation(D, k.device, wide) / math.sqrt(block_width(D))
        turned = self._on_grid((k.to(wide) @ turn).to(k.dtype), 4)
        return (turned.to(wide) @ turn.mT).to(k.dtype), self._on_grid(v, 4)

    def _on_grid(self, x: Tensor, dim: int) -> Tensor:
        codes, step, zero = quantise(x, dim, self.bits, x.dtype)
        return dequantise(codes, step, zero)


@dataclass(frozen=True)
class Answers:
    """A text as users read it: its prompt by the method with ``prompt="exact"``, what follows by the method's steps.

    first: the first full layer's method; None: as where one method is given for all layers.
    """

    method: Recall
    first: Recall | None = None

    def in_layers(self, config: PreTrainedConfig) -> dict[int | str, Method]:
        """The method of the first full layer and of the rest, as `condense.apply` takes them."""
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        return {kinds.index("full_attention"): self.first or self.method.of_first_layer, "rest": self.method}

    def after(self, prompt: int) -> Attention:
        """The attention of texts whose first ``prompt`` tokens are the prompt."""

        def attention(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
            scale, state, parts = q.shape[3] ** -0.5 if scale is None else scale, None, []
            methods, ends = self.in_layers(module.config), ((0, prompt), (prompt, q.shape[2]))
            steps = methods.get(module.layer_idx, self.method)
            for method, (start, stop) in zip((steps.replace(prompt="exact"), steps), ends, strict=True):
                new = tuple(x[:, :, start:stop] for x in (q, k, v))
                context, keep = extend(method, state, *new, scale=scale)
                parts.append(method.attend(new[0], context, scale=scale)[0])
                state = keep()
            return torch.cat(parts, 2)

        return attention


@dataclass(frozen=True, kw_only=True)
class Rounded(Recall):
    """Recall over tokens that are rounded as a store would round them which the library does not have.

    key_bits: what a key, turned by the index's rotation, differs by from its group's centre has one step and so many
    bits per number, of which the index holds the first, its sign; so a store keeps one bit less. value_bits: per
    number, a step and a zero per token.
    """

    name: ClassVar[str] = "rounded"
    key_bits: int = 5
    value_bits: int = 4

    def represent(self, chunks: Chunks, summary: Tensor | None, *, scale: float, backend: str) -> tuple[Tensor, ...]:
        """Entries and index of the tokens as they are, and the rounded tokens."""
        *kept, signs, steps, _ = super().represent(chunks, summary, scale=scale, backend=backend)
        (k, v), index = chunks.tokens(), GroupIndex(signs, steps)
        codes, step, zero = quantise(v, 4, self.value_bits, v.dtype)
        # a store of 16 bits does not read what keys differ by
        return *kept, *index, self.store_format.pack(self._key(k, index), dequantise(codes, step, zero), k)

    @property
    def stored(self) -> Recall:
        """Recall with the library's store of 4 bits."""
        settings = {name: value for name, value in self.to_dict().items() if name in Recall.__dataclass_fields__}
        return Recall(**settings | {"store_bits": 4})

    def saved(self, width: int) -> float:
        """Bytes by which a token of this width is smaller than in the library's store of 4 bits, for tokens of 16."""
        of_value = width * self.value_bits / 8 + 4
        return self.stored.store_format.width(width, width, 2) - (width * (self.key_bits - 1) / 8 + 2 + of_value)

    def _key(self, k: Tensor, index: GroupIndex) -> Tensor:
        wide, D = torch.promote_types(k.dtype, torch.float32), k.shape[-1]
        turn = rotation(D, k.device, wide) / math.sqrt(block_width(D))
        x = k.to(wide) @ turn
        unit = index.steps[..., -1:].to(wide) * math.sqrt(block_width(D))
        centre = (unit * index.centres(D, wide))[:, :, :, None]
        x = x - centre
        most = 2 ** (self.key_bits - 1)
        step = (x.abs().amax(-1, keepdim=True) / most).to(k.dtype).to(wide).clamp(min=torch.finfo(wide).tiny)
        size = ((x.abs() / step).floor().clamp(max=most - 1) + 0.5) * step
        return ((torch.where(x < 0, -size, size) + centre) @ turn.mT).to(k.dtype)
