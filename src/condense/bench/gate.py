"""Checking results before they are timed: a row whose result is wrong gets no time.

Results are compared with the definition in float64, within the error budget of the tests, see `condense.testing`.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, S checked queries, n visible keys, D and Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.bench.problems import Inputs
from condense.methods import Context, Method
from condense.ops.tensors.right_aligned import per_entry
from condense.testing import oracle
from condense.testing.budget import Verdict, judge

# of a long problem, this many of the newest queries are checked, because they see all entries
TAIL = 64
# up to this length every query is checked
WHOLE = 2048


def first_checked(length: int) -> int:
    """The first query that is checked: 0 in a short problem, one near the end in a long one."""
    return 0 if length <= WHOLE else length - TAIL


def check_output(out: Tensor, q: Tensor, sources: Context, *, scale: float) -> Verdict:
    """Attention output ``[B, H, L, Dv]`` at the checked queries."""
    start = first_checked(q.shape[2])
    part = _narrow(q, sources, start)
    want, yardstick = (_eager(part.to(dtype), scale) for dtype in (torch.float64, q.dtype))
    return judge([out[:, :, start:]], [want], [yardstick])


def check_gradients(
    gradients: Callable[[Tensor], Sequence[Tensor]], q: Tensor, sources: Context, *, scale: float
) -> Verdict:
    """Gradients of q, entries_k, entries_v, window_k and window_v that flow from the checked queries.

    gradients: the five of them for an output gradient ``[B, H, L, Dv]``, which is 0 at all other queries.
    """
    start, L = first_checked(q.shape[2]), q.shape[2]
    part = _narrow(q, sources, start)
    generator = torch.Generator(q.device).manual_seed(1)
    size = (*q.shape[:2], L - start, sources.window.v.shape[3])
    upstream = torch.randn(size, generator=generator, dtype=q.dtype, device=q.device)
    full = F.pad(upstream, (0, 0, start, 0))
    results = [x[:, :, first:last] for x, (first, last) in zip(gradients(full), part.spans, strict=True)]
    del full
    want, yardstick = (_eager_gradients(part.to(dtype), upstream, scale) for dtype in (torch.float64, q.dtype))
    return judge(results, want, yardstick)


def check_entries(method: Method, inputs: Inputs, sources: Context) -> Verdict:
    """Check pooled entries: all of a short problem, the newest of a long one."""
    rule, entries = method.layout.rule, sources.entries
    assert rule.max_chunks is None, "methods that pool have entries for all chunks"
    M = entries.k.shape[2]
    first = 0 if inputs.q.shape[2] <= WHOLE else max(0, M // rule.entries - TAIL)
    want, yardstick = (
        _entries(method, inputs, range(first, M // rule.entries), wide) for wide in (torch.float64, torch.float32)
    )
    return judge([x[:, :, first * rule.entries :] for x in (entries.k, entries.v)], want, yardstick)


def check_layer(out: Tensor, inputs: Inputs, want: Context, yardstick: Context) -> Verdict:
    """Pooling and attention in one, on a problem short enough to have every step in float64.

    want and yardstick: the queries' context, in float64 and in plain operations.
    """
    assert inputs.q.shape[2] <= WHOLE
    exact = _eager(_narrow(inputs.q, want, 0).to(torch.float64), inputs.scale)
    eager = _eager(_narrow(inputs.q, yardstick, 0), inputs.scale)
    return judge([out], [exact], [eager])


def exact_and_plain(method: Method, inputs: Inputs, sources: Context) -> tuple[Context, Context]:
    """``sources`` with entries by the definition in float64, and by plain operations in the dtype of the inputs.

    Entries of methods that do not pool are tokens, and are not changed.
    """
    M, rule = sources.entries.k.shape[2], method.layout.rule
    if M == 0 or rule.max_chunks is not None:
        return sources, sources
    made = (_entries(method, inputs, range(M // rule.entries), wide) for wide in (torch.float64, torch.float32))
    want, yardstick = (
        sources._replace(sources=(sources.entries._replace(k=keys, v=values), sources.window)) for keys, values in made
    )
    return want, yardstick


def mean_queries(inputs: Inputs) -> Inputs:
    """The inputs with the mean query of each KV head as q; the definition rounds it to q's dtype, also for float64."""
    q, k, v = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    return Inputs(q.unflatten(1, (k.shape[1], -1)).mean(2, dtype=wide).to(q.dtype), k, v)


def _entries(method: Method, inputs: Inputs, groups: range, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of these groups by the definition, in float64, or in float32 and rounded to the inputs' dtype.

    On the host: its loops are many small operations.
    """
    q, k, v = (x.cpu().to(wide) for x in mean_queries(inputs))
    keys, values = oracle.entries(method, q, k, v, groups, scale=inputs.scale)
    dtype = wide if wide == torch.float64 else inputs.k.dtype
    return keys.to(inputs.k.device, dtype), values.to(inputs.k.device, dtype)


class _Part(NamedTuple):
    """Checked queries ``[B, H, S, D]``, the hull of what they see, and the mask ``[B|1, K|1, S, n]`` over it."""

    q: Tensor
    entries_k: Tensor
    entries_v: Tensor
    window_k: Tensor
    window_v: Tensor
    mask: Tensor
    bias: Tensor | None
    spans: list[tuple[int, int]]

    def to(self, dtype: torch.dtype) -> _Part:
        return self._replace(
            q=self.q.to(dtype),
            entries_k=self.entries_k.to(dtype),
            entries_v=self.entries_v.to(dtype),
            window_k=self.window_k.to(dtype),
            window_v=self.window_v.to(dtype),
        )


def _narrow(q: Tensor, sources: Context, start: int) -> _Part:
    stop = q.shape[2]
    ((entries, window),) = sources.spans.hulls([(start, stop)])
    masks = []
    for (lo, hi), hull in zip(sources.spans.at(start, stop, q.device), (entries, window), strict=True):
        entry = torch.arange(*hull, device=q.device)
        masks.append((entry >= lo[..., None]) & (entry < hi[..., None]))
    mask = torch.cat(masks, dim=-1)
    spans: list[tuple[int, int]] = [(start, stop), entries, entries, window, window]
    whole = (q, *sources.tensors)
    queries, entries_k, entries_v, window_k, window_v = (x[:, :, a:b] for x, (a, b) in zip(whole, spans, strict=True))
    bias = per_entry(sources.entries.bias, sources.entries.k.shape[2], q.device)
    bias = None if bias is None else bias[..., slice(*entries)].double()
    return _Part(queries, entries_k, entries_v, window_k, window_v, mask, bias, spans)


def _eager(part: _Part, scale: float) -> Tensor:
    """``[B, H, S, Dv]`` by plain operations in the dtype of the part, one KV head at a time."""
    K = part.window_k.shape[1]
    R = part.q.shape[1] // K
    outs = []
    for head in range(K):
        q = part.q[:, head * R : (head + 1) * R]
        k, v = (
            torch.cat([entries[:, head, None], window[:, head, None]], dim=2).expand(-1, R, -1, -1)
            for entries, window in ((part.entries_k, part.window_k), (part.entries_v, part.window_v))
        )
        mask = part.mask[:, min(head, part.mask.shape[1] - 1), None]
        bias = q.new_zeros(1, 1, 1, k.shape[2])
        if part.bias is not None:
            own = part.bias[:, min(head, part.bias.shape[1] - 1), None, None]
            bias = F.pad(own, (0, k.shape[2] - own.shape[-1])).to(q.dtype)
        # float32 uses PyTorch's fused attention, to have the error of its exp and of its order of sums
        outs.append(oracle.eager_attention(q, k, v, mask, bias, scale=scale, fused=q.dtype == torch.float32))
    return torch.cat(outs, dim=1)


def _eager_gradients(part: _Part, upstream: Tensor, scale: float) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, entries_k, entries_v, window_k, window_v = leaves = [x.detach().requires_grad_() for x in part[:5]]
        out = _eager(_Part(q, entries_k, entries_v, window_k, window_v, part.mask, part.bias, part.spans), scale)
        return torch.autograd.grad(out, leaves, upstream.to(out.dtype))
