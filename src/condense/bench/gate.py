"""The gate before the clock: what is wrong is not timed.

Everything is compared with float64 on the same device. The budget is the project's: twice the error of the same
formula as plain PyTorch operations in the low precision, plus one unit in the last place, for the largest error and
for the mean one.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, S checked queries, n visible keys, D and Dv widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from condense.bench.problems import Inputs, pooled
from condense.methods import Context, Method
from condense.ops.tensors.right_aligned import per_entry

# the newest queries of a long problem that are checked: they see every entry
TAIL = 64
# up to this length every query is checked
WHOLE = 2048


@dataclass(frozen=True)
class Verdict:
    """``share``: the worst error as a share of its budget. Right up to 1."""

    share: float

    @property
    def passed(self) -> bool:
        """False also if something was not finite."""
        return self.share <= 1

    def to_dict(self) -> dict[str, object]:
        """For result files."""
        return {"passed": self.passed, "share_of_budget": self.share}


def first_checked(length: int) -> int:
    """The first query that is checked: 0 in a short problem, one near the end in a long one."""
    return 0 if length <= WHOLE else length - TAIL


def judge(results: Sequence[Tensor], wants: Sequence[Tensor], yardsticks: Sequence[Tensor]) -> Verdict:
    """Results against float64 ``wants``; yardsticks are the same in plain low-precision operations."""
    shares = [0.0]
    for got, want, yardstick in zip(results, wants, yardsticks, strict=True):
        if want.numel() == 0:
            continue
        one_ulp = torch.finfo(got.dtype).eps * torch.stack([want.abs().max(), want.abs().mean()])
        error = _errors(got, want)
        share = torch.where(error == 0, error, error / (2 * _errors(yardstick, want) + one_ulp))
        shares.append(float(share.max()) if bool(share.isfinite().all()) else math.inf)
    return Verdict(max(shares))


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
    """Prefix entries that pooling made: all of a short problem, the newest of a long one.

    A group's entries depend on its own tokens and summary queries only, so the end of a long problem, cut where a
    group begins, makes the same newest entries.
    """
    q, k, v = inputs
    L, rule = q.shape[2], method.layout.rule
    assert rule.max_chunks is None, "methods that pool have entries all along"
    kept = sources.entries.k.shape[2]
    start = 0
    if L > WHOLE:
        reach = method.layout.summary_delay + method.layout.num_summary + (TAIL + 1) * rule.chunk
        start = max(0, L - reach) // rule.chunk * rule.chunk
        kept = min(kept, TAIL * rule.entries)
    want, yardstick = exact_and_plain(method, Inputs(q[:, :, start:], k[:, :, start:], v[:, :, start:]))
    return judge(*([x.entries.k[:, :, -kept:], x.entries.v[:, :, -kept:]] for x in (sources, want, yardstick)))


def check_layer(out: Tensor, inputs: Inputs, want: Context, yardstick: Context) -> Verdict:
    """Pooling and attention in one, on a problem short enough to have every step in float64.

    want and yardstick: what its queries attend to, in float64 and in plain operations.
    """
    assert inputs.q.shape[2] <= WHOLE
    exact = _eager(_narrow(inputs.q, want, 0).to(torch.float64), inputs.scale)
    eager = _eager(_narrow(inputs.q, yardstick, 0), inputs.scale)
    return judge([out], [exact], [eager])


def exact_and_plain(method: Method, inputs: Inputs) -> tuple[Context, Context]:
    """What the queries attend to, pooled in float64 and by plain operations in the dtype of the inputs."""
    entries = mean_queries(inputs)
    want = pooled(method, Inputs(*(x.double() for x in entries)), backend="reference")
    return want, pooled(method, entries, backend="torch")


def mean_queries(inputs: Inputs) -> Inputs:
    """With the mean query of each KV head for q: rounded to the dtype of q by definition, so float64 starts there."""
    q, k, v = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    return Inputs(q.unflatten(1, (k.shape[1], -1)).mean(2, dtype=wide).to(q.dtype), k, v)


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
        k, v = (
            torch.cat([prefix[:, head, None], band[:, head, None]], dim=2)
            for prefix, band in ((part.entries_k, part.window_k), (part.entries_v, part.window_v))
        )
        mask = part.mask[:, min(head, part.mask.shape[1] - 1), None]
        added = torch.zeros(mask.shape, dtype=part.q.dtype, device=part.q.device)
        if part.bias is not None:
            bias = part.bias[:, min(head, part.bias.shape[1] - 1), None, None]
            added = added + F.pad(bias, (0, k.shape[2] - bias.shape[-1])).to(added.dtype)
        added = added.masked_fill(~mask, -math.inf)
        q = part.q[:, head * R : (head + 1) * R]
        if q.dtype == torch.float32:  # PyTorch's own way in float32: its exp and its order of sums
            outs.append(
                F.scaled_dot_product_attention(q, k.expand(-1, R, -1, -1), v.expand(-1, R, -1, -1), added, scale=scale)
            )
        else:
            outs.append((q @ k.mT * scale + added).softmax(-1) @ v)
    return torch.cat(outs, dim=1)


def _eager_gradients(part: _Part, upstream: Tensor, scale: float) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, entries_k, entries_v, window_k, window_v = leaves = [x.detach().requires_grad_() for x in part[:5]]
        out = _eager(_Part(q, entries_k, entries_v, window_k, window_v, part.mask, part.bias, part.spans), scale)
        return torch.autograd.grad(out, leaves, upstream.to(out.dtype))


def _errors(got: Tensor, want: Tensor) -> Tensor:
    difference = (got.double() - want).abs()
    return torch.stack([difference.max(), difference.mean()])
