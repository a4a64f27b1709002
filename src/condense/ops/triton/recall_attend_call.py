"""Arguments, tiles and lists of opened groups that the kernels of one call of Recall's attention over a prompt share.

Shapes as in `condense.ops.triton.recall_attend`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condense.ops.triton.attend import Tiles, small_tiles
from condense.ops.triton.attend_call import not_empty, row_strides
from condense.ops.triton.descriptors import described
from condense.ops.triton.device.parts import split_width
from condense.ops.triton.host import LOG2E, dense_rows
from condense.ops.triton.recall_opened import OpenedGroups, opened

# largest size in bytes of the words of a block of queries
_WORDS = 2**29


@functools.cache
def tiles_of(kernel: str, dtype: torch.dtype, is_cuda: bool, widest: int, R: int) -> Tiles:
    """Tiles by kernel, dtype, width and heads per KV head.

    A tile of "fwd" or "dq" holds the queries whose bits share a word; "dkv" reads such a tile in parts. For keys 192
    and values 128 wide (expanded latents), 32 keys per tile took 80 ms and 64 took 144 (128K tokens, 16 heads, H200).
    """
    if (small := small_tiles(kernel, dtype, is_cuda, R)) is not None:
        return small
    if kernel == "dkv":
        return Tiles(32, 64, {"num_warps": 4 if widest <= 128 else 8, "num_stages": 3 if widest <= 128 else 2})
    if kernel == "store":
        return Tiles(64, 64, {"num_warps": 4, "num_stages": 2 if widest <= 128 else 1})
    if kernel == "fwd" and widest <= 128 and R > 1:  # a word has at most 64 bits, one per query
        return Tiles(128, 32, {"num_warps": 4, "num_stages": 2})
    if kernel == "fwd" and R == 1 and 128 < widest <= 192:
        return Tiles(64, 32, {"num_warps": 4, "num_stages": 2})
    return Tiles(64, 64, {"num_warps": 4 if widest <= 128 else 8, "num_stages": 2})


class RecallCall(NamedTuple):
    """The arguments of the operations.

    k, v: of entries, store and window. biases: float ``[B|1, K|1, G]``, the entries' own, None for none. groups: int32
    ``[B, K|1, L, r]``, the groups that each query opens, from `condense.ops.triton.recall_choice.choose`. starts, rule:
    fields of `condense.ops.triton.recall_score.Positions`. closed: the most closed groups that a query sees. level: the
    one bias that all entries share. pool: whether queries see entries.
    """

    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    biases: Tensor | None
    groups: Tensor
    starts: Tensor | None
    rule: Sequence[int]
    closed: int
    level: float
    pool: bool
    scale: float
    softcap: float = 0.0

    @property
    def heads(self) -> tuple[int, int]:
        """Number of KV heads, and of heads that choose groups: as many, or 1 that chooses for all."""
        return self.k[0].shape[1], self.groups.shape[1]

    @property
    def group_size(self) -> int:
        """Tokens per group."""
        return self.k[1].shape[2] // self.k[0].shape[2]

    @property
    def kind(self) -> str:
        """As `condense.ops.triton.recall_score.Positions.kind`."""
        return "row" if self.starts is None else "rows"

    @property
    def numerics(self) -> tuple[str, float]:
        """Precision of products, and soft cap of scores, base 2."""
        # tf32x3, three products of the matrix units, is within the error of PyTorch's float32 attention
        return "tf32x3" if self.q.dtype == torch.float32 else "tf32", self.softcap * LOG2E

    def constants(self, *more: float | str) -> tuple[float | str, ...]:
        """Widths of keys and values in parts, then ``more``."""
        return *split_width(self.q.shape[3]), *split_width(self.v[0].shape[3]), *more

    def opened(self, tile: int, first: int, stop: int) -> OpenedGroups:
        """Groups that tiles of ``tile`` queries of ``[first, stop)`` open."""
        return opened(self.groups, self.k[0].shape[2], self.closed, tile, first, stop)

    def blocks(self, tile: int) -> Iterator[tuple[int, int, OpenedGroups]]:
        """Blocks ``[first, stop)`` of queries whose words take at most `_WORDS` bytes; the groups that they open."""
        B, K, L, _ = self.groups.shape
        # a word for each group takes at most 8 bytes
        step = max(1, _WORDS // (8 * B * K * max(self.closed, 1))) * tile
        for first in range(0, L, step):
            stop = min(first + step, L)
            yield first, stop, self.opened(tile, first, stop)


class RecallShared(NamedTuple):
    """Tensors and strides that every kernel of a call takes, in that order."""

    sources: tuple[Any, ...]
    s_store: tuple[int, ...]
    biases: Tensor | None
    s_bias: tuple[int, int]

    @classmethod
    def of(cls, call: RecallCall, keys: int) -> RecallShared:
        """Return the shared arguments of ``call``. keys: keys per tile of entries and of the window."""
        of_k, of_v = (not_empty([x[0], x[2]]) for x in (call.k, call.v))
        described_k, described_v = ([described([x], keys) for x in tensors] for tensors in (of_k, of_v))
        store = dense_rows(call.k[1]), dense_rows(call.v[1])
        biases = None if call.biases is None else (call.biases.float() * LOG2E).contiguous()
        return cls(
            (*described_k[0], *described_v[0], *described_k[1], *described_v[1], *store, biases),
            tuple(stride for x in store for stride in x.stride()[:3]),
            biases,
            (0, 0) if biases is None else row_strides(biases),
        )
