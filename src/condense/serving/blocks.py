"""Blocks: the pages of all layers side by side, as vLLM packs them, and how many of them a request holds.

All pages come from one pool of blocks of one size. Far pages hold what stays as long as the request: entries, and the
tokens of dense layers. Those of all layers lie side by side in the same blocks, F tokens to each. Windows, those of the
model's own sliding layers too, lie in other blocks, N tokens to each: layers with equal windows side by side, in as
many parts as are needed to fit; and so do rings. A block is as large as the largest of these, mostly the far pages.

Shapes: F tokens of a far page, N tokens of a page of the window, K KV heads, D and Dv widths.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from condense.ops.backends import step_backend
from condense.ops.step import record_format
from condense.ops.step.pages import window_columns
from condense.serving.plan import SLOTS, ServingPlan

# fewest groups of a far page
_LEAST_GROUPS = 8
# most pages of the widest window for the tokens of one far page
_MOST_PARTS = 16
# length, in windows, of the request for which page sizes are chosen where several tables are needed
_WINDOWS = 16
# vLLM's kernels for dense attention need pages of a multiple of 32 tokens on a CPU, of 16 elsewhere
_DENSE = 32
# vLLM's tables of blocks have room for a multiple of this number of tokens
_TABLE = 128


@dataclass(frozen=True)
class ServedLayer:
    """One layer as an engine runs it.

    plan: None for the engine's own attention. heads: K; widths: D and Dv; dtype: of tokens. latent: columns of the keys
    that are the values (MLA), else 0. sliding: tokens that the engine's own attention sees, None for all.
    """

    plan: ServingPlan | None
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype
    latent: int = 0
    sliding: int | None = None

    @property
    def kept_tokens(self) -> int | None:
        """Tokens that pages of the window keep, which reading the next token needs; None without a window."""
        return self.sliding if self.plan is None else self.plan.kept_tokens

    @property
    def group_size(self) -> int:
        """The number of tokens that a page must hold a multiple of."""
        if self.plan is None:
            return SLOTS if self.sliding else _DENSE
        return SLOTS if self.plan.settings.rule.max_chunks is not None else self.plan.group_size

    @property
    def least_page(self) -> int:
        """The fewest tokens of a far page, enough for all groups with entries where only the first groups have them."""
        most = None if self.plan is None else self.plan.settings.rule.max_chunks
        of_first = 0 if self.plan is None or most is None else most * self.plan.group_size
        return max(_LEAST_GROUPS * self.group_size, of_first)

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of a token, of one KV head."""
        return sum(self.widths) * self.dtype.itemsize

    @property
    def window_bytes(self) -> int:
        """Bytes of a token in pages of the window, of one KV head, its part of a sum of values included."""
        if self.plan is None:
            return self.token_bytes
        _, columns = window_columns(*self.widths, self.plan.settings, self.dtype.itemsize)
        return columns * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of entries, of one KV head."""
        assert self.plan is not None
        if self.plan.has_records:
            return record_format(self.plan.settings, self.widths, self.dtype).nbytes
        return self.token_bytes

    @property
    def host_slot_bytes(self) -> int:
        """Bytes in host memory of a slot of entries, of one KV head."""
        if self.plan is None or not self.plan.has_records:
            return 0
        return record_format(self.plan.settings, self.widths, self.dtype).nbytes_apart

    @property
    def copied_bytes(self) -> int:
        """Bytes of a request's slots: copies of groups in host memory, which lie on the device beside the pages."""
        choice = None if self.plan is None else self.plan.settings.choice
        return 0 if choice is None else self.heads * choice.store.slots * self.host_slot_bytes

    def host_bytes(self, far: int) -> int:
        """Bytes in host memory that go with a far page of ``far`` tokens."""
        return 0 if self.plan is None else self.heads * self.plan.entry_slots(far) * self.host_slot_bytes

    def far_bytes(self, far: int) -> int:
        """Bytes of a far page of ``far`` tokens: their entries, or keys and values for full attention."""
        if self.plan is None:
            return 0 if self.sliding else self.heads * far * self.token_bytes
        return self.heads * self.plan.entry_slots(far) * self.slot_bytes

    def has_step(self, device: torch.device, longest: int) -> bool:
        """True if kernels read single tokens of requests of up to ``longest`` tokens, so that graphs may record them.

        False for the engine's own attention.
        """
        if self.plan is None:
            return False
        groups = -(-longest // self.plan.group_size)
        settings, latent = self.plan.settings, self.latent
        return step_backend(device, self.dtype, self.widths, settings, latent=latent, entries=groups) == "triton"


class PageSizes(NamedTuple):
    """Tokens of a page. far: F, of a far page; near: N, of a page of a window, a divisor of F."""

    far: int
    near: int


def table_columns(longest: int, page: int) -> int:
    """Columns of vLLM's tables for requests of up to ``longest`` tokens in pages of ``page`` tokens."""
    unit = math.lcm(page, _TABLE)
    return -(-longest // unit) * (unit // page)


def page_sizes(layers: Collection[ServedLayer]) -> PageSizes:
    """The page sizes for the layers of a model: one F for all, so that far pages have one table of blocks.

    Windows use the same blocks. F = k N, with the least k for which N tokens of the widest window take no more bytes
    than F tokens in far pages. Where far pages are so small that vLLM gives the layers of a window several tables, k is
    the one with the fewest bytes. F is the smallest multiple of all group sizes for which kernels load whole tiles.
    """
    groups, least = [layer.group_size for layer in layers], max(layer.least_page for layer in layers)
    sample = SLOTS * math.lcm(*groups)
    sample *= -(-least // sample)
    kept = sum(layer.far_bytes(sample) for layer in layers)
    # bytes of ``sample`` tokens in windows of each length, summed over the layers with that window
    of_window: Counter[int] = Counter()
    for layer in layers:
        if layer.kept_tokens is not None:
            of_window[layer.kept_tokens] += layer.heads * layer.window_bytes * sample
    k = -(-max(of_window.values()) // kept)

    def sizes(k: int) -> PageSizes:
        unit = math.lcm(SLOTS * k, *groups)
        far = -(-least // unit) * unit
        return PageSizes(far, far // k)

    if k <= _MOST_PARTS:
        return sizes(k)
    # the fewest tables among which k parts can be spread
    tables = -(-k // _MOST_PARTS)
    tried = [sizes(parts) for parts in range(_MOST_PARTS, (k - 1) // tables, -1)]
    return min(tried, key=lambda size: blocks_of_request(layers, _WINDOWS * max(of_window), sizes=size).total_bytes)


def own_page(layers: Collection[ServedLayer], sizes: PageSizes) -> int:
    """Tokens of a page of the engine's own layers, for which it takes one size: N if all of them slide, else F."""
    own = [layer.sliding for layer in layers if layer.plan is None]
    return sizes.near if own and all(own) else sizes.far


class BlockCount(NamedTuple):
    """Blocks of one request, and the bytes of a block."""

    blocks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def share(self, layers: Collection[ServedLayer], length: int) -> float:
        """Bytes of all blocks, as a share of the bytes of the tokens that the model's own attention sees."""
        seen = sum(min(length, layer.sliding or length) * layer.heads * layer.token_bytes for layer in layers)
        return self.total_bytes / seen


def blocks_of_request(
    layers: Collection[ServedLayer], length: int, num_new: int = 1, sizes: PageSizes | None = None
) -> BlockCount:
    """The most blocks that a request of ``length`` tokens holds while its last ``num_new`` are read.

    Counted as vLLM forms its groups; `tests/serving/vllm/test_manager.py` holds both together. sizes: those of
    `page_sizes` by default.
    """
    sizes = page_sizes(layers) if sizes is None else sizes
    (far, near), own = sizes, own_page(layers, sizes)
    of_far = sum(layer.far_bytes(far) for layer in layers)
    # bytes of the pages that share tables, by the tokens that their window keeps (0 for rings) and those of a page
    pages: dict[tuple[int, int], list[int]] = {}
    for layer in layers:
        if layer.kept_tokens is not None:
            size = own if layer.plan is None else near
            pages.setdefault((layer.kept_tokens, size), []).append(size * layer.heads * layer.window_bytes)
        if layer.plan is not None and layer.plan.ring_slots:
            ring = layer.heads * layer.widths[0] * layer.dtype.itemsize
            pages.setdefault((0, 1), []).append(layer.plan.ring_slots * ring)
    block = max(of_far, *(max(each) for each in pages.values()))
    count = -(-length // far)
    for (kept, size), each in pages.items():
        tables = -(-len(each) // max(1, block // max(each)))
        tokens = min(length, kept - 1 + num_new)
        # a window may begin anywhere in its first page
        count += tables * (min(-(-tokens // size) + 1, -(-length // size)) if kept else 1)
    return BlockCount(count, block)
