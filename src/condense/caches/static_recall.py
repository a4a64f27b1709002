"""Recall's cache layer of fixed size at fixed addresses, for compiled decode and CUDA graphs.

It has room for all groups that ``max_cache_len`` tokens can close, with their entries, their index and their exact
tokens, and a ring for the tokens of open groups and of the window. One new token is a
`condense.ops.decode_step`; several are read as by the growing cache and written back in place.

Shapes as in `condense.ops.step.state`.
"""

from __future__ import annotations

from torch import Tensor

from condense.caches.static import StaticCondensedLayer
from condense.caches.token_store import PinnedCopies, check_store, fetch_tokens, refuse_reorder
from condense.methods import Recall
from condense.ops import StepState
from condense.ops.tensors.per_row import max_row
from condense.state import num_entries


class StaticRecallLayer(PinnedCopies, StaticCondensedLayer):
    """One attention layer's past for up to ``max_cache_len`` slots, padding included, for `condense.Recall`.

    As `StaticCondensedLayer`, but for the buffers, a `condense.ops.StepState`, and the step over them.
    Raises ValueError, no memory taken, for keys that the index cannot hold (4 bits and an odd width), and for what
    `condense.caches.token_store.check_store` refuses; RuntimeError, no memory taken, where the host cannot pin what a
    store in its memory needs.
    """

    def __init__(self, method: Recall, max_cache_len: int) -> None:
        super().__init__(method, max_cache_len)
        self.recall = method

    def _take_memory(self, k: Tensor, v: Tensor, M: int, W: int) -> StepState:
        check_store(self.settings, k, v, self.latent_width, groups=M)
        return super()._take_memory(k, v, M, W)

    def fetch(self) -> Tensor | None:
        """As `condense.caches.RecallLayer.fetch`, of as many tokens as rows without padding would have stored."""
        if self.buffers is None or (slots := self.count_slots()) == 0:
            return None
        tokens = max_row(num_entries(self.method, slots)) * self.recall.group_size
        return fetch_tokens(self.buffers.store, tokens, self.buffers.seen.device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of ``beam_idx`` (int ``[B]``), in place. Raises ValueError for a store in host memory."""
        refuse_reorder(self.recall)
        super().reorder_cache(beam_idx)
