"""Pages in host memory: the exact tokens of layers that keep them there, one page for each block of the engine's pool;
and the number of requests that have slots on the device for copies of them.

A page has the number of the block that holds the index of the same groups. So whoever owns the block owns the page, and
what an engine does with blocks (prefixes that requests share, preempted requests) needs no code here. Blocks that hold
windows have such a page too, which nobody reads.

Shapes: P blocks, K KV heads, N groups of a page, n bytes of a group's tokens.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from condense.ops.tensors.pinned import pinned_zeros
from condense.serving.blocks import ServedLayer, blocks_of_request, page_sizes

# share of the free host memory that may be pinned
_SHARE = 0.9


def host_bytes(layers: Collection[ServedLayer]) -> int:
    """Bytes in host memory that go with each block, for all layers."""
    far = page_sizes(layers).far
    return sum(layer.host_bytes(far) for layer in layers)


def copied_bytes(layers: Collection[ServedLayer]) -> int:
    """Bytes of a request's slots in all layers, which lie on the device beside the pages."""
    return sum(layer.copied_bytes for layer in layers)


def slot_rows(layers: Collection[ServedLayer], longest: int, room: int) -> int:
    """The number of requests of ``longest`` tokens that fit with their slots into ``room`` bytes on the device."""
    return max(0, room) // (blocks_of_request(layers, longest).total_bytes + copied_bytes(layers))


def host_pages(served: ServedLayer, pages: Tensor) -> Tensor | None:
    """The part in host memory of a layer's pages of records ``[P, K, N, ...]``: uint8 ``[P, K, N, n]``, pinned beside a
    GPU; None for a layer that needs none.
    """
    shape = *pages.shape[:3], served.host_slot_bytes
    if pages.numel() == 0 or served.host_slot_bytes == 0:
        return None
    return pinned_zeros(shape, torch.uint8, pages.device) if pages.is_cuda else torch.zeros(shape, dtype=torch.uint8)


class HostMemory:
    """The pages in host memory of all layers of a model in one process. ranks: processes on this host with as many."""

    def __init__(self, layers: Sequence[ServedLayer], ranks: int) -> None:
        self.layers, self._ranks = layers, ranks
        self._free: int | None = None

    def measure(self, available: int) -> None:
        """Note the bytes that the host has left before any rank of this engine takes pages; later calls change nothing.

        Ranks take their pages at different times: what is left in between is not what all of them have together.
        """
        if self._free is None:
            self._free = int(available * _SHARE)

    def pages_of(self, served: ServedLayer, pages: Tensor) -> Tensor | None:
        """The `host_pages` of a layer. pages: the engine's, of the same groups.

        Raises ValueError if those of all layers and ranks need more than `measure` noted.
        """
        if pages.numel() == 0 or served.host_slot_bytes == 0:
            return None
        assert served.plan is not None
        assert self._free is not None
        far, num = page_sizes(self.layers).far, len(pages)
        # where an engine pads pages to one size, one of its pages may be several of ours
        block = host_bytes(self.layers) * self._ranks * pages.shape[2] // served.plan.entry_slots(far)
        if num * block > self._free:
            fewer = f"give --num-gpu-blocks-override {self._free // block}, or " if self._free >= block else "use "
            raise ValueError(
                f"tokens in host memory take {num * block / 2**30:.1f} GiB for {num:,} blocks, of which the host has "
                f"{self._free / 2**30:.1f}: {fewer}store='device'"
            )
        return host_pages(served, pages)
