"""Named baselines: dense attention of other libraries, and FlexAttention with the mask of a method.

FlexAttention reads two sources as keys side by side. The condensed source is padded to whole blocks, so that no block
holds keys of both.

Shapes: B rows, H query heads, K KV heads, L queries, M entries (P once padded), N tokens of the window,
D and Dv widths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from condense.methods import Context, Dense
from condense.ops.spans import joined_bias
from speed.problems import Inputs, pooled

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FLEX_BLOCK = 128


class Baseline(NamedTuple):
    """A baseline: its description, the operations that it has rows for, and whether it needs CUDA."""

    about: str
    ops: tuple[str, ...]
    needs_cuda: bool = True
    backend: SDPBackend | None = None


_WHOLE, _ALL = ("forward", "backward"), ("forward", "backward", "decode")
_SDPA = "scaled_dot_product_attention"
BASELINES = {
    "cudnn": Baseline(f"cuDNN through {_SDPA}", _ALL, backend=SDPBackend.CUDNN_ATTENTION),
    "cudnn_rows": Baseline(
        "the same with heads that share a KV head as rows of one", ("decode",), backend=SDPBackend.CUDNN_ATTENTION
    ),
    "flash": Baseline(f"PyTorch's flash attention through {_SDPA}", _ALL, backend=SDPBackend.FLASH_ATTENTION),
    "flex": Baseline("FlexAttention, compiled, causal", _WHOLE),
    "flex_mask": Baseline("FlexAttention, compiled, our mask over entries and tokens", _WHOLE),
    "sdpa": Baseline(f"{_SDPA}, PyTorch's own choice", _ALL, needs_cuda=False),
}
GPU_BASELINES = ("cudnn", "cudnn_rows", "flash", "flex", "flex_mask")
# baselines that compute attention over all keys: a condensed method's speedup is measured against these
DENSE_BASELINES = tuple(name for name in BASELINES if name != "flex_mask")


def dense_attention(name: str, inputs: Inputs) -> Attend:
    """Causal attention of whole sequences as a function of q, k and v."""
    if name == "flex":
        return flex_attention(pooled(Dense(), inputs), inputs.q.shape[2], scale=inputs.scale)
    gqa = inputs.q.shape[1] != inputs.k.shape[1]
    return _sdpa(name, is_causal=True, scale=inputs.scale, enable_gqa=gqa)


def dense_step(name: str, num_q: int, num_kv: int, scale: float) -> Attend:
    """One query ``[B, H, 1, D]`` over a full cache, ``[B, K, L, D]`` and ``[B, K, L, Dv]``."""
    if name == "cudnn_rows":
        attend = _sdpa(name, scale=scale)
        return lambda q, k, v: attend(q.view(q.shape[0], num_kv, -1, q.shape[3]), k, v)
    return _sdpa(name, scale=scale, enable_gqa=num_q != num_kv)


def _sdpa(name: str, **options: Any) -> Attend:
    """PyTorch's attention, through the baseline's backend if it names one."""
    backend = BASELINES[name].backend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend


def joined_keys(context: Context) -> tuple[Tensor, Tensor]:
    """Keys ``[B, K, P + N, D]`` and values ``[B, K, P + N, Dv]``: entries, zeros, window."""
    entries, window = context.sources
    pad = (0, 0, 0, -entries.k.shape[2] % FLEX_BLOCK)
    return torch.cat([F.pad(entries.k, pad), window.k], dim=2), torch.cat([F.pad(entries.v, pad), window.v], dim=2)


def block_mask(context: Context, length: int) -> Any:
    """The visible keys of each of ``length`` queries, for spans that are the same in all heads and rows.

    Compiled, so that no mask of all queries and keys stands in memory.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    M, N = (source.k.shape[2] for source in context.sources)
    P, device = M + -M % FLEX_BLOCK, context.window.k.device
    spans = [[x[0, 0].to(torch.int32) for x in span] for span in context.spans.at(0, length, device)]
    (_, entries_hi), (window_lo, window_hi) = spans

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_window = (key - P >= window_lo[query]) & (key - P < window_hi[query])
        return torch.where(key < P, key < entries_hi[query], in_window)

    create = torch.compile(create_block_mask)
    return create(mask_mod, None, None, length, P + N, device=str(device), BLOCK_SIZE=FLEX_BLOCK)


def flex_attention(context: Context, length: int, *, scale: float) -> Attend:
    """Compiled FlexAttention of q ``[B, H, L, D]`` over `joined_keys`: a function of q, keys and values.

    Raises ValueError for a bias that differs between rows or heads.
    """
    from torch.nn.attention import flex_attention as flex

    # compiled for fixed shapes; the reset keeps guards of earlier lengths from being checked in every call
    torch.compiler.reset()
    mask, entries, score_mod = block_mask(context, length), context.entries, None
    bias = joined_bias([entries.bias], [entries.k.shape[2]], entries.k.device)
    if bias is not None:
        if bias.shape[:2] != (1, 1):
            raise ValueError("FlexAttention with our mask is for a bias that all heads and rows share")
        padded = F.pad(bias[0, 0].float(), (0, mask.seq_lengths[1] - bias.shape[2]))

        def score_mod(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + padded[key]

    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return attend
