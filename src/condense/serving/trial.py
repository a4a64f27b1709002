"""A trial read of the end of the longest prompt, so that an engine can measure how much memory a layer takes.

Shapes: T new tokens, H query heads, K KV heads, D and Dv widths.
"""

import torch
from torch import Tensor

from condense.ops.paged import NewTokens, PagedState, Pages, read_paged
from condense.serving.blocks import PageSizes, ServedLayer


def read_end(
    qkv: tuple[Tensor, Tensor, Tensor],
    served: ServedLayer,
    sizes: PageSizes,
    length: int,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Read tokens as the last ones of a request of ``length`` tokens, all of whose pages of a kind are the same page.

    qkv: q ``[T, H, D]``, k ``[T, K, D]``, v ``[T, K, Dv]``; out ``[T, H, Dv]`` gets numbers without a meaning; tokens
    beyond ``length`` are not read.
    """
    plan, num, device = served.plan, min(length, len(out)), out.device
    assert plan is not None

    def pages(slots: int, nbytes: int, count: int) -> Pages:
        cache = torch.zeros(1, served.heads, slots, nbytes, dtype=torch.uint8, device=device)
        return Pages(cache, torch.zeros(1, count, dtype=torch.int32, device=device))

    window = pages(sizes.near, served.token_bytes, -(-length // sizes.near)).view(served.dtype)
    entries = pages(plan.entry_slots(sizes.far), served.slot_bytes, -(-length // sizes.far))
    ring = None
    if plan.ring_slots:
        ring = pages(plan.ring_slots, served.widths[0] * served.dtype.itemsize, 1).view(served.dtype)
    state = PagedState(window, entries if plan.has_records else entries.view(served.dtype), ring)
    new = NewTokens([0, num], [length], torch.tensor([length], dtype=torch.int32, device=device))
    q, k, v = (x[:num] for x in qkv)
    read_paged((q, k, v), state, new, plan.settings, scale=scale, out=out[:num])
