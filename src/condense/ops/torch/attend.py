"""The `torch` backend: blocks of queries over PyTorch's fused attention; any device, differentiable.

A block of queries reads only its hull of every source, so memory is linear in L, also with gradients. With Recall it
reads all closed groups under a mask, which takes as long as dense attention.

Shapes: B rows, H query heads, K KV heads, R = H / K, L queries, N window tokens, G groups of g tokens, S keys.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from condense.ops.recall.choice import IndexChoice, RecallSources
from condense.ops.recall.rest import GroupMeans, rest_weights, with_rest
from condense.ops.spans import Hull, RuleSpans, Source, Spans, joined_bias
from condense.ops.types import AttendOptions, soft_cap

# With more keys per query than this, a soft cap, or biases of keys' own, blocks are computed again in the backward
# pass, as keeping their keys, masks and scores would take too much memory.
_MAX_KEPT = 4
# queries per block in `attend_recall`, and so rows per query head in a block's mask
_RECALL_BLOCK = 128


class BlockKeys(NamedTuple):
    """The keys of a block of queries: k ``[B, K, S, D]``, v ``[B, K, S, Dv]``, and masks.

    mask: bool ``[B|1, K|1, L, S]``, True where a query sees a key. empty: bool ``[B|1, K|1, L, 1]``, queries that see
    nothing; their rows of the mask are all True. Both are None if every query sees every key. bias: ``[B|1, K|1, M]``
    of the first M keys, None for none. own: each of these keys has a bias of its own, which depends on its tokens.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    empty: Tensor | None
    bias: Tensor | None
    own: bool = False


def attend(q: Tensor, sources: Sequence[Source], spans: Spans, options: AttendOptions) -> tuple[Tensor, Tensor | None]:
    """Attention over sources under one softmax (`condense.ops.attend`), block by block."""
    H, L = q.shape[1], q.shape[2]
    (scale, softcap, dropout_p, return_lse), window = options, sources[-1]
    K, N = window.k.shape[1], window.k.shape[2]
    # scale > 0, because PyTorch's causal kernel gives NaN on a CPU for scale <= 0
    if not return_lse and not softcap and scale > 0 and (L == N or L == 1) and spans.is_causal(L, N):
        causal: dict[str, Any] = {"is_causal": True} if L > 1 else {}  # while compiling, `L > 1` itself is not a bool
        out = F.scaled_dot_product_attention(
            q, window.k, window.v, dropout_p=dropout_p, scale=scale, enable_gqa=H != K, **causal
        )
        return out, None
    own = any(isinstance(source.bias, Tensor) for source in sources)
    size = _block_size(q.device, H // K)
    blocks = [(start, min(start + size, L)) for start in range(0, L, size)]
    hulls = spans.hulls(blocks)

    def block(q: Tensor, start: int, hulls: list[Hull]) -> tuple[Tensor, Tensor]:
        k = torch.cat([source.k[:, :, lo:hi] for source, (lo, hi) in zip(sources, hulls, strict=True)], dim=2)
        v = torch.cat([source.v[:, :, lo:hi] for source, (lo, hi) in zip(sources, hulls, strict=True)], dim=2)
        stop = start + q.shape[2]
        # a single query needs no mask if all rows are alike, because it sees all keys of its hulls
        is_hull = q.shape[2] == 1 and isinstance(spans, RuleSpans) and spans.same_in_all_rows() is not None
        mask, empty = (None, None) if is_hull else _visible(spans, start, stop, hulls, q.device)
        return attend_block(q, BlockKeys(k, v, mask, empty, _bias(sources, hulls, q.device), own), options)

    work = zip(q.split(size, dim=2), blocks, hulls, strict=True)
    tensors = [q, *(x for source in sources for x in (source.k, source.v))]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        num_keys = sum(hi - lo for hulls_of_block in hulls for lo, hi in hulls_of_block)
        if num_keys > _MAX_KEPT * L or softcap or own:
            block = _computed_again(block, preserve_rng_state=dropout_p > 0)
    outs, lses = zip(*(block(q_block, start, of_block) for q_block, (start, _), of_block in work), strict=True)
    return _joined(outs), _joined(lses) if return_lse else None


def _computed_again(
    block: Callable[..., tuple[Tensor, Tensor]], *, preserve_rng_state: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """``block``, computed again in the backward pass; but kept if it is not compiled and `torch.func` runs it."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return block
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All blocks of queries, one after another; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=2)


def _bias(sources: Sequence[Source], hulls: list[Hull], device: torch.device) -> Tensor | None:
    """Biases of a block's keys up to the last source that has one, ``[B|1, K|1, n]``."""
    num_biased = max([n for n, source in enumerate(sources, start=1) if source.bias is not None], default=0)
    biases = [
        source.bias[..., lo:hi] if isinstance(source.bias, Tensor) else source.bias
        for source, (lo, hi) in zip(sources[:num_biased], hulls[:num_biased], strict=True)
    ]
    return joined_bias(biases, [hi - lo for lo, hi in hulls[:num_biased]], device)


def _block_size(device: torch.device, ratio: int) -> int:
    """Queries in one fused call, for ``ratio`` query heads per KV head.

    Few on a CPU, because a block also reads about as many window tokens as it has queries, which are then masked. Many
    on a GPU, where small blocks took 6 to 9 times as long (8K to 32K tokens, H200): launching takes longer than work.
    """
    rows, most = (1024, 512) if device.type == "cpu" else (8192, 2048)
    return max(1, min(most, rows // ratio))


def _visible(spans: Spans, start: int, stop: int, hulls: list[Hull], device: torch.device) -> tuple[Tensor, Tensor]:
    """``mask`` over the block's hulls and ``empty`` of `BlockKeys`, by which no softmax gives NaN."""
    block = [(lo[..., None], hi[..., None]) for lo, hi in spans.at(start, stop, device)]
    empty = torch.stack(torch.broadcast_tensors(*(lo >= hi for lo, hi in block))).all(0)
    masks = []
    for (lo, hi), hull in zip(block, hulls, strict=True):
        entry = torch.arange(*hull, device=device)
        masks.append((entry >= lo) & (entry < hi) | empty)
    return torch.cat(masks, dim=-1), empty


def attend_block(q: Tensor, keys: BlockKeys, options: AttendOptions) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, Dv]`` and log-sum-exp ``[B, H, L]`` of one block of queries ``[B, H, L, D]``.

    The log-sum-exp may be an empty tensor if it was not asked for.
    """
    (k, v, mask, empty, bias, own), (scale, softcap, dropout_p, return_lse) = keys, options
    B, H, L, _ = q.shape
    K, S = k.shape[1], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    if S == 0:
        # sums of k and v keep the autograd graph connected, so that every input has a gradient
        nothing = q[..., :1].masked_fill(q.new_ones(1, dtype=torch.bool), 0.0) + k.sum() + v.sum()
        return nothing.expand(B, H, L, v.shape[-1]), torch.full((B, H, L), float("-inf"), dtype=wide, device=q.device)
    # heads that share a KV head become rows of one call, so that each key is read once for all of them
    rows = q.unflatten(1, (K, H // K)).flatten(2, 3)
    # PyTorch's fused attention has no soft cap, and takes biases in q's dtype only. In 16 bits `_key_offsets` subtracts
    # the largest bias from all: if biases depend on tokens, a later token's would change what earlier queries compute
    apart = softcap > 0 or (own and q.dtype.itemsize < 4)
    attn_mask = None
    if not apart and bias is not None and bias.shape[-1] > 0:
        attn_mask = _key_offsets(bias.to(wide), S, q.dtype)[:, :, None]
    if mask is not None and empty is not None:
        mask, empty = (x[:, :, None].expand(-1, -1, H // K, -1, -1).flatten(2, 3) for x in (mask, empty))
        # a query that sees nothing may hold NaN: zeroed here, and its output below, so that no gradient is NaN
        rows = rows.masked_fill(empty, 0.0)
        attn_mask = mask if attn_mask is None else attn_mask.masked_fill(~mask, float("-inf"))
    lse = q.new_empty(0)
    if apart or return_lse:
        scores = _scores(rows, k, bias, mask, scale, softcap)
        lse = scores.logsumexp(-1) if return_lse else lse
    if apart:
        out = (F.dropout(scores.softmax(-1), dropout_p) @ v.to(wide)).to(q.dtype)
    else:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty[..., 0], float("-inf")) if return_lse else lse
    return _heads(out, L), _heads(lse, L) if return_lse else lse


def _heads(rows: Tensor, L: int) -> Tensor:
    """Reshape ``[B, K, R * L, ...]`` to ``[B, H, L, ...]``."""
    return rows.unflatten(2, (-1, L)).flatten(1, 2)


def _scores(rows: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Scores ``[B, K, R * L, S]``, float32 or wider, computed again because the fused call does not return them."""
    wide = torch.promote_types(k.dtype, torch.float32)
    scores = soft_cap((rows.to(wide) @ k.to(wide).mT) * scale, softcap)
    if bias is not None:
        scores = scores + F.pad(bias.to(wide), (0, k.shape[2] - bias.shape[-1]))[:, :, None]
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _key_offsets(bias: Tensor, S: int, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[B|1, K|1, S]`` of all keys in ``dtype`` from the bias ``[B|1, K|1, M]`` of the first M keys.

    Fused attention takes the mask in the dtype of q, and rounding ln(16) to bfloat16 changes a weight by 0.7 percent.
    A constant added to all scores does not change a softmax, so the largest bias, rounded to ``dtype``, is subtracted
    from every key: biases near the largest become small numbers, which round with a small error, and keys without a
    bias get the negated constant, which is exact. In 16 bits biases must not depend on tokens.
    """
    offsets = F.pad(bias, (0, S - bias.shape[-1]))
    if dtype.itemsize < 4:
        offsets = offsets - bias.detach().amax(-1, keepdim=True).to(dtype).to(bias.dtype)
    return offsets.to(dtype)


def attend_recall(
    q: Tensor, sources: RecallSources, choice: IndexChoice, options: AttendOptions, means: GroupMeans | None
) -> tuple[Tensor, Tensor | None]:
    """Attention to open groups, the window and one token for the rest (`condense.ops.attend_recall`), by blocks."""
    (store, window, spans), L, g = sources, q.shape[2], sources.group_size
    blocks = [(start, min(start + _RECALL_BLOCK, L)) for start in range(0, L, _RECALL_BLOCK)]

    def block(q: Tensor, start: int, hulls: list[Hull]) -> tuple[Tensor, Tensor]:
        stop, n = start + q.shape[2], hulls[0].hi
        closed, near = spans.at(start, stop, q.device)
        chosen = choice.at(start, stop, closed.hi, n)
        column = torch.arange(*hulls[1], device=q.device)
        is_near = ((column >= near.lo[..., None]) & (column < near.hi[..., None])).expand(*chosen.shape[:3], -1)
        mask = torch.cat([chosen.repeat_interleave(g, -1), is_near], dim=-1)
        empty = ~mask.any(-1, keepdim=True)
        k, v = (
            torch.cat([stored[:, :, : n * g], x[:, :, slice(*hulls[1])]], dim=2)
            for stored, x in zip(store[:2], window[:2], strict=True)
        )
        out, lse = attend_block(q, BlockKeys(k, v, mask | empty, empty, None), options)
        if means is None:
            return out, lse
        weight = rest_weights(choice, start, stop, chosen, closed.hi, options.softcap)
        return with_rest(out, lse, weight, means.at(start, stop, spans, g))

    tensors = (q, store.k, store.v, window.k, window.v, *(() if means is None else (means.means,)))
    if len(blocks) > 1 and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        # compute each block again in the backward pass: its masks and copied keys would take memory of order L * L
        block = _computed_again(block, preserve_rng_state=False)
    work = zip(q.split(_RECALL_BLOCK, dim=2), blocks, spans.hulls(blocks), strict=True)
    outs, lses = zip(*(block(q_block, start, hulls) for q_block, (start, _), hulls in work), strict=True)
    return _joined(outs), _joined(lses) if options.return_lse else None


def group_tokens(x: Tensor, numbers: Tensor, g: int) -> Tensor:
    """The tokens ``[B, K, r * g, width]`` of the groups with these numbers ``[B, K|1, r]``; x ``[B, K, N, width]``."""
    columns = (numbers[..., None] * g + torch.arange(g, device=numbers.device)).flatten(2)[..., None]
    return x.gather(2, columns.expand(-1, x.shape[1], -1, x.shape[3]))
