"""What a step tells a condensed layer: which tokens are new, and the pages of each request, for each kind of page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from condense.ops.paged import NewTokens


@dataclass
class CondensedMetadata(AttentionMetadata):
    """One kind of pages in one step. num_tokens: new tokens, without padding. table int32 ``[R, n]``."""

    new: NewTokens
    num_tokens: int
    table: Tensor


class CondensedMetadataBuilder(AttentionMetadataBuilder[CondensedMetadata]):
    """Makes the metadata of a step, for one kind of pages, from what vLLM says of the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # requests with one new token come first
    reorder_batch_threshold: int | None = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CondensedMetadata:
        """The metadata of one step; both other arguments change nothing."""
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.tolist()
        lengths = batch.seq_lens if batch.seq_lens_cpu_upper_bound is None else batch.seq_lens_cpu_upper_bound
        new = NewTokens(starts, lengths.tolist(), batch.seq_lens, _num_steps(starts))
        return CondensedMetadata(new, batch.num_actual_tokens, batch.block_table_tensor)


def _num_steps(starts: list[int]) -> int:
    """How many of the first requests have at most one new token."""
    longer = (i for i, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)) if stop - start > 1)
    return next(longer, len(starts) - 1)
