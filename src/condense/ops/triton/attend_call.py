"""The arguments of the attention operations, and the part of them that their kernels share.

Shapes: B rows of the batch, H query heads, K KV heads, R = H / K, L queries, N entries of a source, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from condense.ops.spans import RuleSpans, Source, Spans, UniformRule
from condense.ops.triton.host import LOG2E, check_programs, whole_rows

# stands for "no limit" in kernels: more tokens than any row has, and a sum of three such numbers still fits in 32 bits
_UNLIMITED = 1 << 29


class AttendCall(NamedTuple):
    """The arguments of the operations: the fields of all sources as lists, and spans as `describe` makes them.

    biases: a tensor float ``[B|1, K|1, N]`` for each source whose entries have biases of their own.
    bias_of: for each source the index of its tensor in ``biases``, -1 for none.
    levels: for each source the one bias that all of its entries share, 0.0 for none.
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    biases: Sequence[Tensor]
    bias_of: Sequence[int]
    levels: Sequence[float]
    spans: Tensor | None
    rule: Sequence[int]
    scale: float
    softcap: float = 0.0


class AttendShared(NamedTuple):
    """Numbers and tensors that every kernel of a call takes. Strides are 0 in dimensions of size 1.

    biases, s_bias: one per source, float32 times log2(e), None for a source without. levels: base 2.
    spans, s_spans: see `describe`. kind: see `condense.ops.triton.device.rule`.
    """

    K: int
    R: int
    biases: tuple[Tensor | None, ...]
    s_bias: tuple[tuple[int, int], ...]
    spans: Tensor
    s_spans: tuple[int, int, int]
    levels: tuple[float, ...]
    kind: str

    @classmethod
    def of(cls, call: AttendCall) -> AttendShared:
        """Return the shared arguments of ``call``. Raises ValueError for more rows times heads than a grid holds."""
        K = call.k[0].shape[1]
        check_programs(call.q.shape[0] * K)
        biases: tuple[Tensor | None, ...] = (None,) * len(call.k)
        if call.biases:
            # a source without entries gets no bias either
            known = [(x.float() * LOG2E).contiguous() if x.shape[2] > 0 else None for x in call.biases]
            biases = tuple([None if n < 0 else known[n] for n in call.bias_of])
        kind = "row" if call.spans is None else "rows" if call.spans.ndim == 2 else "arrays"
        s_bias = tuple([(0, 0) if x is None else row_strides(x) for x in biases])
        spans, s_spans = call.q if call.spans is None else call.spans, (0, 0, 0)
        if call.spans is not None and kind == "arrays":
            s_spans = (call.spans.stride(1), *row_strides(call.spans))
        levels = tuple([x * LOG2E for x in call.levels])
        return cls(K, call.q.shape[1] // K, biases, s_bias, spans, s_spans, levels, kind)


def row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of batch and KV head of ``[..., B|1, K|1, n]``, 0 for a dimension of size 1."""
    return (0 if x.shape[-3] == 1 else x.stride(-3), 0 if x.shape[-2] == 1 else x.stride(-2))


def not_empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Keys or values of the sources in rows as kernels read them; an empty source gets one row that no query sees."""
    other = next((x for x in tensors if x.shape[2] > 0), None)
    if other is None:
        return [x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in tensors]
    return [whole_rows(x if x.shape[2] > 0 else other[:, :, :1]) for x in tensors]


def results(q: Tensor, v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Empty tensors for output ``[B, H, L, Dv]`` and log-sum-exp ``[B, H, L]``."""
    return q.new_empty(*q.shape[:3], v[0].shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def describe(spans: Spans, num_sources: int, L: int, device: torch.device) -> tuple[Tensor | None, list[int]]:
    """Spans as kernels take them: a tensor on the device or None, and eight numbers: those of a `UniformRule`, then
    those of a `condense.ops.spans.Start`.

    None: the rule, with the same start in all rows. int32 ``[B, 4]``: the rule, and the start of each row. int32
    ``[sources, 2, B|1, K|1, L]``: lo and hi of each source; the numbers are not used.
    """
    if not isinstance(spans, RuleSpans) or not isinstance(spans.rule, UniformRule):
        ends = torch.broadcast_tensors(*(x for span in spans.at(0, L, device) for x in span))
        return torch.stack(ends).unflatten(0, (-1, 2)).to(torch.int32), [1, 1, 1, 1, 0, 0, 0, 0]
    assert num_sources == 2, "the uniform rule has the entries and the window"
    rule = spans.rule
    window, max_chunks = (_UNLIMITED if x is None else min(x, _UNLIMITED) for x in (rule.window, rule.max_chunks))
    numbers = [min(rule.chunk, _UNLIMITED), window, rule.entries, max_chunks]
    start = spans.same_in_all_rows()
    if start is not None:
        return None, [*numbers, *start]
    return spans.starts().to(device, torch.int32, non_blocking=True), [*numbers, 0, 0, 0, 0]


def call_of(q: Tensor, sources: Sequence[Source], spans: Spans, scale: float, softcap: float = 0.0) -> AttendCall:
    """Return the arguments of the operations."""
    k, v = [source.k for source in sources], [source.v for source in sources]
    biases: list[Tensor] = []
    bias_of: list[int] = []
    for source in sources:
        bias_of.append(len(biases) if isinstance(source.bias, Tensor) else -1)
        if isinstance(source.bias, Tensor):
            biases.append(source.bias)
    levels = [0.0 if source.bias is None or isinstance(source.bias, Tensor) else source.bias for source in sources]
    if scale <= 0:  # the kernels need scale > 0, so the sign (or the zero) goes into q
        q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    described = describe(spans, len(sources), q.shape[2], q.device)
    return AttendCall(q, k, v, biases, bias_of, levels, *described, scale, softcap)


def needs_operation(q: Tensor, *others: Tensor) -> bool:
    """True if autograd, torch.compile or a subclass of Tensor is involved, which need a torch operation.

    Otherwise the kernel is called directly: dispatching the operation takes longer than all other host work.
    """
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))
