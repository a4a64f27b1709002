"""The metadata of a step, for one kind of pages, made from vLLM's description of the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from condense.ops.paged import NewTokens
from condense.serving.blocks import blocks_of_request
from condense.serving.host import copied_bytes, host_bytes

# a child of vLLM's own logger, which alone has a handler
logger = init_logger("vllm.condense")


@dataclass
class CondensedMetadata(AttentionMetadata):
    """The metadata of one kind of pages in one step.

    new: of windows, whose metadata a layer gets as its own; None for other kinds. table: int32 ``[R, n]``, the pages of
    each request.
    """

    new: NewTokens | None
    table: Tensor


class CondensedMetadataBuilder(AttentionMetadataBuilder[CondensedMetadata]):
    """The builder of a step's metadata, for one kind of pages, from vLLM's description of the batch."""

    # vLLM puts requests with up to so many new tokens first
    reorder_batch_threshold: int | None = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._said = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Graphs of single tokens, unless no step of kernels reads these in some layer."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        recorded = all(layer.has_step for layer in layers if hasattr(layer, "has_step"))
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if recorded else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CondensedMetadata:
        """Return the metadata of one step. common_prefix_len and fast_build are not used."""
        batch = common_attn_metadata
        # vLLM's trial runs at its start read page 0 only, some of them in a smaller pool than the one that serves
        if not self._said and int(batch.block_table_tensor[0, 0]) != 0:
            self._said = True
            self._say_concurrency()
        if not isinstance(self.kv_cache_spec, SlidingWindowSpec):
            return CondensedMetadata(None, batch.block_table_tensor)
        starts = batch.query_start_loc_cpu.tolist()
        # the upper bound is exact, because all drafts are refused but those that the host finds
        lengths = batch.seq_lens if batch.seq_lens_cpu_upper_bound is None else batch.seq_lens_cpu_upper_bound
        # requests with at most one new token come first
        longer = (i for i, (start, stop) in enumerate(itertools.pairwise(starts)) if stop - start > 1)
        new = NewTokens(starts, lengths.tolist(), batch.seq_lens, next(longer, len(starts) - 1))
        return CondensedMetadata(new, batch.block_table_tensor)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> CondensedMetadata:
        """Return the metadata of a step without requests, which is given page 0 alone.

        Idle ranks of data parallelism run such steps too. vLLM's older runner may then leave pages of finished requests
        in the table: only the step's slot mapping, which is not used here, says that nothing is to be written.
        """
        common_attn_metadata.block_table_tensor.zero_()
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def _say_concurrency(self) -> None:
        """Log how many of the longest requests the blocks hold.

        vLLM's own figure is too low: for every request it counts pages for a whole batch of tokens being read.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        served = next(layer.model for layer in layers.values() if hasattr(layer, "served"))
        longest = self.vllm_config.model_config.max_model_len
        one = blocks_of_request(served, longest)
        # vLLM gives one block to no request
        held = (layers[self.layer_names[0]].kv_cache.shape[0] - 1) / one.blocks
        on_host, slots = one.blocks * host_bytes(served) / 2**20, copied_bytes(served) / 2**20
        logger.info_once(
            "Concurrency for %s tokens per request, once their prompts are read: %.2fx; each takes %.1f MiB, %.0f%% of "
            "dense attention's, a request of 1,024 tokens %.0f%%%s",
            *(f"{longest:,}", held, one.total_bytes / 2**20, 100 * one.share(served, longest)),
            100 * blocks_of_request(served, 1024).share(served, 1024),
            f"; in host memory each takes {on_host:,.1f} MiB, in slots beside the pages {slots:,.1f}"
            if on_host
            else "",
        )
