"""Recall's cache layer of fixed size at fixed addresses, for compiled decode and CUDA graphs.

It has room for all groups that ``max_cache_len`` tokens can close, with their entries, their index and their exact
tokens, and a ring for the tokens of open groups and of the window. One new token is a
`condense.ops.recall.recall_step`; several are read as by the growing cache and written back in place.

Shapes as in `condense.ops.recall.state`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from condense.caches.buffers import Buffers
from condense.caches.static import StaticCondensedLayer
from condense.methods import Recall
from condense.ops.recall import RecallState, recall_step


class StaticRecallLayer(StaticCondensedLayer):
    """One attention layer's past for up to ``max_cache_len`` slots, padding included, for `condense.Recall`.

    As `StaticCondensedLayer`, but for the buffers, a `condense.ops.recall.RecallState`, and the step over them. All
    exact tokens stay on the device: the layer takes more memory than a dense one.
    Raises ValueError, no memory taken, for keys that the index cannot hold (4 bits and an odd width).
    """

    def __init__(self, method: Recall, max_cache_len: int) -> None:
        super().__init__(method, max_cache_len)
        self.recall_settings = method.step_settings

    def _take_memory(self, k: Tensor, v: Tensor, M: int, W: int) -> RecallState:
        (B, K, _, D), Dv = k.shape, v.shape[3]
        index, tokens = self.recall_settings.index, M * self.recall_settings.rule.chunk
        num_codes, num_grid = index.widths(D)

        def zeros(columns: int, width: int, dtype: torch.dtype = k.dtype) -> Tensor:
            return k.new_zeros(B, K, columns, width, dtype=dtype)

        return RecallState(
            entries_k=zeros(M, D),
            entries_v=zeros(M, Dv),
            codes=zeros(M, num_codes, k.dtype if index.bits == 16 else torch.uint8),
            grid=zeros(M, num_grid, torch.promote_types(k.dtype, torch.float32)),
            store_k=zeros(tokens, D),
            store_v=zeros(tokens, Dv),
            ring_k=zeros(W, D),
            ring_v=zeros(W, Dv),
            seen=torch.zeros(B, dtype=torch.int64, device=k.device),
        )

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, buffers: Buffers, scale: float, real: Tensor | None) -> Tensor:
        assert isinstance(buffers, RecallState)
        return recall_step(q, k, v, buffers, self.recall_settings, scale=scale, real=real, latent=self.latent_width)
