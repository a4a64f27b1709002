"""Trial reads of the ends of prompts, by which an engine measures how much memory a layer takes, and compiles kernels.

Shapes: T new tokens, H query heads, K KV heads, D and Dv widths.
"""

import itertools
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from condense.ops.paged import TOGETHER, NewTokens, PagedState, Pages, read_paged
from condense.ops.spans import UniformRule
from condense.serving.blocks import ServedLayer, blocks_of_request, page_sizes, table_columns
from condense.serving.host import host_pages

# layers whose kernels this process has compiled for prompts of all lengths
_COMPILED: set[tuple[ServedLayer, int]] = set()
# so few queries that "auto" takes kernels with smaller tiles
_FEW = 16


def read_trials(
    qkv: tuple[Tensor, Tensor, Tensor],
    served: ServedLayer,
    model: Collection[ServedLayer],
    longest: int,
    *,
    scale: float,
    out: Tensor,
    state_of: Callable[..., PagedState] = PagedState,
) -> None:
    """Read tokens as the ends of requests of up to ``longest`` tokens, all of whose pages of a kind are the same page.

    Every layer reads the longest request. The first of equal layers also reads two requests as rows of one call, half
    of it padding, which may take more memory, and shorter requests: kernels are compiled by closed groups, rows and
    queries.

    Kernels are also compiled for the distance between pages and the length of tables, so these are the engine's.
    served: one of the layers of a model.
    qkv: q ``[T, H, D]``, k ``[T, K, D]``, v ``[T, K, Dv]``; out ``[T, H, Dv]`` gets numbers without a meaning; on
    latents as in `condense.ops.paged.read_paged`. state_of: makes a state of pages with the layer's other fields.
    """
    plan = served.plan
    assert plan is not None
    sizes = page_sizes(model)
    block_bytes = blocks_of_request(model, longest).block_bytes
    heads, dtype = served.heads, served.dtype

    def pages(requests: int, slots: int, nbytes: int, columns: int) -> Pages:
        cache = torch.zeros(heads * slots * nbytes, dtype=torch.uint8, device=out.device)
        cache = cache.as_strided((1, heads, slots, nbytes), (block_bytes, slots * nbytes, nbytes, 1))
        return Pages(cache, torch.zeros(requests, columns, dtype=torch.int32, device=out.device))

    def empty(requests: int) -> PagedState:
        window = pages(requests, sizes.near, served.window_bytes, table_columns(longest, sizes.near)).view(dtype)
        groups, columns = plan.entry_slots(sizes.far), table_columns(longest, sizes.far)
        entries = pages(requests, groups, served.slot_bytes, columns)
        ring = None
        if plan.ring_slots:
            ring = pages(requests, plan.ring_slots, served.widths[0] * dtype.itemsize, 1).view(dtype)
        kept = entries if plan.has_records else entries.view(dtype)
        return state_of(window, kept, ring, store=host_pages(served, entries.cache), longest=longest)

    def read(lengths: tuple[int, ...], counts: tuple[int, ...]) -> None:
        """Read the last ``counts`` tokens of requests of these lengths, or all if a request has fewer."""
        starts = itertools.accumulate(map(min, lengths, counts), initial=0)
        new = NewTokens(list(starts), list(lengths), torch.tensor(lengths, dtype=torch.int32, device=out.device))
        q, k, v, to = (x[: new.starts[-1]] for x in (*qkv, out))
        read_paged((q, k, v), empty(len(lengths)), new, plan.settings, scale=scale, out=to)

    T, half = len(out), min(longest, TOGETHER // 2)
    read((longest,), (T,))
    if (served, longest) not in _COMPILED:
        _COMPILED.add((served, longest))
        if T > 2:
            # 2 new tokens are the fewest with which a request may share a call with longer ones
            read((half, half), (T - 2, 2))
        # single tokens are compiled for here if the method reads them in another way and no step of kernels does
        singles = (1,) if plan.settings.reads_otherwise and not served.has_step(out.device, longest) else ()
        for lengths in _shorter(plan.settings.rule, longest):
            # only ends of prompts: whole ones without closed groups are read by PyTorch's kernels
            for num in (*singles, _FEW, lengths[0] // 2):
                read(lengths, (min(num, *lengths, T // len(lengths)),) * len(lengths))


def _shorter(rule: UniformRule, longest: int) -> list[tuple[int, ...]]:
    """Lengths at which 0, 1, 2, 4, ... groups are closed, alone and, if a call may read both, with one token less."""
    assert rule.window is not None
    powers = itertools.chain([0], (2**i for i in itertools.count()))
    lengths = itertools.takewhile(lambda n: n < longest, (rule.window + i * rule.chunk for i in powers))
    return [each for n in lengths if n > 1 for each in ((n,), (n, n - 1)) if len(each) * n <= max(n, TOGETHER)]
