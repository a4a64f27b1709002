"""Trial reads of the ends of prompts, by which an engine measures how much memory a layer takes, and compiles kernels.

Shapes: T new tokens, H query heads, K KV heads, D and Dv widths.
"""

import itertools

import torch
from torch import Tensor

from condense.ops.paged import TOGETHER, NewTokens, PagedState, Pages, read_paged
from condense.serving.blocks import PageSizes, ServedLayer

# layers whose kernels this process has compiled for prompts of all lengths
_COMPILED: set[tuple[ServedLayer, int]] = set()
# so few queries that "auto" takes kernels with smaller tiles
_FEW = 16


def read_trials(
    qkv: tuple[Tensor, Tensor, Tensor],
    served: ServedLayer,
    sizes: PageSizes,
    longest: int,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Read tokens as the ends of requests of up to ``longest`` tokens, all of whose pages of a kind are the same page.

    The longest takes the most memory and is read for every layer. The first of layers that are alike reads shorter
    ones too, because some kernels are compiled for each power of two of closed groups, for rows, or for few queries.

    qkv: q ``[T, H, D]``, k ``[T, K, D]``, v ``[T, K, Dv]``; out ``[T, H, Dv]`` gets numbers without a meaning.
    """
    _read(qkv, served, sizes, (longest,), len(out), scale=scale, out=out)
    if (served, longest) in _COMPILED:
        return
    _COMPILED.add((served, longest))
    for lengths in _shorter(served, longest):
        # not whole prompts: where nothing is closed, kernels of PyTorch's read those
        for num in (_FEW, lengths[0] // 2):
            _read(qkv, served, sizes, lengths, num, scale=scale, out=out)


def _shorter(served: ServedLayer, longest: int) -> list[tuple[int, ...]]:
    """Lengths at which 0, 1, 2, 4, 8, ... groups are closed; with each, if a call may read both, a token less."""
    assert served.plan is not None
    rule = served.plan.settings.rule
    assert rule.window is not None
    powers = itertools.chain([0], (2**i for i in itertools.count()))
    lengths = itertools.takewhile(lambda n: n < longest, (rule.window + i * rule.chunk for i in powers))
    return [each for n in lengths if n > 1 for each in ((n,), (n, n - 1)) if len(each) * n <= max(n, TOGETHER)]


def _read(
    qkv: tuple[Tensor, Tensor, Tensor],
    served: ServedLayer,
    sizes: PageSizes,
    lengths: tuple[int, ...],
    num: int,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Read the last ``num`` tokens of each of some requests, or as many as there are."""
    plan, num, device = served.plan, min(num, *lengths, len(out) // len(lengths)), out.device
    assert plan is not None

    def pages(slots: int, nbytes: int, count: int) -> Pages:
        cache = torch.zeros(1, served.heads, slots, nbytes, dtype=torch.uint8, device=device)
        return Pages(cache, torch.zeros(len(lengths), count, dtype=torch.int32, device=device))

    window = pages(sizes.near, served.token_bytes, -(-lengths[0] // sizes.near)).view(served.dtype)
    entries = pages(plan.entry_slots(sizes.far), served.slot_bytes, -(-lengths[0] // sizes.far))
    ring = None
    if plan.ring_slots:
        ring = pages(plan.ring_slots, served.widths[0] * served.dtype.itemsize, 1).view(served.dtype)
    state = PagedState(window, entries if plan.has_records else entries.view(served.dtype), ring)
    total = num * len(lengths)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    new = NewTokens([num * i for i in range(len(lengths) + 1)], list(lengths), seen)
    q, k, v = (x[:total] for x in qkv)
    read_paged((q, k, v), state, new, plan.settings, scale=scale, out=out[:total])
