"""Inputs of kernel benchmarks: head shapes, random tensors, and the FLOPs and bytes of their work.

Shapes: B rows, H query heads, K KV heads, L tokens, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from condense.functional import extend
from condense.methods import Context, Method, step_settings
from condense.ops.step import fields_of


@dataclass(frozen=True)
class HeadShape:
    """Query heads, KV heads, key width and value width."""

    num_q: int
    num_kv: int
    width: int = 128
    value_width: int = 128

    @classmethod
    def parse(cls, text: str) -> HeadShape:
        """``H/Hkv``, ``H/Hkv/D`` or ``H/Hkv/D/Dv``. Raises ValueError for anything else."""
        parts = text.split("/")
        numbers = [int(part) for part in parts if part.strip().isdecimal()]
        if len(numbers) != len(parts) or not 2 <= len(numbers) <= 4 or min(numbers) < 1 or numbers[0] % numbers[1]:
            raise ValueError(
                f"shape must be H/Hkv/D/Dv, such as 32/8/128/128 or 64/4, with Hkv a divisor of H; got {text!r}"
            )
        num_q, num_kv, width = (*numbers, 128)[:3]
        return cls(num_q, num_kv, width, numbers[3] if len(numbers) == 4 else width)

    @property
    def label(self) -> str:
        """The shape in file names."""
        return f"h{self.num_q}-kv{self.num_kv}-d{self.width}-v{self.value_width}"


class Inputs(NamedTuple):
    """q ``[B, H, L, D]``, k ``[B, K, L, D]``, v ``[B, K, L, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def scale(self) -> float:
        """The default softmax scale."""
        return float(self.q.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Setting:
    """The settings that the inputs of a run's rows share."""

    shape: HeadShape
    batch: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def inputs(self, length: int, *, draw: int = 0) -> Inputs:
        """Normal q, k and v of whole sequences, made on the device; the same for the same length and ``draw``."""
        heads = self.shape
        q = self.normal(heads.num_q, length, heads.width, draw=5 * draw)
        k = self.normal(heads.num_kv, length, heads.width, draw=5 * draw + 1)
        return Inputs(q, k, self.normal(heads.num_kv, length, heads.value_width, draw=5 * draw + 2))

    def normal(self, heads: int, length: int, width: int, *, draw: int) -> Tensor:
        """``[B, heads, length, width]``; the same numbers for the same sizes and ``draw``."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1000 + draw)
        size = (self.batch, heads, length, width)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)


def pooled(method: Method, inputs: Inputs, backend: str = "auto") -> Context:
    """The sources that queries of whole sequences attend to: `condense.functional.extend`."""
    return extend(method, None, *inputs, scale=inputs.scale, backend=backend)[0]


def sees_by_position(method: Method) -> bool:
    """True if a query's position alone says what it sees, whatever the tokens are."""
    return not method.reads_prompt and method.layout.choice is None


def visible_pairs(method: Method, context: Context, length: int) -> int:
    """Keys that the queries of one row and one head see, summed over queries (the mean over rows and heads).

    An open group of Recall counts as its tokens, all others as one key.
    """
    entries, window = (span.hi - span.lo for span in context.spans.at(0, length, context.window.k.device))
    if (choice := method.layout.choice) is not None:
        opened = (choice.quota if length == 1 else choice.prompt_quota).at(entries)
        entries = opened * method.layout.rule.chunk + ((entries > opened) & choice.mean)
    return round(sum(float(seen.sum(-1).double().mean()) for seen in (entries, window)))


def attention_flops(shape: HeadShape, batch: int, pairs: int, *, backward: bool) -> int:
    """FLOPs of matrix products over visible keys: 2 forward, 5 more backward (scores again, and four gradients)."""
    per_key = shape.width + shape.value_width
    if backward:
        per_key += 3 * shape.width + 2 * shape.value_width
    return 2 * batch * shape.num_q * pairs * per_key


def beside_keys(method: Method, setting: Setting, entries: int) -> int:
    """Bytes that a step reads per row and KV head beside whole keys and values: those of Recall's index and of a sum,
    less what entries and stored tokens in fewer than 16 bits save.
    """
    heads, choice = setting.shape, method.layout.choice
    widths = (heads.width, heads.value_width)
    fields = fields_of(step_settings(method), heads.num_kv, widths, setting.dtype)
    nbytes = {field.name: field.nbytes for field in fields}
    whole = sum(widths) * setting.dtype.itemsize
    if choice is None:
        return entries * (nbytes["entries_k"] + nbytes["entries_v"] - whole)
    opened = choice.quota.at(entries) * method.layout.rule.chunk
    # in place of the one key that stands for all others
    rest = nbytes["sums"] - whole if choice.mean and opened < entries * method.layout.rule.chunk else 0
    return entries * (nbytes["signs"] + nbytes["steps"]) + rest - opened * (whole - nbytes["store"])


def step_bytes(setting: Setting, keys: int, more: int = 0) -> int:
    """Bytes that one decode step must move: per row the query and its output, and per KV head ``keys`` keys and values.

    more: bytes that a row reads per KV head on top (`beside_keys`).
    """
    heads = setting.shape
    vectors = (heads.num_kv * keys + heads.num_q) * (heads.width + heads.value_width)
    return setting.batch * (vectors * setting.dtype.itemsize + heads.num_kv * more)
