"""The attention backend of condensed layers: one call reads a step's tokens into the pages and attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import KVCacheLayout

from condense.ops import Extras
from condense.ops.paged import PagedState, Pages, read_paged
from condense.serving.trial import read_trials
from condense.serving.vllm.metadata import CondensedMetadata, CondensedMetadataBuilder

if TYPE_CHECKING:
    from condense.serving.vllm.layer import CondensedAttention


class CondensedBackend(AttentionBackend):
    """The backend that condensed layers name; vLLM never chooses it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        """vLLM's name for backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CondensedImpl]:
        """The class that computes a layer's attention."""
        return CondensedImpl

    @staticmethod
    def get_builder_cls() -> type[CondensedMetadataBuilder]:
        """The class that makes a step's metadata."""
        return CondensedMetadataBuilder

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False: see `condense.serving.plan.check_engine`."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts with a page's bytes side by side; first the one whose blocks hold pages of different sizes.

        The other is for stock layers on a CPU, which know no third: then pages are padded to one size.
        """
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)


class CondensedImpl(AttentionImpl[CondensedMetadata]):
    """One layer's attention over its pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *args: Any,
        sinks: Tensor | None = None,
    ) -> None:
        """sinks: a logit without a value for each head of this process; its numbers may come later."""
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.extras = Extras(sink_logits=sinks)
        self.kv_cache_dtype = "auto"

    def forward(
        self,
        layer: CondensedAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CondensedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query ``[T, H, D]``, key and value ``[T, K, D]``, output likewise; rows of padding come last.

        On latents their widths are as in `condense.ops.paged.read_paged`.
        """
        if attn_metadata is None:
            output.zero_()
            # before there are pages, vLLM measures the memory of a forward, which should leave nothing to be compiled
            if query.is_cuda and kv_cache.numel() == 0:
                qkv = query, key, value
                read_trials(
                    qkv, layer.served, layer.model, layer.longest, scale=self.scale, out=output, up=layer.up,
                    extras=self.extras,
                )  # fmt: skip
            return output
        tables, dtype = get_forward_context().attn_metadata, layer.served.dtype
        pages = {kind: Pages(side.kv_cache, tables[side.layer_name].table) for kind, side in layer.sides.items()}
        entries, ring = pages["entries"], pages.get("ring")
        if not layer.plan.has_records:
            entries = entries.view(dtype)
        window = Pages(kv_cache, attn_metadata.table).view(dtype)
        state = PagedState(window, entries, None if ring is None else ring.view(dtype), layer.up, self.extras)
        qkv = query, key, value
        read_paged(qkv, state, attn_metadata.new, layer.plan.settings, scale=self.scale, out=output)
        return output
