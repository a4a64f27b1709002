"""Causal attention over chosen blocks of keys and, besides, single chosen keys: for sparse prefill baselines.

Shapes: H query heads, K KV heads, L tokens in N blocks of `BLOCK`, C columns, D and Dv widths. One row.
"""

import functools
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128


class SparseKeys(NamedTuple):
    """The keys that each block of queries sees, apart from causality.

    blocks: bool ``[H, N, N]``, blocks of keys; the diagonal is True. columns: int64 ``[H, C]`` ascending, single tokens
    that all later queries see, L where a head has fewer.
    """

    blocks: Tensor
    columns: Tensor

    @classmethod
    def of_blocks(cls, blocks: Tensor) -> Self:
        """Keys in chosen blocks and in blocks of the diagonal, without single tokens."""
        own = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
        return cls(blocks | own, blocks.new_empty(len(blocks), 0, dtype=torch.int64))


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: SparseKeys, *, scale: float, compiled: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention of q ``[1, H, L, D]`` over the chosen tokens of k ``[1, K, L, D]`` and v ``[1, K, L, Dv]``.

    Compiled FlexAttention on CUDA; elsewhere, and if not ``compiled``, block by block, which is the definition. Returns
    out ``[1, H, L, Dv]`` in the dtype of q and the log-sum-exp ``[1, H, L]`` in float32 or wider.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if compiled and q.device.type == "cuda":
        return _by_flex(q, k, v, keys, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    L = q.shape[2]
    is_column = torch.zeros(q.shape[1], L + 1, dtype=torch.bool, device=q.device)
    is_column = is_column.scatter_(1, keys.columns, True)[:, :L]
    outs, lses = [], []
    for start in range(0, L, BLOCK):
        stop = min(start + BLOCK, L)
        position = torch.arange(stop, device=q.device)
        seen = keys.blocks[:, start // BLOCK, position // BLOCK] | is_column[:, :stop]
        causal = position <= torch.arange(start, stop, device=q.device)[:, None]
        scores = scale * (q[0, :, start:stop].to(wide) @ k[0, :, :stop].to(wide).mT)
        scores = scores.masked_fill(~(seen[:, None] & causal), float("-inf"))
        outs.append(scores.softmax(-1) @ v[0, :, :stop].to(wide))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs, dim=1).to(q.dtype)[None], torch.cat(lses, dim=1)[None]


def _by_flex(q: Tensor, k: Tensor, v: Tensor, keys: SparseKeys, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over blocks and over columns, two calls of FlexAttention joined by their log-sum-exps."""
    length = q.shape[2]
    # FlexAttention is compiled for every shape, so lengths are rounded up; the padding sees itself and is cut off
    L = _rounded(length)
    N = L // BLOCK
    q, k, v = (F.pad(x, (0, 0, 0, L - length)) for x in (q, k, v))
    block = torch.arange(N, device=q.device)
    lower = F.pad(keys.blocks, (0, N - keys.blocks.shape[2], 0, N - keys.blocks.shape[1])).tril()
    lower[:, block, block] = True
    out, lse = _over_blocks(q, k, v, lower, scale)
    if keys.columns.shape[1] == 0:
        return out[:, :, :length], lse[:, :, :length]
    columns = torch.where(keys.columns < length, keys.columns, L)
    more, more_lse = _over_columns(q, k, v, lower, columns, scale)
    total = torch.logaddexp(lse, more_lse)
    joined = torch.lerp(out.float(), more.float(), (more_lse - total).exp()[..., None].float())
    return joined[:, :, :length].to(q.dtype), total[:, :, :length]


def _over_blocks(q: Tensor, k: Tensor, v: Tensor, lower: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention ``[1, H, L, Dv]`` over chosen blocks ``lower`` bool ``[H, N, N]``, and its log-sum-exp."""
    H, N, L = q.shape[1], lower.shape[1], q.shape[2]
    diagonal = torch.arange(N, device=q.device, dtype=torch.int32)

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, N, device=q.device, dtype=torch.int32).expand(1, H, N).contiguous(),
        diagonal[None, None, :, None].expand(1, H, N, N).contiguous(),
        *_listed(lower.tril(-1)),
        BLOCK_SIZE=BLOCK,
        mask_mod=causal,
        seq_lengths=(L, L),
        compute_q_blocks=False,  # only gradients need them
    )
    return _attend(q, k, v, mask, scale)


def _over_columns(
    q: Tensor, k: Tensor, v: Tensor, lower: Tensor, columns: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention ``[1, H, L, Dv]`` over the tokens ``columns`` int64 ``[H, C]`` that lie outside of the blocks
    ``lower``, and its log-sum-exp; L in ``columns`` stands for none.
    """
    N, L = lower.shape[1], q.shape[2]
    padded = F.pad(columns, (0, -columns.shape[1] % BLOCK), value=L)
    inside = padded.clamp(max=L - 1)
    k_columns, v_columns = (x[0].gather(1, inside[..., None].expand(-1, -1, x.shape[-1]))[None] for x in (k, v))
    first = padded[:, ::BLOCK]
    reached = first[:, None] < (torch.arange(N, device=q.device)[:, None] + 1) * BLOCK  # [H, N, column blocks]
    position = padded.to(torch.int32)

    def outside(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = position[h, key]
        return (at <= query) & ~lower[h, query // BLOCK, torch.clamp(at, max=L - 1) // BLOCK]

    mask = BlockMask.from_kv_blocks(
        *_listed(reached), BLOCK_SIZE=BLOCK, mask_mod=outside, seq_lengths=(L, padded.shape[1]), compute_q_blocks=False
    )
    return _attend(q, k_columns, v_columns, mask, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    # FlexAttention has tiles for widths of 64, 128 and 256; for widths between 128 and 256 (MLA's 192) use smaller ones
    options = {"kernel_options": {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2}} if 128 < q.shape[-1] < 256 else {}
    out, aux = _flex()(q, k, v, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


def _rounded(length: int) -> int:
    """The length rounded up: to one of eight steps between powers of two, and to whole blocks."""
    step = max(BLOCK, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Bool ``[H, N, M]`` as FlexAttention wants it: counts ``[1, H, N]`` and indices, the chosen ones first."""
    counts = chosen.sum(2, dtype=torch.int32)
    # each index' place among the chosen ones, or behind them; computed, because sorting takes longer
    place = torch.where(chosen, chosen.cumsum(2), counts[..., None] + (~chosen).cumsum(2)) - 1
    number = torch.arange(chosen.shape[2], device=chosen.device, dtype=torch.int32)
    order = torch.empty_like(place, dtype=torch.int32).scatter_(2, place, number.expand_as(place))
    return counts[None], order[None]


@functools.cache
def _flex() -> Any:
    # beyond this number of shapes, stop with an error: PyTorch would go on uncompiled, with all scores in memory
    limit = torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024)
    return limit(torch.compile(flex_attention, dynamic=False, fullgraph=True))
