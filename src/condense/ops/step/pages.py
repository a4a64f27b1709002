"""Pages: where the tokens, entries and mean queries of a request lie, and which tokens of it are new.

Shapes: R requests, T new tokens of all requests, K KV heads, P pages, N slots of a page, C columns of a slot, D and Dv
widths, g tokens per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Pages of one kind, and those of each request.

    cache ``[P, K, N, C]``, any strides but for the last, 1. table int32 ``[R, n]``, on its device: the page of slots
    ``[i * N, (i + 1) * N)`` of a request.
    """

    cache: Tensor
    table: Tensor

    @property
    def slots(self) -> int:
        """Slots of a page, N."""
        return self.cache.shape[2]

    def first(self, count: int) -> Pages:
        """The same of the first requests."""
        return Pages(self.cache, self.table[:count])


class PagedState(NamedTuple):
    """What one layer keeps of all requests; all tensors in the dtype of k, on one device.

    window: the token at position t of its request in slot t, ``[k | v]``, C = D + Dv. entries: the entry of group j in
    slot ``j + summary_delay / g``, likewise. ring: the mean query of position t in the first D columns of slot
    ``t % N`` of the request's only page; None for methods that need one query or none (`condense.serving.plan`).
    Only slots that a request has filled, and still needs, are read: the others may hold anything.
    """

    window: Pages
    entries: Pages
    ring: Pages | None

    def first(self, count: int) -> PagedState:
        """The same of the first requests."""
        ring = None if self.ring is None else self.ring.first(count)
        return PagedState(self.window.first(count), self.entries.first(count), ring)


@dataclass(frozen=True)
class NewTokens:
    """Which new tokens belong to which request; they are packed, one request after another.

    starts: R + 1 ints: request r has new tokens ``[starts[r], starts[r + 1])``. seen: R ints, tokens of each request,
    the new ones included. seen_on_device: the same, int32 ``[R]``. num_steps: the first so many requests have one new
    token each; those at the end of all requests, if all have one, may be places left empty, with 0 on the device.
    """

    starts: list[int]
    seen: list[int]
    seen_on_device: Tensor
    num_steps: int = 0
