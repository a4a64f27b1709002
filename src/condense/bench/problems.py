"""Inputs of kernel benchmarks: head shapes, random tensors, and the FLOPs and bytes of their work.

Shapes: B rows, H query heads, K KV heads, L tokens, D key width, Dv value width, M entries, N tokens of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from condense.functional import extend
from condense.methods import DGA, Context, Method, entry_bias
from condense.methods.prompt import FocalPrompt
from condense.ops import RuleSpans, Source, Spans
from condense.ops.tensors.sampling import Sample, sampled_queries
from condense.state import SLACK, first_needed, num_entries, prompt_entries


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
        """For file names."""
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
    """Settings of all problems of a run."""

    shape: HeadShape
    batch: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def inputs(self, length: int) -> Inputs:
        """Normal q, k and v of whole sequences, made on the device."""
        heads = self.shape
        q = self.normal(heads.num_q, length, heads.width, draw=0)
        k = self.normal(heads.num_kv, length, heads.width, draw=1)
        return Inputs(q, k, self.normal(heads.num_kv, length, heads.value_width, draw=2))

    def normal(self, heads: int, length: int, width: int, *, draw: int) -> Tensor:
        """``[B, heads, length, width]``; the same numbers for the same sizes and ``draw``."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1000 + draw)
        size = (self.batch, heads, length, width)
        return torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)

    def step(self, method: Method, length: int, draw: int) -> tuple[Tensor, Context]:
        """One query ``[B, H, 1, D]`` after ``length`` tokens, and a cache as the method keeps it, with random content.

        The window holds the newest token already, and as many older ones as a growing cache keeps.
        """
        seen, heads = torch.tensor([length + 1]), self.shape
        M = int(num_entries(method, seen))
        N = int(seen - first_needed(method, seen - 1 - SLACK))
        q = self.normal(heads.num_q, 1, heads.width, draw=5 * draw)
        entries_k, entries_v, window_k, window_v = (
            self.normal(heads.num_kv, size, width, draw=5 * draw + 1 + i)
            for i, (size, width) in enumerate(
                ((M, heads.width), (M, heads.value_width), (N, heads.width), (N, heads.value_width))
            )
        )
        pads = torch.zeros(1, dtype=torch.int64)
        spans = RuleSpans(method.layout.rule, seen - 1, seen - N, pads)
        entries = Source(entries_k, entries_v, entry_bias(method, M, self.device))
        return q, Context((entries, Source(window_k, window_v)), spans)


def pooled(method: Method, inputs: Inputs, backend: str = "auto") -> Context:
    """The sources that queries of whole sequences attend to: `condense.functional.extend` without a state."""
    q, k, v = inputs
    return extend(method, None, k, v, q, scale=inputs.scale, backend=backend, keep=False)[0]


def reads_at_once(method: Method, length: int) -> TypeGuard[DGA]:
    """True if prompts of so many tokens are read at once and not all of their tokens stay exact."""
    return (
        isinstance(method, DGA) and method.prompt is not None and bool(FocalPrompt(method).num_focal(length) < length)
    )


def sampled(method: DGA, rows: int, length: int, device: torch.device) -> Sample:
    """The sampled queries that rank the tokens of a prompt, in rows without padding."""
    tokens = torch.full((rows,), length)
    return sampled_queries(tokens, length, method.num_recent, method.num_random, method.seed, device)


def ranking_flops(shape: HeadShape, batch: int, positions: Tensor) -> int:
    """FLOPs of one matrix product over the keys that the sampled queries at these positions see."""
    return 2 * batch * shape.num_q * shape.width * int((positions + 1).sum())


def visible_pairs(spans: Spans, length: int, device: torch.device) -> int:
    """Keys that the queries of one row and one head see, summed over queries (the mean over rows and heads)."""
    total = 0.0
    for start in range(0, length, 1 << 20):
        for lo, hi in spans.at(start, min(start + (1 << 20), length), device):
            total += float((hi - lo).sum(-1).double().mean())
    return round(total)


def attention_flops(shape: HeadShape, batch: int, pairs: int, *, backward: bool) -> int:
    """FLOPs of matrix products over visible keys: 2 forward, 5 more backward (scores again, and four gradients)."""
    per_key = shape.width + shape.value_width
    if backward:
        per_key += 3 * shape.width + 2 * shape.value_width
    return 2 * batch * shape.num_q * pairs * per_key


def pooling_bytes(method: Method, shape: HeadShape, inputs: Inputs) -> int:
    """Bytes that pooling must move: keys, values and summary queries read once, entries written once.

    For a prompt that is read at once, the bytes of all steps before its attention: the sampled queries are read too,
    and the grouped tokens are written.
    """
    B, H, L, D = inputs.q.shape
    if reads_at_once(method, L):
        focal = int(FocalPrompt(method).num_focal(L))
        written = int(prompt_entries(method, L)) + L - focal
        queries = (L - focal) // method.group_size + (method.num_recent + method.num_random) * (method.focal == "top")
        widths = shape.num_kv * (shape.width + shape.value_width)
        return B * ((L + written) * widths + min(L, queries) * H * D) * inputs.q.itemsize
    entries = int(num_entries(method, torch.tensor([L])))
    groups = entries // method.layout.rule.entries
    per_entry = shape.num_kv * (shape.width + shape.value_width)
    # with summary="prompt" all groups share one summary query; otherwise each group has its own
    queries = method.layout.num_summary * (1 if method.layout.lookahead else groups)
    read = groups * method.layout.rule.chunk * per_entry + min(L, queries) * H * D
    return B * (read + entries * per_entry) * inputs.q.itemsize


def step_bytes(q: Tensor, sources: Context) -> int:
    """Bytes that one decode step must move: every visible key and value once, the query and its output."""
    B, H, _, D = q.shape
    K, Dv = sources.window.v.shape[1], sources.window.v.shape[3]
    keys = visible_pairs(sources.spans, 1, q.device)
    return B * (K * keys + H) * (D + Dv) * q.itemsize
