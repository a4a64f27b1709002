"""The attention backend of condensed layers: one call reads a step's tokens into the pages and attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import KVCacheLayout

from condense.ops.paged import PagedState, Pages, read_paged
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
        """Layouts that keep a layer's pages together; first the one with the slots of a head side by side."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


class CondensedImpl(AttentionImpl[CondensedMetadata]):
    """One layer's attention over its pages."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
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
        """query ``[T, H, D]``, key and value ``[T, K, D]``, output likewise; rows of padding come last."""
        if attn_metadata is None:
            return output.zero_()  # vLLM measures the memory of a forward before there are pages
        tables = get_forward_context().attn_metadata
        pages = {kind: Pages(side.kv_cache, tables[side.layer_name].table) for kind, side in layer.sides.items()}
        state = PagedState(Pages(kv_cache, attn_metadata.table), pages["entries"], pages.get("ring"))
        qkv = query, key, value
        read_paged(qkv, state, attn_metadata.new, layer.plan.settings, scale=self.scale, out=output)
        return output
