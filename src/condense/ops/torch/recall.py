"""Recall's attention in blocks of queries over PyTorch's fused attention; any device, differentiable.

A block of queries reads the tokens of all closed groups under a mask, so it takes as long as dense attention. Memory is
linear in L. A single query reads only the tokens of the groups that it opens.

Shapes: B rows, H query heads, K KV heads, L queries, G groups of g tokens, S keys of a block, D and Dv widths.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from condense.ops.recall.choice import Choice, RecallSources, chosen_groups
from condense.ops.recall.index import GroupIndex, split_keys
from condense.ops.recall.store import StoreFormat
from condense.ops.spans import Hull, Source
from condense.ops.step.pages import Places, copied
from condense.ops.tensors.bias import per_entry
from condense.ops.torch.attend import BlockKeys, attend_block

# queries per block; the mask of a block has as many rows per query head
_BLOCK = 128


def attend_recall(
    q: Tensor, sources: RecallSources, choice: Choice, *, scale: float, softcap: float, pool: bool, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """See `condense.ops.attend_recall`. pool: queries see the entries of closed groups that they do not open."""
    (entries, store, window, spans), L, g = sources, q.shape[2], sources.group_size
    G = entries.k.shape[2]
    bias = per_entry(entries.bias, G, q.device)
    blocks = [(start, min(start + _BLOCK, L)) for start in range(0, L, _BLOCK)]

    def block(q: Tensor, start: int, hulls: list[Hull]) -> tuple[Tensor, Tensor]:
        stop, n = start + q.shape[2], hulls[0].hi
        closed, near = spans.at(start, stop, q.device)
        chosen = choice.at(start, stop, closed.hi, n)
        column = torch.arange(*hulls[1], device=q.device)
        masks = [((column >= near.lo[..., None]) & (column < near.hi[..., None])).expand(*chosen.shape[:3], -1)]
        seen = [_columns(window, *hulls[1])]
        if q.shape[2] == 1:
            groups = chosen_groups(chosen, choice.most(n))[:, :, 0]
            masks.insert(0, (groups < n).repeat_interleave(g, -1)[:, :, None])
            token = groups.clamp(max=n - 1)[..., None] * g + torch.arange(g, device=q.device)
            token = token.flatten(2)[..., None].expand(-1, store.k.shape[1], -1, -1)
            seen.insert(0, Source(*(x.gather(2, token.expand(-1, -1, -1, x.shape[3])) for x in (store.k, store.v))))
        else:
            masks.insert(0, chosen.repeat_interleave(g, -1))
            seen.insert(0, _columns(store, 0, n * g))
        if pool:
            masks.insert(0, (torch.arange(n, device=q.device) < closed.hi[..., None]) & ~chosen)
            seen.insert(0, _columns(entries, 0, n))
        mask = torch.cat(masks, dim=-1)
        empty = ~mask.any(-1, keepdim=True)
        k, v = torch.cat([source.k for source in seen], dim=2), torch.cat([source.v for source in seen], dim=2)
        of_entries = bias[..., :n] if pool and bias is not None else None
        keys = BlockKeys(k, v, mask | empty, empty, of_entries, isinstance(entries.bias, Tensor))
        return attend_block(q, keys, scale=scale, softcap=softcap, return_lse=return_lse)

    tensors = (q, entries.k, entries.v, store.k, store.v, window.k, window.v)
    if len(blocks) > 1 and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        # compute each block again in the backward pass: its masks and copied keys would take memory of order L * L
        block = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    work = zip(q.split(_BLOCK, dim=2), blocks, spans.hulls(blocks), strict=True)
    parts = [block(q_block, start, hulls) for q_block, (start, _), hulls in work]
    out = torch.cat([part[0] for part in parts], dim=2)
    return out, torch.cat([part[1] for part in parts], dim=2) if return_lse else None


def store_groups(form: StoreFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `condense.ops.backends.Operations`."""
    index, rest = split_keys(k)
    return *index, form.pack(k, v, rest)


def unpack_store(
    form: StoreFormat, pieces: Tensor, index: GroupIndex, widths: tuple[int, int], dtype: torch.dtype,
    places: Places | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `condense.ops.unpack_store`."""
    if places is not None:
        pieces = copied(pieces, places)
    return form.unpack(pieces.unflatten(3, (form.group_size, -1)).flatten(2, 3), *widths, dtype, index)


def _columns(source: Source, start: int, stop: int) -> Source:
    return Source(source.k[:, :, start:stop], source.v[:, :, start:stop])
